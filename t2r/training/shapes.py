"""An abstract run: model, state and batch as `jax.ShapeDtypeStruct`s, to lower, compile or count without any data."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from ml_collections import ConfigDict

from t2r.batch import Batch
from t2r.conversion.swap import swap
from t2r.data.pairs import is_pairs
from t2r.errors import InputError
from t2r.model.config import ModelConfig, from_dict, preset
from t2r.model.loss import Teacher
from t2r.model.parameters import Arrays, abstract_model, arrays_of
from t2r.model.transformer import LanguageModel
from t2r.store import model_dir
from t2r.training.config import conversion, has_teacher
from t2r.training.sharding import batch_ways, sequences_per_part
from t2r.training.stages import Stage, make_stages
from t2r.training.step import Step, TrainState, init_state, make_step

# Sentence pairs have many lengths, which depend on the data; an abstract batch has this many tokens per side.
PAIR_LENGTH = 64


class AbstractRun(NamedTuple):
    """What a training step needs, without values."""

    model: LanguageModel
    stage: Stage  # the last one
    state: TrainState  # that of all stages
    batch: Batch  # one of the `accumulate` parts of a step

    def step(self, mesh: Mesh) -> Step:
        """The training step of the last stage on a mesh."""
        return make_step(self.stage.objective, self.stage.optimizer, mesh, self.state)

    @property
    def tokens(self) -> int:
        """Predicted tokens in one part of a step."""
        sequences, tokens = self.batch.tokens.shape
        return sequences * (tokens - 1)


def abstract_run(config: ConfigDict, mesh: Mesh) -> AbstractRun:
    """The abstract run of a config."""
    model = abstract_converted_model(config)
    teacher = None
    if has_teacher(config):
        soft = config.teacher.soft, config.teacher.soft_top_k
        teacher = Teacher(abstract_model(base_architecture(config)), *soft)

    stages = make_stages(config, model, teacher)

    def first_state(arrays: Arrays, teacher_arrays: Arrays | None) -> TrainState:
        return init_state(arrays, stages.learning, stages.optimizer, config.seed, teacher=teacher_arrays)

    state = jax.eval_shape(first_state, arrays_of(model), teacher and arrays_of(teacher.model))
    return AbstractRun(model, stages.all[-1], state, abstract_part(config, batch_ways(mesh)))


def abstract_converted_model(config: ConfigDict) -> LanguageModel:
    """The abstract model that a config trains, after conversion."""
    model, plan = abstract_model(base_architecture(config)), conversion(config)
    return jax.eval_shape(lambda: swap(model, **plan)) if plan else model


def base_architecture(config: ConfigDict) -> ModelConfig:
    """The model config before conversion: that of `init_from`, or of `init_preset` if that directory does not exist.

    Without either: config.model.
    """
    if not config.init_from and not config.init_preset:
        return from_dict({**config.model, **_vocabulary(config)})
    if config.init_from and (path := model_dir.resolve(config.init_from)).exists():
        return model_dir.load_config(path, **config.model)
    if not config.init_preset:
        raise InputError(
            f"config.init_from: no {config.init_from}. Train it first, or set config.init_preset to its architecture"
        )
    return preset(config.init_preset, **{**config.model, **_vocabulary(config)})


def _vocabulary(config: ConfigDict) -> dict:
    """The model config fields that the tokenizer, which does not exist yet, will determine."""
    data = config.data
    sizes = {"vocab_size": data.vocab_size} if data.vocab_size else {}
    if is_pairs(data.source) and not data.joint_tokenizer:
        sizes |= {"source_vocab_size": data.source_vocab_size or data.vocab_size, "shared_embedding": False}
    return sizes


def abstract_part(config: ConfigDict, ways: int) -> Batch:
    """The abstract batch of one part of a step; pairs have PAIR_LENGTH tokens per side."""

    def ids(sequences: int, length: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((sequences, length), jnp.int32)

    if not is_pairs(config.data.source):
        return Batch(ids(sequences_per_part(config, ways), config.data.length + 1))
    tokens = config.data.batch_tokens // config.accumulate
    pairs = max(tokens // PAIR_LENGTH // ways, 1) * ways
    return Batch(ids(pairs, PAIR_LENGTH + 1), ids(pairs, PAIR_LENGTH))

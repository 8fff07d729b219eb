"""A run as shapes: its model, state and batches without weights or data, to be lowered, compiled or counted."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from ml_collections import ConfigDict

from t2r.batch import Batch
from t2r.conversion.swap import swap
from t2r.data.pairs import is_pairs
from t2r.errors import InputError
from t2r.model.config import ModelConfig, from_dict, preset
from t2r.model.loss import Teacher
from t2r.model.parameters import Arrays, abstract_model, arrays_of, trainable_names
from t2r.model.transformer import LanguageModel
from t2r.store import model_dir
from t2r.training.config import conversion, has_teacher
from t2r.training.optimizer import make_optimizer
from t2r.training.sharding import batch_ways, sequences_per_part
from t2r.training.step import Objective, Step, TrainState, init_state, make_step

# Pairs are of many lengths, which only the data knows: tokens a side of those that shapes are made for.
PAIR_LENGTH = 64


class RunShapes(NamedTuple):
    """All arrays are shapes and types."""

    model: LanguageModel
    optimizer: optax.GradientTransformation
    state: TrainState
    batch: Batch  # one of the `accumulate` parts of a step
    teacher: Teacher | None = None

    def step(self, mesh: Mesh, smoothing: float) -> Step:
        return make_step(Objective(self.model, smoothing, self.teacher), self.optimizer, mesh, self.state)

    @property
    def tokens(self) -> int:
        """Tokens of a part that are predicted."""
        rows, width = self.batch.tokens.shape
        return rows * (width - 1)


def run_of_shapes(config: ConfigDict, mesh: Mesh) -> RunShapes:
    """What a config trains."""
    model = model_of_shapes(config)
    optimizer = make_optimizer(config.optimizer, config.steps)
    trained = trainable_names(model, config.trainable)
    teacher = Teacher(abstract_model(architecture_of(config)), config.teacher.soft) if has_teacher(config) else None

    def first_state(arrays: Arrays, known: Arrays | None) -> TrainState:
        return init_state(arrays, trained, optimizer, config.seed, teacher=known)

    state = jax.eval_shape(first_state, arrays_of(model), teacher and arrays_of(teacher.model))
    return RunShapes(model, optimizer, state, part_of_shapes(config, batch_ways(mesh)), teacher)


def model_of_shapes(config: ConfigDict) -> LanguageModel:
    """Its model, converted as the config says."""
    model, plan = abstract_model(architecture_of(config)), conversion(config)
    return jax.eval_shape(lambda: swap(model, **plan)) if plan else model


def architecture_of(config: ConfigDict) -> ModelConfig:
    """The model config before conversion: of `init_from` if it is there, of its preset if not, or the config's own."""
    if not config.init_from:
        return from_dict({**config.model, **_vocabulary(config)})
    path = model_dir.resolve(config.init_from)
    if path.exists():
        return model_dir.load_config(path, **config.model)
    if not config.init_preset:
        raise InputError(f"no {path}, and config.init_preset does not say what it will be: train it first, or set that")
    return preset(config.init_preset, **{**config.model, **_vocabulary(config)})


def _vocabulary(config: ConfigDict) -> dict:
    """What the tokenizer would say."""
    data = config.data
    sizes = {"vocab_size": data.vocab_size} if data.vocab_size else {}
    if is_pairs(data.source) and not data.joint_tokenizer:
        sizes |= {"source_vocab_size": data.source_vocab_size or data.vocab_size, "shared_embedding": False}
    return sizes


def part_of_shapes(config: ConfigDict, ways: int) -> Batch:
    """One part of a step; of pairs, with PAIR_LENGTH tokens a side."""

    def ids(rows: int, width: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((rows, width), jnp.int32)

    if not is_pairs(config.data.source):
        return Batch(ids(sequences_per_part(config, ways), config.data.length + 1))
    tokens = config.data.batch_tokens // config.accumulate
    rows = max(tokens // PAIR_LENGTH // ways, 1) * ways
    return Batch(ids(rows, PAIR_LENGTH + 1), ids(rows, PAIR_LENGTH))

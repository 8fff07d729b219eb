"""Builds the model that a config trains (loaded or randomly initialised, converted if asked) and its teacher."""

from pathlib import Path
from typing import Any, NamedTuple

from flax import nnx
from ml_collections import ConfigDict

from t2r.conversion.swap import swap
from t2r.data.tokenizer import Tokenizer, TokenizerPair
from t2r.errors import InputError
from t2r.model.config import from_dict
from t2r.model.loss import Teacher
from t2r.model.transformer import LanguageModel, make_model
from t2r.store import model_dir
from t2r.training.config import conversion, has_teacher
from t2r.training.keep import with_layers_chosen
from t2r.training.task import learn_tokenizer


class Built(NamedTuple):
    """A model before its first training step, with its tokenizer and provenance."""

    model: LanguageModel
    tokenizer: Tokenizer | TokenizerPair
    history: list[dict]  # earlier actions on this model (import, swap, train, ...), oldest first


def build(config: ConfigDict, workdir: Path) -> Built:
    """Loads `init_from`, or initialises a model at random and trains its tokenizer on the data; then converts it."""
    model, tokenizer, history = _pretrained(config) if config.init_from else _random(config, workdir)
    if plan := conversion(config):
        plan, measured = with_layers_chosen(config, workdir, model_dir.LoadedModel(model, tokenizer, {}), plan)
        model = swap(model, **plan)
        history = [*history, {"action": "swap", **plan, **measured}]
    return Built(model, tokenizer, history)


def _pretrained(config: ConfigDict) -> tuple[LanguageModel, Tokenizer | TokenizerPair, list[dict]]:
    try:
        model, tokenizer, provenance = model_dir.load(config.init_from, **config.model)
    except InputError as error:
        raise InputError(f"config.init_from={config.init_from!r}: {error}. Set --config.init_from=MODEL") from None
    return model, tokenizer, provenance["history"]


def _random(config: ConfigDict, workdir: Path) -> tuple[LanguageModel, Tokenizer | TokenizerPair, list[dict]]:
    tokenizer = learn_tokenizer(config, workdir)
    architecture = from_dict({**config.model, **_vocabulary(tokenizer)})
    return make_model(architecture, rngs=nnx.Rngs(config.seed)), tokenizer, []


def load_teacher(config: ConfigDict) -> Teacher | None:
    """The unconverted model, if the config distils from it."""
    if not has_teacher(config):
        return None
    # Loaded a second time: the student's arrays are donated to the training step.
    model = model_dir.load(config.init_from, dtype=config.model.dtype).model
    return Teacher(model, config.teacher.soft, config.teacher.soft_top_k)


def _vocabulary(tokenizer: Tokenizer | TokenizerPair) -> dict[str, Any]:
    """The model config fields that the tokenizer determines."""
    if not isinstance(tokenizer, TokenizerPair):
        return {"vocab_size": tokenizer.vocab_size}
    sizes = {"vocab_size": tokenizer.target.vocab_size, "source_vocab_size": tokenizer.source.vocab_size}
    return sizes if tokenizer.joint else {**sizes, "shared_embedding": False}

"""t2r: turn a pretrained transformer into a recurrent network (Kasai et al., 2021).

From a model to text:

    import t2r

    model = t2r.load("builtin:stories")                     # or a directory that `t2r import` or `t2r train` wrote
    print(t2r.evaluate(model, "builtin:stories", documents=True))  # perplexities on the test split
    rnn = t2r.convert(model, features=32, keep="none")      # linear attention in place of softmax; must be finetuned:
    config = t2r.load_config("stories:t2r")                 # the same conversion as a run
    result = t2r.train(config, "runs/stories_t2r")
    rnn = t2r.merge(t2r.load(result["model"]))              # φ folded into the projections
    print(t2r.generate(rnn, "Once upon a time", length=150, temperature=0.7))
    t2r.save(rnn, "runs/stories_rnn")

Everything else is a module away: `t2r.attention` is the subject, `t2r.decode` generates, `t2r.training` trains.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ml_collections import ConfigDict

    from t2r.store.model_dir import LoadedModel

__version__ = "0.2.0"
__all__ = [
    "convert",
    "convert_and_finetune",
    "evaluate",
    "for_decoding",
    "generate",
    "import_model",
    "load",
    "load_config",
    "merge",
    "save",
    "train",
    "translate",
]

# Functions import what they need when they are called: `import t2r` alone loads neither JAX nor Flax.


def load(path: str | Path, **runtime: Any) -> "LoadedModel":
    """A model with its tokenizer and provenance, from a directory, `builtin:NAME`, or `ORG/NAME` of the hub.

    `runtime` changes how it runs, not what it computes: dtype="bfloat16", kernels="off".
    """
    from t2r.importers import by_name

    return by_name.load(path, **runtime)


def _loaded(model: "LoadedModel | str | Path") -> "LoadedModel":
    """A loaded model; a path is loaded first, anything else is an error."""
    from t2r.errors import InputError
    from t2r.store.model_dir import LoadedModel

    if isinstance(model, (str, Path)):
        return load(model)
    if not isinstance(model, LoadedModel):
        raise InputError(
            f"a {type(model).__name__} is not a model with its tokenizer: give what t2r.load returns, or a path"
        )
    return model


def save(model: "LoadedModel", path: str | Path) -> None:
    """Writes a model directory, which must not exist yet."""
    from t2r.store import model_dir

    model_dir.save(Path(path), model)


def import_model(source: str | Path, output: str | Path, **options: str) -> "LoadedModel":
    """A model of Hugging Face's, fairseq's or llama.cpp's, written as a model directory and loaded."""
    from t2r.importers import source as importers

    importers.import_model(source, output, **options)
    return load(output)


def convert(
    model: "LoadedModel",
    *,
    feature_map: str = "t2r",
    features: int | None = None,
    cross_features: int | None = None,
    window: int = 0,
    sinks: int = 0,
    keep: str | Sequence[int] = "none",
    cross_keep: str | Sequence[int] | None = None,
    attention: str = "all",
    seed: int = 0,
) -> "LoadedModel":
    """The model with linear attention in place of softmax, in all layers but those kept. It must then be finetuned.

    `keep` is none, every_4th (from the top, the paper's T2R 75%), or layer numbers such as "0,4,8" or [0, 4, 8];
    `cross_keep` is the same for cross attention in translation models (None: as `keep`);
    `features` is the size of φ (default: the map's own); with a `window`, causal attention stays exact for the last
    `window` and the first `sinks` tokens; `attention` is all, causal or cross, in translation models.
    """
    from t2r.conversion.directory import convert_model

    sizes = dict(features=features, cross_features=cross_features, window=window, sinks=sinks)
    as_text = lambda kept: kept if isinstance(kept, str) else ",".join(map(str, kept)) or "none"  # noqa: E731
    kept = dict(keep=as_text(keep), cross_keep=None if cross_keep is None else as_text(cross_keep))
    return convert_model(_loaded(model), feature_map=feature_map, attention=attention, seed=seed, **kept, **sizes)


def convert_and_finetune(source: str | Path, output: str | Path, **options: Any) -> dict[str, Any]:
    """All of `t2r convert --finetune`, from a model directory or a model to import to a finetuned RNN and a report.

    Options as in `t2r.workflow.convert`: data="text:FILE", steps=2000, keep="auto:4", window=64, ... Returns a summary.
    """
    from t2r.workflow.convert import convert_and_finetune

    return convert_and_finetune(source, output, **options)


def merge(model: "LoadedModel") -> "LoadedModel":
    """The model for inference: φ folded into the projections of every T2R attention."""
    from t2r.conversion.directory import merge_model

    return merge_model(_loaded(model))


def for_decoding(model: "LoadedModel", weights: str = "int8") -> "LoadedModel":
    """The model for fast decoding on CPUs, with matrices in 8 bits or, with `weights="float32"`, only laid out anew.

    It generates, translates and is evaluated; it cannot be trained, converted or saved.
    """
    from t2r.errors import InputError
    from t2r.model import rows

    if weights not in rows.WEIGHTS:
        raise InputError(f"weights={weights!r}: choose one of {', '.join(rows.WEIGHTS)}")
    loaded = _loaded(model)
    return loaded._replace(model=rows.for_decoding(loaded.model, weights))


def generate(
    model: "LoadedModel",
    prompt: str | Sequence[str] = "",
    length: int = 100,
    *,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
) -> str | list[str]:
    """What follows a prompt, up to `length` tokens; for a list of prompts, a list. Greedy at temperature 0."""
    from t2r.decode.sampling import Sampling
    from t2r.decode.text import generate_text

    prompts = [prompt] if isinstance(prompt, str) else list(prompt)
    if not prompts:
        return []
    sampling = Sampling(temperature, top_k, top_p)
    texts = generate_text(_loaded(model), prompts, length, sampling=sampling, seed=seed).texts
    return texts[0] if isinstance(prompt, str) else texts


def translate(
    model: "LoadedModel", lines: str | Sequence[str], *, beam: int = 5, length_penalty: float = 0.6
) -> str | list[str]:
    """The best translation of a line, or of each line of a list."""
    from t2r.decode.beam import Beam
    from t2r.decode.translator import TranslateOptions, translate_lines

    given = [lines] if isinstance(lines, str) else list(lines)
    found = translate_lines(_loaded(model), given, TranslateOptions(beam=Beam(beam, length_penalty)))
    texts = [translations[0].text for translations in found]
    return texts[0] if isinstance(lines, str) else texts


def evaluate(model: "LoadedModel", data: str, *, split: str | None = None, **options: Any) -> dict[str, Any]:
    """Perplexities on text, BLEU and chrF on sentence pairs. `data` is builtin:NAME, text:PATH, pairs:SOURCE,TARGET,
    tsv:PATH or tfds:NAME; options as in `t2r.evaluation.score`."""
    from t2r.evaluation.score import evaluate

    return evaluate(_loaded(model), data, split=split, **options)


def load_config(name: str) -> "ConfigDict":
    """The config of a run, `PATH.py:VARIANT`, or one that ships: "stories:t2r". Its fields may be changed."""
    from t2r.training.config import load_config

    return load_config(name)


def train(config: "ConfigDict | str", workdir: str | Path) -> dict[str, Any]:
    """Runs a config, or the one of this name, to its end, from the newest checkpoint in the work directory if any."""
    from t2r.training.trainer import train

    return train(load_config(config) if isinstance(config, str) else config, Path(workdir))

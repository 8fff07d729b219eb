"""Exported models: a directory of arrays, StableHLO functions, the tokenizer, and documentation."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from t2r import environment
from t2r.batch import PADDING
from t2r.data.tokenizer import Tokenizer, TokenizerPair, decoder_start_ids, stop_ids
from t2r.export import readme
from t2r.export.functions import PLATFORMS, Function, Sizes, longest, lower
from t2r.extras import require
from t2r.files import atomic_directory, check_free
from t2r.importers import by_name
from t2r.model.parameters import arrays_of, parameter_count
from t2r.store import tensors
from t2r.store.model_dir import LoadedModel

FORMAT = "t2r-export/1"
EXAMPLES = Path(__file__).parent / "examples"


def export_model(
    name: str, output: str | Path, *, batch: int | None = None, capacity: int | None = None, dtype: str = "float32"
) -> dict[str, Any]:
    """Exports a model directory; `capacity` is the most tokens of a sequence, needed only for softmax layers."""
    require("flatbuffers", "export")  # which jax.export writes with
    output, sizes = Path(output), Sizes(batch, capacity)
    check_free(output)
    loaded = by_name.load(name, dtype=dtype)
    entry = {"action": "export", "source": name, "dtype": dtype, **sizes._asdict()}
    loaded = loaded._replace(provenance={"history": [*loaded.provenance["history"], entry]})
    about = save(output, loaded, sizes)
    return {
        "output": str(output),
        "files": {
            str(file.relative_to(output)): file.stat().st_size for file in sorted(output.rglob("*")) if file.is_file()
        },
        "parameters": parameter_count(arrays_of(loaded.model)),
        "state_bytes": state_bytes(about, b=batch or 1, m=0),  # without the cached source of a translation model
        "platforms": about["platforms"],
        "longest": about["longest"],
    }


def save(path: Path, content: LoadedModel, sizes: Sizes = Sizes()) -> dict[str, Any]:
    """Writes the directory atomically, and returns the content of its export.json."""
    model, tokenizer, _ = content
    check_free(path)
    with atomic_directory(path) as folder:
        functions = lower(model.config, sizes)
        about = describe(content, functions, sizes)
        for name, function in functions.items():
            (folder / f"{name}.stablehlo").write_bytes(function.exported.serialize())
        weights = {name: array.astype(model.config.dtype) for name, array in arrays_of(model).items()}
        tensors.write(folder / "model.safetensors", weights, model.config.dtype)
        tokenizer.save(folder)
        (folder / "export.json").write_text(json.dumps(about, indent=1, ensure_ascii=False) + "\n", "utf-8")
        (folder / "README.md").write_text(readme.write(path.name, model.config, functions, about), "utf-8")
        (folder / "example.py").write_text(example(tokenizer), "utf-8")
    return about


def describe(content: LoadedModel, functions: dict[str, Function], sizes: Sizes) -> dict[str, Any]:
    """The content of export.json: what a program needs to call the functions. In shapes, `b` is the batch size and `m`
    the length of sources."""
    model, tokenizer, provenance = content
    arrays = {}
    for function in functions.values():
        arrays |= function.arguments | function.results
    return {
        "format": FORMAT,
        "family": "seq2seq" if model.config.encoder_layers else "language_model",
        "batch": sizes.batch,
        "capacity": sizes.capacity,
        "longest": longest(model.config, sizes.capacity),
        "padding": PADDING,
        "platforms": list(PLATFORMS),
        "calling_convention_version": functions["step"].exported.calling_convention_version,
        "functions": {
            name: {
                "file": f"{name}.stablehlo",
                "arguments": list(function.arguments),
                "results": list(function.results),
            }
            for name, function in functions.items()
        },
        "arrays": {name: _signature(value) for name, value in arrays.items()},
        "tokenizer": _describe_tokenizer(tokenizer),
        "config": model.config.to_dict(),
        "provenance": provenance,
        "environment": environment.describe(),
    }


def _signature(value: Any) -> dict[str, Any]:
    """Shape and type of an array, or of each array in a dict."""
    if isinstance(value, dict):
        return {name: _signature(array) for name, array in value.items()}
    shape = [size if isinstance(size, int) else str(size) for size in value.shape]
    return {"shape": shape, "dtype": jnp.dtype(value.dtype).name}


def state_bytes(about: dict[str, Any], **sizes: int) -> int:
    """Bytes of the state; `sizes` gives `b` and `m`."""
    state = about["arrays"]["state"].values()
    shapes = [jax.ShapeDtypeStruct([sizes.get(n, n) for n in a["shape"]], a["dtype"]) for a in state]
    return environment.total_bytes(shapes)


def _describe_tokenizer(tokenizer: Tokenizer | TokenizerPair) -> dict[str, Any]:
    """The tokenizer's kind, its folder, and the special tokens that a program needs."""
    if not isinstance(tokenizer, TokenizerPair):
        before = [tokenizer.end] if tokenizer.begins else []
        ids = {"before": before, "end": tokenizer.end, "stops": list(stop_ids(tokenizer))}
        return {"kind": tokenizer.kind, "folder": ".", **ids}
    source, target = tokenizer
    before, after = around(tokenizer.encode_source("a"), source.encode("a"))
    folders = (".", ".") if tokenizer.joint else ("source", "target")
    return {
        "source": {"kind": source.kind, "folder": folders[0], "before": before, "after": after},
        "target": {
            "kind": target.kind,
            "folder": folders[1],
            "start": list(decoder_start_ids(target)),
            "stop": target.stop,
        },
    }


def around(whole: list[int], inside: list[int]) -> tuple[list[int], list[int]]:
    """The special tokens before and after a sentence's own tokens."""
    position = next(i for i in range(len(whole)) if whole[i : i + len(inside)] == inside)
    return whole[:position], whole[position + len(inside) :]


def example(tokenizer: Tokenizer | TokenizerPair) -> str:
    """The source of example.py, which runs the model; it includes code for this kind of tokenizer."""
    translates = isinstance(tokenizer, TokenizerPair)
    kind = tokenizer.target.kind if translates else tokenizer.kind
    program = (EXAMPLES / f"{'translation' if translates else 'language_model'}.py").read_text("utf-8")
    lines = (
        (EXAMPLES / f"tokenizer_{kind}.py").read_text("utf-8").removeprefix("import json\n").lstrip()
    )  # the program has it
    between = "" if lines.startswith("from") else "\n\n"
    return program.replace("from tokenizer_sentencepiece import tokenizer\n", f"{between}{lines}\n")

"""Exports a model as a directory that `transformers` loads with trust_remote_code=True: weights, config, tokenizer, a
model card, and the model itself in plain torch (the files in torch_model/), without t2r and JAX."""

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from t2r.data.tokenizer import Hub, Tokenizer, TokenizerPair, Words, decoder_start_ids, stop_ids
from t2r.errors import InputError
from t2r.export import card
from t2r.export.directory import EXAMPLES, around
from t2r.extras import require
from t2r.files import atomic_directory, check_free
from t2r.importers import by_name
from t2r.model.config import RUNTIME_FIELDS, ModelConfig
from t2r.model.parameters import arrays_of, parameter_count
from t2r.store import tensors
from t2r.store.model_dir import LoadedModel

CODE = Path(__file__).parent / "torch_model"
DTYPES = ("float32", "bfloat16")


def export_model(name: str, output: str | Path, *, dtype: str = "float32") -> dict[str, Any]:
    """Exports a model directory to Hugging Face's form, its weights as `dtype`; returns a summary."""
    output = Path(output)
    check_free(output)
    loaded = by_name.load(name)
    save(output, loaded, dtype=dtype, report=card.find_report(by_name.directory(name)))
    files = sorted(file for file in output.rglob("*") if file.is_file())
    return {
        "output": str(output),
        "files": {str(file.relative_to(output)): file.stat().st_size for file in files},
        "parameters": parameter_count(arrays_of(loaded.model)),
    }


def save(path: Path, content: LoadedModel, *, dtype: str = "float32", report: Mapping[str, Any] | None = None) -> None:
    """Writes the directory atomically; scores of the `report` of its conversion go into the model card."""
    config, tokenizer = content.model.config, content.tokenizer
    check_free(path)
    with atomic_directory(path) as folder:
        arrays = torch_arrays(config, arrays_of(content.model))
        tensors.write(folder / "model.safetensors", arrays, dtype, metadata={"format": "pt"})
        for name in ("configuration_t2r.py", "modeling_t2r.py"):
            shutil.copyfile(CODE / name, folder / name)
        _write_json(folder / "config.json", config_json(config, tokenizer, dtype))
        _write_json(folder / "generation_config.json", generation_json(tokenizer))
        save_tokenizer(folder, config, tokenizer)
        (folder / "README.md").write_text(card.write(path.name, content, report), "utf-8")


# Names and layouts of torch: a linear layer's weight is (outputs, inputs).
RENAMED = (
    (r"^(blocks|positions|embedding_norm|final_norm)\b", r"decoder.\1"),
    (r"\bkernel$", "weight"),
    (r"\bscales?$", "weight"),
    (r"\bpositions$", "positions.weight"),
    (r"\bembedding\.table$", "embedding.weight"),
)


def torch_arrays(config: ModelConfig, arrays: Mapping[str, jax.Array]) -> dict[str, np.ndarray]:
    """The weights under the names and in the layouts of modeling_t2r.py."""
    renamed = {}
    for name, array in arrays.items():
        array = np.asarray(array)
        if name.endswith("feature_map.pool"):  # of whose draws the first is used; with σ, it is the directions
            array = array[0] * np.asarray(arrays[name.replace(".pool", ".sigma")])[:, None]
            name = name.replace(".pool", ".directions")
        elif name.endswith("feature_map.sigma"):
            continue
        elif name.endswith("out.kernel"):  # (heads, head size, width)
            array = array.reshape(-1, array.shape[-1]).T
        elif name.endswith(".kernel"):  # (width, outputs), or (width, heads, size)
            array = array.reshape(len(array), -1).T
        elif re.search(r"\b(query|key|value)\.bias$", name):
            array = array.reshape(-1)
        for pattern, replacement in RENAMED:
            name = re.sub(pattern, replacement, name)
        renamed[name] = array
    return renamed


def config_json(config: ModelConfig, tokenizer: Tokenizer | TokenizerPair, dtype: str) -> dict[str, Any]:
    """The content of config.json."""
    translates = bool(config.encoder_layers)
    head = "T2RForSeq2SeqLM" if translates else "T2RForCausalLM"
    auto = "AutoModelForSeq2SeqLM" if translates else "AutoModelForCausalLM"
    ids = special_ids(tokenizer)
    return {
        "model_type": "t2r",
        "architectures": [head],
        "auto_map": {"AutoConfig": "configuration_t2r.T2RConfig", auto: f"modeling_t2r.{head}"},
        "architecture": {name: value for name, value in config.to_dict().items() if name not in RUNTIME_FIELDS},
        "dtype": dtype,
        "vocab_size": config.vocab_size,
        "hidden_size": config.width,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        **({"max_position_embeddings": config.max_positions} if config.max_positions else {}),
        "is_encoder_decoder": translates,
        "tie_word_embeddings": False,  # the model ties its tables itself
        "use_cache": True,
        **{name: ids[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")},
    }


def special_ids(tokenizer: Tokenizer | TokenizerPair) -> dict[str, Any]:
    """The tokens with a meaning, by the names of transformers; None where there is none."""
    if not isinstance(tokenizer, TokenizerPair):
        stops = [stop for stop in stop_ids(tokenizer) if stop >= 0]
        padding = getattr(tokenizer, "padding", None)
        return {
            "bos_token_id": tokenizer.end,
            "eos_token_id": stops[0] if len(stops) == 1 else stops or None,
            "pad_token_id": padding if padding is not None else (stops or [tokenizer.end])[0],
            "decoder_start_token_id": None,
        }
    target = tokenizer.target
    padding = getattr(target, "padding", None)
    return {
        "bos_token_id": None,
        "eos_token_id": target.stop,
        "pad_token_id": target.stop if padding is None else padding,
        "decoder_start_token_id": target.start,
    }


def generation_json(tokenizer: Tokenizer | TokenizerPair) -> dict[str, Any]:
    """The content of generation_config.json: for translation, the beam search of `t2r translate`."""
    content = {name: value for name, value in special_ids(tokenizer).items() if value is not None}
    if isinstance(tokenizer, TokenizerPair):
        start, *second = decoder_start_ids(tokenizer.target)
        padding, stop = getattr(tokenizer.target, "padding", None), tokenizer.target.stop
        never = sorted({start, padding} - {stop, None})
        content |= {"num_beams": 5, "length_penalty": 0.6, "min_new_tokens": 1, "max_new_tokens": 256}
        content |= {"suppress_tokens": never} if never else {}
        content |= {"forced_bos_token_id": second[0]} if second else {}
    return content


def save_tokenizer(folder: Path, config: ModelConfig, tokenizer: Tokenizer | TokenizerPair) -> None:
    """Writes files that AutoTokenizer reads: a tokenizer.json as it is, other kinds with a class of their own."""
    one = tokenizer.target if isinstance(tokenizer, TokenizerPair) else tokenizer
    names = save_hub(folder, tokenizer) if isinstance(one, Hub) else save_own(folder, config, tokenizer)
    settings = {
        "padding_side": "right" if isinstance(tokenizer, TokenizerPair) else "left",
        "clean_up_tokenization_spaces": False,
        **({"model_max_length": config.max_positions} if config.max_positions else {}),
    }
    ids = special_ids(tokenizer)
    for name in ("bos", "eos", "pad"):
        value = ids[f"{name}_token_id"]
        value = value[0] if isinstance(value, list) else value
        if value is not None:
            settings[f"{name}_token"] = names[value]
    if isinstance(one, Hub):
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    else:
        settings["tokenizer_class"] = "T2RTokenizer"
        settings["auto_map"] = {"AutoTokenizer": ["tokenization_t2r.T2RTokenizer", None]}
    _write_json(folder / "tokenizer_config.json", settings)


def save_hub(folder: Path, tokenizer: Hub | TokenizerPair) -> "_Names":
    """Writes tokenizer.json; of a translation model with the special tokens around a source. Returns its tokens."""
    pair = isinstance(tokenizer, TokenizerPair)
    if pair and not tokenizer.joint:
        raise InputError("a model with two files tokenizer.json cannot be exported: transformers has one")
    content = tokenizer.target.content if pair else tokenizer.content
    tokens = require("tokenizers", "hub").Tokenizer.from_str(content)
    if pair:
        special = around(tokenizer.encode_source("a"), tokenizer.source.encode("a"))
        before, after = ([(tokens.id_to_token(i), i) for i in ids] for ids in special)
        template = " ".join([*(token for token, _ in before), "$A", *(token for token, _ in after)])
        processors = require("tokenizers.processors", "hub")
        named = list(dict.fromkeys(before + after))
        tokens.post_processor = processors.TemplateProcessing(single=template, special_tokens=named)
        content = tokens.to_str()
    (folder / "tokenizer.json").write_text(content, "utf-8")
    if not pair and tokenizer.chat_template is not None:
        (folder / Hub.template_file).write_text(tokenizer.chat_template, "utf-8")
    return _Names(tokens)


class _Names:
    """The tokens of a tokenizer.json, by id."""

    def __init__(self, tokens: Any):
        self._tokens = tokens

    def __getitem__(self, i: int) -> str:
        return self._tokens.id_to_token(i)


def save_own(folder: Path, config: ModelConfig, tokenizer: Tokenizer | TokenizerPair) -> list[str]:
    """Writes the tokenizer's files and tokenization_t2r.py, which reads them; returns the target's tokens."""
    tokenizer.save(folder)
    pair = isinstance(tokenizer, TokenizerPair)
    source, target = tokenizer if pair else (tokenizer, tokenizer)
    folders = ("source", "target") if pair and not tokenizer.joint else (".", ".")
    if pair:
        special = [around(tokenizer.encode_source("a"), source.encode("a")), ([], [target.stop])]
    else:
        special = [([tokenizer.end] if tokenizer.begins else [], [])] * 2
    sides = {
        name: {
            "folder": place,
            "before": list(before),
            "after": list(after),
            "special": _special(side, tokenizer),
            "tokens": _padded(side.tokens(), size),
        }
        for name, place, side, (before, after), size in zip(
            ("source", "target"), folders, (source, target), special, (config.source_vocab_size, config.vocab_size)
        )
    }
    _write_json(folder / "tokenizer_t2r.json", sides)
    files = [path for place in dict.fromkeys(folders) for path in sorted((folder / place).glob("*"))]
    own = [str(path.relative_to(folder)) for path in files if path.is_file() and path.name in _files(target)]
    listed = {"sides_file": "tokenizer_t2r.json", **{f"file_{i}": name for i, name in enumerate(own)}}
    (folder / "tokenization_t2r.py").write_text(_tokenization(target.kind, listed), "utf-8")
    return sides["target"]["tokens"]


def _files(tokenizer: Tokenizer) -> set[str]:
    """The names of the files that a tokenizer may write."""
    names = ("file", "ids_file", "vocabulary_file", "languages_file")
    return {getattr(tokenizer, name) for name in names if hasattr(tokenizer, name)}


def _special(side: Tokenizer, tokenizer: Tokenizer | TokenizerPair) -> list[int]:
    """The tokens that are not text. In those of whole words, the end token is: a line end."""
    if isinstance(side, Words):
        return []
    found = [value for value in special_ids(tokenizer).values() if value is not None]
    return sorted({i for value in found for i in (value if isinstance(value, list) else [value])})


def _padded(tokens: list[str], size: int) -> list[str]:
    """One token for each of the model's embeddings, which may be more than the tokenizer has."""
    return tokens + [f"<unused_{i}>" for i in range(len(tokens), size)]


def _tokenization(kind: str, files: dict[str, str]) -> str:
    """The source of tokenization_t2r.py, with the code for this kind of tokenizer."""
    program = (CODE / "tokenization_t2r.py").read_text("utf-8")
    lines = (EXAMPLES / f"tokenizer_{kind}.py").read_text("utf-8").removeprefix("import json\n").strip()
    imports, _, function = lines.rpartition("def tokenizer(folder):")
    program = program.replace("from tokenizer_sentencepiece import tokenizer\n", f"{imports.strip()}\n".lstrip("\n"))
    program = program.replace("class T2RTokenizer", f"def tokenizer(folder):{function}\n\n\nclass T2RTokenizer", 1)
    return program.replace("FILES  # replaced by the files of this model", repr(files))


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", "utf-8")

"""Reads fairseq checkpoints: language models, also with adaptive embeddings (Baevski & Auli, 2019), and translation.

In this file `c` holds the settings of a checkpoint; `bands` are the names of its adaptive embeddings' frequency bands.
"""

import itertools
import re
from pathlib import Path
from typing import Any

import numpy as np

from t2r.errors import InputError, raise_all
from t2r.importers import torch_file
from t2r.importers.names import TensorRule, load, transposed
from t2r.importers.rules import Fields
from t2r.importers.torch_file import Shell, Tensor
from t2r.importers.translation_models import stack_rules
from t2r.model.config import ModelConfig, from_dict

LANGUAGE_MODELS = "transformer_lm"  # and all names that begin with it
TRANSLATION_MODELS = (
    "transformer", "transformer_tiny", "transformer_iwslt_de_en", "transformer_wmt_en_de", "transformer_wmt_en_de_big",
    "transformer_wmt_en_de_big_t2t", "transformer_vaswani_wmt_en_de_big", "transformer_vaswani_wmt_en_fr_big",
)  # fmt: skip
ACTIVATIONS = {"relu": "relu", "gelu": "gelu_exact", "gelu_accurate": "gelu", "gelu_fast": "gelu"}
# Settings that change a model's function or its input, and that our model does not support.
REFUSED = (
    "character_embeddings", "char_inputs", "no_cross_attention", "cross_self_attention", "merge_src_tgt_embed",
    "base_layers", "scale_attn", "scale_fc", "scale_heads", "scale_resids", "encoder_xformers_att_config",
    "decoder_xformers_att_config", "encoder_layers_to_keep", "decoder_layers_to_keep", "add_bos_token",
)  # fmt: skip
IGNORED = (
    r".*\.version",
    r".*\._float_tensor",
    r".*\.embed_positions\.weights",
    # fairseq 0.12 keeps copies of an encoder layer's weights for a fused kernel, and refills them when it loads one.
    r"encoder\.layers\.\d+\.(in_proj|out_proj|fc1|fc2)_(weight|bias)",
)  # version and type markers, sinusoidal positions
OLD_NAMES = {
    r"(encoder\.layers\.\d+)\.layer_norms\.0": r"\1.self_attn_layer_norm",
    r"(encoder\.layers\.\d+)\.layer_norms\.1": r"\1.final_layer_norm",
    r"(decoder\.layers\.\d+)\.layer_norms\.0": r"\1.self_attn_layer_norm",
    r"(decoder\.layers\.\d+)\.layer_norms\.1": r"\1.encoder_attn_layer_norm",
    r"(decoder\.layers\.\d+)\.layer_norms\.2": r"\1.final_layer_norm",
    r"decoder\.embed_out": "decoder.output_projection.weight",
}
TABLE, BAND = "decoder.embed_tokens.weight", "decoder.embed_tokens.embeddings.{}"
OUTPUT, ADAPTIVE = "decoder.output_projection.weight", "decoder.adaptive_softmax"


def find(source: Path) -> Path | None:
    """The checkpoint file: `source` itself, or the .pt file in that directory; None if there is none."""
    if source.is_file():
        return source
    checkpoints = sorted(source.glob("*.pt"))
    preferred = [p for p in checkpoints if p.name in ("checkpoint_best.pt", "model.pt")][:1] or checkpoints
    if len(preferred) > 1:
        raise InputError(f"{source} has several checkpoints, choose one: {', '.join(p.name for p in checkpoints)}")
    return preferred[0] if preferred else None


def load_checkpoint(path: Path) -> tuple[ModelConfig, dict[str, np.ndarray], Fields]:
    """The model config of a checkpoint, its arrays, and the settings it was trained with."""
    content = torch_file.read(path)
    if not isinstance(content, dict) or not isinstance(content.get("model"), dict):
        raise InputError(f"{path} is not a fairseq checkpoint: it has no entry 'model'")
    c = settings(content)
    name = c.get("arch")
    if not isinstance(name, str) or not (name.startswith(LANGUAGE_MODELS) or name in TRANSLATION_MODELS):
        supported = f"{LANGUAGE_MODELS}*, {', '.join(TRANSLATION_MODELS)}"
        raise InputError(f"{path}: unknown architecture {name!r}; supported are {supported}")
    tensors = arrays(content["model"])
    bands = list(itertools.takewhile(lambda band: f"{band}.0.weight" in tensors, map(BAND.format, itertools.count())))
    try:
        raise_all(f"{path}: {name} is not supported with", unsupported(c, tensors, bands))
        config = from_dict(fields(c, tensors, bands))
    except KeyError as error:
        raise InputError(f"{path} has no {error}, which {name} needs") from None
    tied = tied_copies(c, bands)
    raise_all(f"{path}: {name} is not supported with", differing_copies(tied, tensors))
    unique = {name: array for name, array in tensors.items() if name not in {copy for copy, *_ in tied}}
    return config, load(config, rules(bands), unique, ignore=IGNORED), c


# Settings: fairseq has stored them in three forms; here they become one flat dictionary.


def settings(content: Fields) -> Fields:
    """The settings: `args` of older checkpoints, or the model, task, bpe and tokenizer parts of `cfg`."""
    if content.get("args") is not None:
        return section(content, "args")
    cfg = section(content, "cfg")
    model, task = section(cfg, "model"), section(cfg, "task")
    names = {name: section(cfg, name).get("_name") for name in ("bpe", "tokenizer")}
    for side in ("encoder", "decoder"):
        if isinstance(model.get(side), dict):
            model |= {f"{side}_{name}": value for name, value in model.pop(side).items()}
    merged = task | names | model | {"arch": model.get("arch") or model.get("_name")}
    # ${…} refers to another setting; such values follow from the weights.
    return {name: value for name, value in merged.items() if not str(value).startswith("${")}


def section(content: Fields, name: str) -> Fields:
    """An entry of a dictionary as a plain dictionary; empty if it is missing."""
    entry = plain(content.get(name))
    return entry if isinstance(entry, dict) else {}


def plain(value: Any) -> Any:
    """Plain dictionaries, lists and values in place of argparse namespaces and omegaconf objects."""
    if isinstance(value, Shell):
        state = value.state if isinstance(value.state, dict) else {}
        for name in ("_content", "_val"):  # omegaconf's containers and values
            if name in state:
                return plain(state[name])
        return plain(value.values[0] if value.values else state)  # a member of an enum; a namespace
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value


def fields(c: Fields, tensors: dict[str, np.ndarray], bands: list[str]) -> Fields:
    """The fields of our config; sizes of vocabularies and position tables are taken from the weights."""
    tables = [tensors[f"{band}.0.weight"] for band in bands] or [tensors[TABLE]]
    bounds = list(itertools.accumulate(len(table) for table in tables))
    is_translation = not c["arch"].startswith(LANGUAGE_MODELS)
    shared = bool(c.get("share_all_embeddings"))
    result = {
        "vocab_size": bounds[-1],
        "layers": c["decoder_layers"],
        "width": c["decoder_embed_dim"],
        "heads": c["decoder_attention_heads"],
        "feedforward": c["decoder_ffn_embed_dim"],
        "norm_placement": "before" if c.get("decoder_normalize_before", not is_translation) else "after",
        "final_norm": "decoder.layer_norm.weight" in tensors,
        "embedding_norm": bool(c.get("layernorm_embedding")),
        "activation": ACTIVATIONS[c.get("activation_fn", "relu")],
        "scale_embedding": not c.get("no_scale_embedding"),
        "tied_output": bool(bands) or shared or bool(c.get("share_decoder_input_output_embed")),
        "adaptive_cutoffs": bounds[:-1],
        "adaptive_factor": int(c.get("adaptive_input_factor", 4)),
    }
    if c.get("no_token_positional_embeddings"):
        result["positions"] = "none"
    elif c.get("decoder_learned_pos"):
        result |= {"positions": "learned", "max_positions": len(tensors["decoder.embed_positions.weight"]) - 2}
    else:  # positions count from 1 + the id of the padding token
        result |= {"positions": "sinusoidal", "position_offset": 2}
    if is_translation:
        result |= {
            "encoder_layers": c["encoder_layers"],
            "source_vocab_size": len(tensors["encoder.embed_tokens.weight"]),
            "shared_embedding": shared,
        }
    return result


def unsupported(c: Fields, tensors: dict[str, np.ndarray], bands: list[str]) -> list[str]:
    """The settings that our model does not support."""
    width = c["decoder_embed_dim"]
    problems = [f"{name}={c[name]!r}" for name in REFUSED if c.get(name)]
    problems += [
        f"{name}={c[name]}, which is not decoder_embed_dim={width}"
        for name in ("decoder_input_dim", "decoder_output_dim")
        if int(c.get(name) or width) != width
    ]
    if c.get("activation_fn", "relu") not in ACTIVATIONS:
        problems.append(f"activation_fn={c['activation_fn']!r} (only {', '.join(ACTIVATIONS)})")
    if not c["arch"].startswith(LANGUAGE_MODELS):
        problems += [
            f"encoder_{name}={c.get(f'encoder_{name}')} and decoder_{name}={c.get(f'decoder_{name}')}"
            for name in ("embed_dim", "ffn_embed_dim", "attention_heads", "normalize_before", "learned_pos")
            if (c.get(f"encoder_{name}") or False) != (c.get(f"decoder_{name}") or False)
        ]
        if ("encoder.layer_norm.weight" in tensors) != ("decoder.layer_norm.weight" in tensors):
            problems.append("a final norm in only one of encoder and decoder")
    factor = c.get("adaptive_input_factor", 4)
    adaptive_softmax = c.get("adaptive_softmax_cutoff") is not None
    if bool(bands) != adaptive_softmax:
        problems.append(f"adaptive_input={bool(bands)} and adaptive_softmax_cutoff={c.get('adaptive_softmax_cutoff')}")
    elif bands and f"{ADAPTIVE}.head.weight" in tensors:
        problems.append("tie_adaptive_weights=False")
    elif bands and (len(bands) == 1 or factor != int(factor)):
        problems.append(f"adaptive_input_factor={factor} and {len(bands)} bands (2 or more, and an integer factor)")
    return problems


def tied_copies(c: Fields, bands: list[str]) -> list[tuple[str, str, str]]:
    """Tied weights, which the checkpoint holds twice: (the copy, the original, the setting that ties them)."""
    pairs = [(f"{ADAPTIVE}.head.word_proj.weight", f"{BAND.format(0)}.0.weight", "tie_adaptive_weights")]
    for i, band in enumerate(bands[1:]):
        pairs.append((f"{ADAPTIVE}.tail.{i}.0.weight", f"{band}.1.weight", "tie_adaptive_proj"))
        pairs.append((f"{ADAPTIVE}.tail.{i}.2.weight", f"{band}.0.weight", "tie_adaptive_weights"))
    if c.get("share_all_embeddings"):
        pairs.append(("encoder.embed_tokens.weight", TABLE, "share_all_embeddings"))
    if c.get("share_all_embeddings") or c.get("share_decoder_input_output_embed"):
        pairs.append((OUTPUT, TABLE, "share_decoder_input_output_embed"))
    return pairs


def differing_copies(tied: list[tuple[str, str, str]], tensors: dict[str, np.ndarray]) -> list[str]:
    """Weights that should be tied and are not equal."""
    return [
        f"{setting}=False: {copy} differs from {original}"
        for copy, original, setting in tied
        if copy in tensors and original in tensors and not np.array_equal(tensors[copy], tensors[original])
    ]


# Weights: old names become current ones, then rules map them to ours.


def arrays(model: dict[str, Any]) -> dict[str, np.ndarray]:
    """The checkpoint's tensors as views of the file, under fairseq's current names, fused projections split."""
    result, problems = {}, []
    for name, tensor in model.items():
        if not isinstance(tensor, Tensor):
            problems.append(f"{name} is not a tensor")
            continue
        try:
            array = tensor.array()
        except ValueError as error:
            problems.append(f"{name}: {error}")
            continue
        for old, new in OLD_NAMES.items():
            name = re.sub(old, new, name)
        fused = re.fullmatch(r"(.*_attn)\.in_proj_(weight|bias)", name)
        if fused and array.ndim:
            parts = np.array_split(array, 3)
            result |= {f"{fused[1]}.{which}_proj.{fused[2]}": part for which, part in zip("qkv", parts)}
        else:
            result[name] = array
    raise_all("the checkpoint is damaged, copy it again:", problems)
    return result


def rules(bands: list[str]) -> list[TensorRule]:
    """The rules that map fairseq's tensors to ours."""
    result = [
        TensorRule("embedding.table", TABLE),
        TensorRule("embedding.output", OUTPUT),
        TensorRule("encoder.embedding.table", "encoder.embed_tokens.weight"),
        TensorRule("embedding.classes", f"{ADAPTIVE}.head.class_proj.weight", transposed),
    ]
    for i, band in enumerate(bands):
        result.append(TensorRule(f"embedding.tables.{i}", f"{band}.0.weight"))
        result.append(TensorRule(f"embedding.projections.{i}", f"{band}.1.weight", transposed))
    return result + stack_rules()

"""Models in GGUF files, in terms of Hugging Face's: their metadata as a config.json, their tensors under the rules of
`families` with other names."""

import re
from pathlib import Path
from typing import Any

import numpy as np

from t2r.attention.rotary import Rotary
from t2r.errors import InputError, raise_all
from t2r.importers import hugging_face
from t2r.importers.families import REFUSED, Fields
from t2r.importers.gguf_file import GGUFFile
from t2r.importers.hugging_face import TrackedConfig
from t2r.importers.names import TensorRule
from t2r.model.config import ModelConfig

ARCHITECTURES = ("llama", "qwen2", "qwen3")  # Mistral's models are `llama` with a sliding window
NAMES = {
    "embed_tokens": "token_embd", "lm_head": "output", "norm": "output_norm",
    "layers.{i}.input_layernorm": "blk.{i}.attn_norm", "layers.{i}.post_attention_layernorm": "blk.{i}.ffn_norm",
    "layers.{i}.self_attn.q_proj": "blk.{i}.attn_q", "layers.{i}.self_attn.k_proj": "blk.{i}.attn_k",
    "layers.{i}.self_attn.v_proj": "blk.{i}.attn_v", "layers.{i}.self_attn.o_proj": "blk.{i}.attn_output",
    "layers.{i}.self_attn.q_norm": "blk.{i}.attn_q_norm", "layers.{i}.self_attn.k_norm": "blk.{i}.attn_k_norm",
    "layers.{i}.mlp.gate_proj": "blk.{i}.ffn_gate", "layers.{i}.mlp.up_proj": "blk.{i}.ffn_up",
    "layers.{i}.mlp.down_proj": "blk.{i}.ffn_down",
}  # fmt: skip
ROTARY_FACTORS = "rope_freqs.weight"  # the frequencies of rotary positions are divided by these
HARMLESS = re.compile(r"context_length|rope\.scaling\.finetuned|rope\.scaling\.original_context_length")

FLOAT = (int, float)


def load_checkpoint(file: GGUFFile, path: Path) -> tuple[ModelConfig, dict[str, np.ndarray], Fields]:
    """A model's config and arrays, and its metadata as the content of a config.json."""
    original = config_of(file, path)
    rewrite = rename_interleaved if original["model_type"] in ("llama", "mistral") else rename
    config, arrays = hugging_face.convert(original, file, path, rewrite, ignore=(re.escape(ROTARY_FACTORS),))
    return config, arrays, original


def rename(rule: TensorRule) -> TensorRule:
    """A rule for the same tensor under its name in GGUF."""
    module, _, part = rule.theirs.rpartition(".")
    return rule._replace(theirs=f"{NAMES.get(module, module)}.{part}")


def rename_interleaved(rule: TensorRule) -> TensorRule:
    """Also reorders queries and keys of the architecture `llama`. There the two dimensions that rotate together are
    neighbours; here, as in Hugging Face's models, one is in the first half of the head and one in the second."""
    renamed = rename(rule)
    if not renamed.theirs.startswith(("blk.{i}.attn_q.", "blk.{i}.attn_k.")):
        return renamed

    def transform(x: np.ndarray, config: ModelConfig) -> np.ndarray:
        pairs = x.reshape(-1, config.head_dim // 2, 2, *x.shape[1:])
        return rule.transform(pairs.swapaxes(1, 2).reshape(x.shape), config)

    return renamed._replace(transform=transform)


def config_of(file: GGUFFile, path: Path) -> Fields:
    """The metadata of a model as the config.json of Hugging Face. Each key is read, harmless, or refused by name."""
    architecture = file.metadata.get("general.architecture")
    if architecture in REFUSED:
        raise InputError(f"{path}: {architecture} is not supported: {REFUSED[architecture]}")
    if architecture not in ARCHITECTURES:
        supported = ", ".join(ARCHITECTURES)
        raise InputError(f"{path}: unknown general.architecture {architecture!r}; choose from {supported}")
    prefix = f"{architecture}."
    keys = {key.removeprefix(prefix): value for key, value in file.metadata.items() if key.startswith(prefix)}
    raise_all(f"{path} is not a whole language model:", _incomplete(file))
    try:
        metadata = TrackedConfig({key: _same_in_all_layers(key, value) for key, value in keys.items()})
        config, supported = translate(architecture, metadata, file)
    except KeyError as error:
        raise InputError(f"{path} has no {prefix}{error.args[0]}, which {architecture} needs") from None
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    problems = [
        f"{prefix}{key}={metadata[key]!r} is not supported: only {value!r}"
        for key, value in supported.items()
        if metadata.get(key, value) != value
    ]
    unread = [key for key in keys if key not in metadata.read and not HARMLESS.fullmatch(key)]
    problems += [f"{prefix}{key}={metadata[key]!r} is unknown" for key in unread]
    raise_all(f"{path}:", problems)
    return config


def _incomplete(file: GGUFFile) -> list[str]:
    kind, parts = file.metadata.get("general.type", "model"), file.metadata.get("split.count", 1)
    problems = [] if kind == "model" else [f"general.type={kind!r}"]
    problems += [] if parts in (0, 1) else [f"split.count={parts!r}: join its parts with llama-gguf-split --merge"]
    return problems + ([] if "token_embd.weight" in file else ["token_embd.weight is missing"])


def _same_in_all_layers(key: str, value: Any) -> Any:
    """A number, or the one that a list has for every layer."""
    if not isinstance(value, list):
        return value
    if len(set(map(str, value))) != 1:
        raise InputError(f"{key}={value} is not supported: all layers must have the same")
    return value[0]


def _positive(metadata: Fields, key: str, default: Any = None, kinds: tuple[type, ...] = (int,)) -> Any:
    value = metadata[key] if default is None else metadata.get(key, default)
    if type(value) not in kinds or not value > 0:
        raise InputError(f"{key}={value!r} is not a positive number: the file is damaged")
    return value


def translate(architecture: str, metadata: Fields, file: GGUFFile) -> tuple[Fields, Fields]:
    """The config.json, and the keys of which only one value is supported, with that value."""
    width, heads = _positive(metadata, "embedding_length"), _positive(metadata, "attention.head_count")
    size = _positive(metadata, "attention.key_length", width // heads)
    theta = _positive(metadata, "rope.freq_base", 10_000.0, FLOAT)
    layers, stored = metadata["block_count"], len({name.split(".")[1] for name in file if name.startswith("blk.")})
    if layers != stored:
        raise InputError(f"block_count={layers!r}, and there are tensors of {stored} layers: the file is damaged")
    supported = {
        "vocab_size": file.shape("token_embd.weight")[0], "attention.value_length": size, "rope.dimension_count": size,
        "attention.causal": True, "expert_count": 0, "expert_used_count": 0,
    }  # fmt: skip
    config = {
        "model_type": architecture, "num_hidden_layers": layers, "vocab_size": supported["vocab_size"],
        "hidden_size": width, "intermediate_size": _positive(metadata, "feed_forward_length"),
        "num_attention_heads": heads, "head_dim": size, "rope_theta": theta,
        "num_key_value_heads": _positive(metadata, "attention.head_count_kv", heads),
        "rms_norm_eps": _positive(metadata, "attention.layer_norm_rms_epsilon", kinds=FLOAT), "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in file,
        "rope_scaling": rotary_scaling(metadata, Rotary(theta), size, file),
    }  # fmt: skip
    if architecture != "llama":
        return config, supported | {"attention.sliding_window": 0}
    if metadata.get("attention.sliding_window"):
        window = _positive(metadata, "attention.sliding_window")
        return config | {"model_type": "mistral", "sliding_window": window}, supported
    biases = {"attention_bias": "blk.0.attn_q.bias" in file, "mlp_bias": "blk.0.ffn_up.bias" in file}
    return config | biases, supported


def rotary_scaling(metadata: Fields, rotary: Rotary, size: int, file: GGUFFile) -> Fields:
    """The rope_scaling of a config.json. Linear scaling has keys; Llama 3's is stored as a factor for each frequency.
    These must be those of its formula, with the constants of all models that Meta has published."""
    kind, factor = metadata.get("rope.scaling.type", "none"), _positive(metadata, "rope.scaling.factor", 1.0, FLOAT)
    if kind not in ("none", "linear"):
        raise InputError(f"rope.scaling.type={kind!r} is not supported: only none and linear are")
    if ROTARY_FACTORS not in file:
        return {"rope_type": "linear", "factor": factor} if kind == "linear" else {"rope_type": "default"}
    factors = file[ROTARY_FACTORS]
    llama3 = Rotary(rotary.theta, scaling="llama3", factor=float(factors.max()))
    expected = rotary.frequencies(size) / llama3.frequencies(size)
    if kind == "linear" or factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-4):
        raise InputError(f"{ROTARY_FACTORS} is not the scaling of Llama 3, the only one that is supported")
    return {
        "rope_type": "llama3", "factor": llama3.factor, "low_freq_factor": llama3.low,
        "high_freq_factor": llama3.high, "original_max_position_embeddings": llama3.original,
    }  # fmt: skip

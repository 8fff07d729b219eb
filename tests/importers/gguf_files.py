"""Writes GGUF files with the package gguf, from Hugging Face directories: its names, its order of queries and keys."""

import json
from pathlib import Path

import gguf
import numpy as np
from safetensors.numpy import load_file

TOKENIZER = {
    "model": "gpt2", "pre": "gpt-2", "tokens": ["<|end|>", "a", "b", "ab"], "token_type": [3, 1, 1, 1],
    "merges": ["a b"], "eos_token_id": 0,
}  # fmt: skip


def interleaved(x: np.ndarray, heads: int) -> np.ndarray:
    """The rows of each head as llama.cpp has them: row i of the first half, then row i of the second."""
    return np.stack(np.split(x.reshape(heads, -1, *x.shape[1:]), 2, 1), 2).reshape(x.shape)


def metadata_of(config: dict) -> dict:
    """The keys that llama.cpp's converter writes for a config.json, without the architecture's prefix."""
    heads = config["num_attention_heads"]
    size = config.get("head_dim") or config["hidden_size"] // heads
    rope = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    keys = {
        "block_count": config["num_hidden_layers"], "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"], "context_length": config["max_position_embeddings"],
        "attention.head_count": heads, "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]), "vocab_size": config["vocab_size"],
        "rope.freq_base": float(rope.get("rope_theta", config.get("rope_theta", 10_000.0))),
        "rope.dimension_count": size, "attention.key_length": size, "attention.value_length": size,
    }  # fmt: skip
    if rope.get("rope_type") == "linear":
        keys |= {"rope.scaling.type": "linear", "rope.scaling.factor": float(rope["factor"])}
    if config["model_type"] == "mistral":
        keys |= {"attention.sliding_window": config["sliding_window"]}
    return keys


def tensors_of(config: dict, arrays: dict[str, np.ndarray], architecture: str) -> dict[str, np.ndarray]:
    """The tensors under the names that gguf gives them; `llama` has its own order of queries and keys."""
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, architecture.upper()), config["num_hidden_layers"])
    tensors = {}
    for name, array in arrays.items():
        if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
            array = interleaved(array, config[f"num_{'attention' if 'q_proj' in name else 'key_value'}_heads"])
        tensors[names.get_name(name, try_suffixes=(".weight", ".bias"))] = array
    return tensors


def read_folder(folder: Path) -> tuple[str, dict, dict[str, np.ndarray]]:
    """The architecture, metadata and tensors of a Hugging Face directory, as `write` takes them."""
    config = json.loads((folder / "config.json").read_text())
    architecture = "llama" if config["model_type"] == "mistral" else config["model_type"]
    tensors = tensors_of(config, load_file(folder / "model.safetensors"), architecture)
    return architecture, metadata_of(config), tensors


def write(
    path: Path, architecture: str, metadata: dict, tensors: dict, tokenizer: dict = TOKENIZER, kinds: dict | None = None
) -> Path:
    """Writes a file. `kinds` are the types of tensors that are given as their bytes. A None in the metadata or the
    tokenizer is left out; a key that begins with a dot has no prefix."""
    writer = gguf.GGUFWriter(path, architecture)
    prefixed = {key[1:] if key.startswith(".") else f"{architecture}.{key}": value for key, value in metadata.items()}
    for key, value in (prefixed | {f"tokenizer.ggml.{key}": value for key, value in tokenizer.items()}).items():
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string,
               list: writer.add_array}  # fmt: skip
        if value is not None:
            add[type(value)](key, value)
    for name, array in tensors.items():
        writer.add_tensor(name, array, raw_dtype=(kinds or {}).get(name))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path

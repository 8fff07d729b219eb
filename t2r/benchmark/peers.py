"""Measures other libraries on the same shapes in the same run, if they can be imported. None is required."""

import functools
import importlib
import importlib.util
import time
from collections.abc import Callable, Iterable
from typing import Any

from t2r.benchmark.models import Request
from t2r.benchmark.shared import Results, time_short_calls
from t2r.errors import InputError
from t2r.model.config import ModelConfig

# For `benchmark decode`: name in the results → (library, cache of Hugging Face's `generate`).
GENERATION = {
    "hugging_face": ("transformers", "dynamic"),
    "hugging_face_static": ("transformers", "static"),  # compiled, on GPU with CUDA graphs
    "flash_linear_attention": ("fla", "dynamic"),
}


def check_names(names: Iterable[str]) -> None:
    """Raises an InputError for names that are not in GENERATION."""
    unknown = [name for name in names if name not in GENERATION]
    if unknown:
        raise InputError(f"--peer_names={','.join(unknown)}: choose from {', '.join(GENERATION)}")


def measure_generation(
    results: Results, request: Request, lengths: list[int], names: Iterable[str] = GENERATION
) -> None:
    """Times whole greedy generations of each library, from one token or, in translation, from sources as long."""
    config = next(iter(request.models.values()))
    for name in names:
        library, cache = GENERATION[name]
        if _absent(results, name, library):
            continue
        for length in lengths:
            key = {"what": "peer", "row": name, "length": length, **request.common}
            _try(results, key, functools.partial(_generation, config, request, length, library, cache))


def measure_attention(
    results: Results, shape: Any, lengths: list[int], passes: dict[str, bool], repeat_for: float
) -> None:
    """Times flash-linear-attention's chunked kernel, normalised, without a feature map."""
    if _absent(results, "flash_linear_attention", "fla"):
        return
    for length in lengths:
        for name, backward in passes.items():
            key = {"what": name, "row": "flash_linear_attention", "length": length, **shape._asdict()}
            _try(results, key, functools.partial(_attention, shape, length, backward, repeat_for))


def _absent(results: Results, name: str, library: str) -> bool:
    """Whether torch or the library is not installed; says so in the results."""
    missing = [module for module in ("torch", library) if importlib.util.find_spec(module) is None]
    if missing:
        results.note(f"{name} is skipped: {' and '.join(missing)} cannot be imported")
    return bool(missing)


def _try(results: Results, key: dict[str, Any], measure: Callable[[], dict[str, Any]]) -> None:
    """Measures another library; if it fails, notes that in the results and goes on."""
    try:
        results.get_or_measure(key, measure)
    except Exception as error:
        reason = next(iter(str(error).splitlines()), "")[:200]
        results.note(f"{key['row']} at {key['length']} tokens failed: {type(error).__name__}: {reason}")


def _generation(config: ModelConfig, request: Request, length: int, library: str, cache: str) -> dict[str, Any]:
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = getattr(torch, request.dtype)
    with torch.device(device):
        model = (_linear_model if library == "fla" else _softmax_model)(config, length).to(dtype).eval()
        tokens = torch.zeros((request.batch, length if config.encoder_layers else 1), dtype=torch.long)

    def generate(count: int) -> None:
        options = dict(max_new_tokens=count, min_new_tokens=count, do_sample=False, num_beams=1, pad_token_id=0)
        options |= {"cache_implementation": "static"} if cache == "static" else {}
        with torch.inference_mode():
            model.generate(tokens, attention_mask=torch.ones_like(tokens), **options)
        if device == "cuda":
            torch.cuda.synchronize()

    began = time.perf_counter()
    generate(length if cache == "static" else min(length, 8))  # a static cache is compiled for its length
    first = time.perf_counter() - began
    began = time.perf_counter()
    generate(length)
    seconds = time.perf_counter() - began
    return {
        "tokens_per_second": request.batch * length / seconds,
        "step_seconds": seconds / length,
        "first_seconds": first,
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "versions": versions("torch", library),
        "torch_device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
    }


def _softmax_model(config: ModelConfig, length: int):
    """A model with the same layers, width, heads and vocabulary: Llama, GPT-2, or Marian for translation."""
    import transformers

    if (config.norm, config.positions) == ("rms", "rotary"):
        sizes = dict(num_hidden_layers=config.layers, hidden_size=config.width, intermediate_size=config.feedforward)
        heads = dict(num_attention_heads=config.heads, num_key_value_heads=config.kv_heads, head_dim=config.head_dim)
        special = dict(bos_token_id=0, eos_token_id=1, pad_token_id=0, tie_word_embeddings=config.tied_output)
        settings = transformers.LlamaConfig(
            vocab_size=config.vocab_size, max_position_embeddings=length + 1, **sizes, **heads, **special
        )
        return transformers.LlamaForCausalLM(settings)
    if not config.encoder_layers:
        sizes = dict(n_embd=config.width, n_layer=config.layers, n_head=config.heads, n_inner=config.feedforward)
        special = dict(bos_token_id=0, eos_token_id=1, pad_token_id=0)
        settings = transformers.GPT2Config(
            vocab_size=config.vocab_size, n_positions=length + 1, activation_function="relu", **sizes, **special
        )
        return transformers.GPT2LMHeadModel(settings)
    sides = {
        f"{side}_{name}": value
        for side, layers in (("encoder", config.encoder_layers), ("decoder", config.layers))
        for name, value in dict(layers=layers, attention_heads=config.heads, ffn_dim=config.feedforward).items()
    }
    special = dict(pad_token_id=0, eos_token_id=1, decoder_start_token_id=0, forced_eos_token_id=None)
    settings = transformers.MarianConfig(
        vocab_size=config.vocab_size, decoder_vocab_size=config.vocab_size, d_model=config.width,
        max_position_embeddings=length + 1, activation_function="relu", **sides, **special,
    )  # fmt: skip
    return transformers.MarianMTModel(settings)


def _linear_model(config: ModelConfig, length: int):
    """flash-linear-attention's model with T2R's feature size.

    Its feed-forward has gates, so that it is 2/3 as wide where ours has none.
    """
    from fla.models import LinearAttentionConfig, LinearAttentionForCausalLM

    features = max((spec.features or 0 for spec in config.attention), default=0) or 32
    settings = LinearAttentionConfig(
        vocab_size=config.vocab_size, hidden_size=config.width, num_hidden_layers=config.layers,
        num_heads=config.heads, num_kv_heads=config.kv_heads,
        expand_k=features * config.heads / config.width, expand_v=1,
        intermediate_size=config.feedforward if config.gated else config.feedforward * 2 // 3,
        max_position_embeddings=length + 1, tie_word_embeddings=config.tied_output,
    )  # fmt: skip
    return LinearAttentionForCausalLM(settings)


def _attention(shape: Any, length: int, backward: bool, repeat_for: float) -> dict[str, Any]:
    import torch
    from fla.ops.linear_attn import chunk_linear_attn

    def random(size: int) -> torch.Tensor:
        dimensions = shape.batch(length), length, shape.heads, size
        array = torch.randn(dimensions, device="cuda", dtype=getattr(torch, shape.dtype))
        return array.relu().requires_grad_(backward)

    q, k, v = random(shape.features), random(shape.features), random(shape.head_dim)
    gradient = torch.randn_like(v)

    def run(_: Any) -> None:
        out = chunk_linear_attn(q, k, v, normalize=True)[0]
        if backward:
            torch.autograd.grad(out, (q, k, v), gradient)

    def run_and_wait(inputs: Any) -> None:
        run(inputs)
        torch.cuda.synchronize()

    times = time_short_calls(run_and_wait, repeat_for)
    tokens = shape.batch(length) * length
    return {**times._asdict(), "tokens_per_second": tokens / times.seconds, "versions": versions("torch", "fla")}


def versions(*libraries: str) -> dict[str, str]:
    return {name: getattr(importlib.import_module(name), "__version__", "unknown") for name in libraries}

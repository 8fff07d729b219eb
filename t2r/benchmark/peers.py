"""Other libraries on the same shapes, in the same run, where they can be imported. None is ever required."""

import functools
import importlib
import importlib.util
import time
from collections.abc import Callable
from typing import Any

from t2r.benchmark.models import Request
from t2r.benchmark.shared import Results, timed_in_a_row
from t2r.model.config import ModelConfig

# Rows of `benchmark decode`: which library, and how.
GENERATION = {
    "hugging_face": ("transformers", "dynamic"),
    "hugging_face_static": ("transformers", "static"),  # compiled, on GPU with CUDA graphs
    "flash_linear_attention": ("fla", "dynamic"),
}


def measure_generation(results: Results, request: Request, lengths: list[int]) -> None:
    """Whole greedy generations by each library, from one token, or in translation from sources as long."""
    config = next(iter(request.rows.values()))
    for row, (library, cache) in GENERATION.items():
        if _absent(results, row, library):
            continue
        for length in lengths:
            line = {"what": "peer", "row": row, "length": length, **request.common}
            _try(results, line, functools.partial(_generation, config, request, length, library, cache))


def measure_attention(
    results: Results, shape: Any, lengths: list[int], ways: dict[str, bool], repeat_for: float
) -> None:
    """flash-linear-attention's chunked kernel, normalised, without a feature map."""
    if _absent(results, "flash_linear_attention", "fla"):
        return
    for length in lengths:
        for way, backward in ways.items():
            line = {"what": way, "row": "flash_linear_attention", "length": length, **shape._asdict()}
            _try(results, line, functools.partial(_attention, shape, length, backward, repeat_for))


def _absent(results: Results, row: str, library: str) -> bool:
    missing = [name for name in ("torch", library) if importlib.util.find_spec(name) is None]
    if missing:
        results.note(f"{row} is left out: {' and '.join(missing)} cannot be imported")
    return bool(missing)


def _try(results: Results, line: dict[str, Any], measure: Callable[[], dict[str, Any]]) -> None:
    """Another library's failure is a line in the report, not the end of the run."""
    try:
        results.find(line, measure)
    except Exception as error:
        reason = next(iter(str(error).splitlines()), "")[:200]
        results.note(f"{line['row']} at {line['length']} tokens failed: {type(error).__name__}: {reason}")


def _generation(config: ModelConfig, request: Request, length: int, library: str, cache: str) -> dict[str, Any]:
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    wanted = getattr(torch, request.dtype)
    with torch.device(device):
        model = (_linear_model if library == "fla" else _softmax_model)(config, length).to(wanted).eval()
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
        "versions": _versions("torch", library),
        "torch_device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
    }


def _softmax_model(config: ModelConfig, length: int):
    """GPT-2, or Marian for translation: the same layers, widths, heads and vocabulary."""
    import transformers

    if not config.encoder_layers:
        sizes = dict(n_embd=config.width, n_layer=config.layers, n_head=config.heads, n_inner=config.feedforward)
        ends = dict(bos_token_id=0, eos_token_id=1, pad_token_id=0)
        settings = transformers.GPT2Config(
            vocab_size=config.vocab_size, n_positions=length + 1, activation_function="relu", **sizes, **ends
        )
        return transformers.GPT2LMHeadModel(settings)
    sides = {
        f"{side}_{name}": value
        for side, layers in (("encoder", config.encoder_layers), ("decoder", config.layers))
        for name, value in dict(layers=layers, attention_shape=config.heads, ffn_dim=config.feedforward).items()
    }
    ends = dict(pad_token_id=0, eos_token_id=1, decoder_start_token_id=0, forced_eos_token_id=None)
    settings = transformers.MarianConfig(
        vocab_size=config.vocab_size, decoder_vocab_size=config.vocab_size, d_model=config.width,
        max_position_embeddings=length + 1, activation_function="relu", **sides, **ends,
    )  # fmt: skip
    return transformers.MarianMTModel(settings)


def _linear_model(config: ModelConfig, length: int):
    """Linear attention with as many features as T2R; its feed-forward is gated, so narrower by a third."""
    from fla.models import LinearAttentionConfig, LinearAttentionForCausalLM

    features = max((spec.features or 0 for spec in config.attention), default=0) or 32
    settings = LinearAttentionConfig(
        vocab_size=config.vocab_size, hidden_size=config.width, num_hidden_layers=config.layers,
        num_heads=config.heads, expand_k=features * config.heads / config.width, expand_v=1,
        intermediate_size=config.feedforward * 2 // 3, max_position_embeddings=length + 1,
    )  # fmt: skip
    return LinearAttentionForCausalLM(settings)


def _attention(shape: Any, length: int, backward: bool, repeat_for: float) -> dict[str, Any]:
    import torch
    from fla.ops.linear_attn import chunk_linear_attn

    def random(size: int) -> torch.Tensor:
        lead = shape.batch(length), length, shape.heads, size
        made = torch.randn(lead, device="cuda", dtype=getattr(torch, shape.dtype))
        return made.relu().requires_grad_(backward)

    q, k, v = random(shape.features), random(shape.features), random(shape.head_dim)
    gradient = torch.randn_like(v)

    def run(_: Any) -> None:
        out = chunk_linear_attn(q, k, v, normalize=True)[0]
        if backward:
            torch.autograd.grad(out, (q, k, v), gradient)

    def run_and_wait(given: Any) -> None:
        run(given)
        torch.cuda.synchronize()

    times = timed_in_a_row(run_and_wait, repeat_for)
    tokens = shape.batch(length) * length
    return {**times._asdict(), "tokens_per_second": tokens / times.seconds, "versions": _versions("torch", "fla")}


def _versions(*libraries: str) -> dict[str, str]:
    return {name: getattr(importlib.import_module(name), "__version__", "unknown") for name in libraries}

"""Measures other libraries on the same shapes in the same run, if they can be imported. None is required."""

import functools
import importlib
import importlib.util
import itertools
import math
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from t2r.benchmark.models import UNCHANGED, Request
from t2r.benchmark.shared import Results, time_short_calls
from t2r.benchmark.steps import NO_STOP_TOKEN
from t2r.decode.generate import generate_tokens, prefill
from t2r.environment import cores
from t2r.errors import raise_all
from t2r.importers import by_name, hub
from t2r.importers.gguf_file import is_gguf
from t2r.model.config import RUNTIME_FIELDS, ModelConfig
from t2r.model.parameters import arrays_of

# For `benchmark decode`: name in the results → (library, cache of Hugging Face's `generate`).
GENERATION = {
    "hugging_face": ("transformers", "dynamic"),
    "hugging_face_static": ("transformers", "static"),  # compiled, on GPU with CUDA graphs
    "flash_linear_attention": ("fla", "dynamic"),
    "llama_cpp": ("llama_cpp", ""),  # the Python package llama-cpp-python
}
READS_ORIGINALS = ("transformers", "llama_cpp")  # libraries that can have the weights of --peer_model
COMPARED = 64  # first tokens of a library's generation that are compared with ours


def check(request: Request, names: Sequence[str], lengths: Sequence[int], original: str | None) -> None:
    """Refuses names that are not in GENERATION, lengths beyond a model's positions, and what can be no original."""
    unknown = [name for name in names if name not in GENERATION]
    problems = [f"--peer_names={','.join(unknown)}: choose from {', '.join(GENERATION)}"] if unknown else []
    if lengths and not names:
        problems.append(f"--peer_names is empty: choose from {', '.join(GENERATION)}")
    most = min(config.max_positions or math.inf for config in request.models.values())
    problems += [
        f"--peer_lengths={length}: this model has positions for {most:,} tokens" for length in lengths if length > most
    ]
    if original is not None:
        problems += [f"--peer_model={original}: {problem}" for problem in _problems_of_original(request, original)]
    raise_all("other libraries:", problems)


def _problems_of_original(request: Request, original: str) -> list[str]:
    problems = []
    if request.source is None:
        problems.append("name what was imported from it, --model=DIRECTORY, instead of a preset")
    elif request.identity["fields"]:
        problems.append(f"--field={','.join(request.identity['fields'])} makes another model of --model: leave it out")
    elif any(spec.kind != "softmax" for spec in by_name.load_config(request.source).attention):
        problems.append(f"--model={request.source} has been converted: name the transformer that was imported from it")
    if any(config.encoder_layers for config in request.models.values()):
        problems.append("translation models are compared by `t2r benchmark translate --ctranslate2`")
    path = Path(original)
    if (path / "provenance.json").exists():
        problems.append("it is a t2r model: give the directory or file of Hugging Face that it was imported from")
    elif not (is_gguf(path) or (path / "config.json").is_file() or hub.is_name(original)):
        what = "has no config.json and is no GGUF file" if path.exists() else "does not exist"
        problems.append(f"it {what}: give a Hugging Face directory, a GGUF file, or a model of the hub, ORG/NAME")
    return problems


def check_original(model: str, original: str) -> None:
    """Refuses an original whose architecture or weights are not those of `model`. Reads both."""
    from t2r.importers.source import read_source  # here, as it loads all families

    theirs, ours = read_source(_local(original)), by_name.load(model).model
    fields, arrays = ours.config.to_dict(), arrays_of(ours)
    problems = [
        f"{name} is {value!r} there, and {fields[name]!r} in {model}"
        for name, value in theirs.config.to_dict().items()
        if value != fields[name] and name not in RUNTIME_FIELDS
    ]
    if not problems:  # as an import may have rounded them to 16 bits, weights may differ a little
        near = {name: np.allclose(array, arrays[name], rtol=1e-2, atol=1e-6) for name, array in theirs.arrays.items()}
        other = [name for name, is_near in near.items() if not is_near]
        problems = [f"{len(other)} of {len(near)} arrays have other values, such as {other[0]}"] if other else []
    raise_all(f"--peer_model={original} is not what --model={model} was imported from:", problems)


@functools.cache
def _local(original: str) -> Path:
    return hub.download(original).folder if hub.is_name(original) else Path(original)


def measure_generation(
    results: Results,
    request: Request,
    lengths: list[int],
    names: Iterable[str] = GENERATION,
    original: str | None = None,
) -> None:
    """Times whole greedy generations of each library, from one token or, in translation, from sources as long.

    Hugging Face's models have the weights of `original`, if it is given, a directory or GGUF file of Hugging Face, and
    llama.cpp those of a GGUF file. Then each line says how many of its first tokens our model, which was imported from
    it, generates, too.
    """
    config, ours = next(iter(request.models.values())), functools.cache(functools.partial(_our_tokens, request))
    for name in dict.fromkeys(names):
        library, cache = GENERATION[name]
        if _absent(results, name, library) or (
            library == "llama_cpp" and _llama_cpp_cannot_run(results, request, original)
        ):
            continue
        source = original if library in READS_ORIGINALS else None
        for length in lengths:
            key = {"what": "peer", "row": name, "length": length, **request.common}
            key |= {"original": Path(source).name} if source else {}

            def measure(length: int = length, library: str = library, cache: str = cache, source=source):
                if library == "llama_cpp":
                    figures, tokens = _llama_cpp(_local(source), length)
                else:
                    figures, tokens = _generation(config, request, length, library, cache, source)
                return figures | (_agreement(tokens, ours(_compared(request, length))) if source else {})

            _try(results, key, measure)


def _compared(request: Request, length: int) -> int:
    """How many tokens of such a generation are compared. `prefill` counts a position for the first token, too."""
    most = by_name.load_config(request.source).max_positions
    return min(COMPARED, length, most - 1 if most else length)


def _our_tokens(request: Request, count: int) -> list[int]:
    """The first tokens that the request's model generates greedily, as it is, by the kernels that its rows have."""
    model = request.model(UNCHANGED)
    generation = prefill(model, [[0]] * request.batch, count)
    return generate_tokens(model, generation, count, end=NO_STOP_TOKEN)[1][0]


def _agreement(theirs: list[int], ours: list[int]) -> dict[str, int]:
    """How many tokens at the beginning are the same. In bfloat16 rounding decides between tokens that are as likely."""
    compared = min(len(theirs), len(ours))
    same = next((place for place in range(compared) if theirs[place] != ours[place]), compared)
    return {"same_tokens": same, "compared_tokens": compared}


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


def _llama_cpp_cannot_run(results: Results, request: Request, original: str | None) -> bool:
    """Whether llama.cpp cannot generate what is measured; says why in the results."""
    if original is None or not is_gguf(_local(original)):
        results.note("llama_cpp is skipped: it reads a GGUF file only, --peer_model=FILE")
    elif request.batch != 1:
        results.note(f"llama_cpp is skipped: it is measured with one sequence, --batch=1, not {request.batch}")
    else:
        return False
    return True


def _absent(results: Results, name: str, library: str) -> bool:
    """Whether the library, or torch, which it needs, is not installed; says so in the results."""
    needed = [library] if library == "llama_cpp" else ["torch", library]
    missing = [module for module in needed if importlib.util.find_spec(module) is None]
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


def _generation(
    config: ModelConfig, request: Request, length: int, library: str, cache: str, original: str | None
) -> tuple[dict[str, Any], list[int]]:
    """The figures of one generation, and the first tokens of its first sequence."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = getattr(torch, request.dtype)
    model = _original_model(original, dtype).to(device) if original else None
    with torch.device(device):
        if model is None:
            model = (_linear_model if library == "fla" else _softmax_model)(config, length).to(dtype)
        model = model.eval()
        tokens = torch.zeros((request.batch, length if config.encoder_layers else 1), dtype=torch.long)

    def generate(count: int) -> list[int]:
        options = dict(max_new_tokens=count, min_new_tokens=count, do_sample=False, num_beams=1, pad_token_id=0)
        options |= {"cache_implementation": "static"} if cache == "static" else {}
        with torch.inference_mode():
            generated = model.generate(tokens, attention_mask=torch.ones_like(tokens), **options)
        if device == "cuda":
            torch.cuda.synchronize()
        return generated[0, 1:].tolist()

    began = time.perf_counter()
    generate(length if cache == "static" else min(length, 8))  # a static cache is compiled for its length
    first = time.perf_counter() - began
    began = time.perf_counter()
    generated = generate(length)
    seconds = time.perf_counter() - began
    figures = {
        "tokens_per_second": request.batch * length / seconds,
        "step_seconds": seconds / length,
        "first_seconds": first,
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "versions": versions("torch", library),
        "torch_device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
    }
    return figures, generated[:COMPARED]


def _llama_cpp(path: Path, length: int) -> tuple[dict[str, Any], list[int]]:
    """As `_generation`, of one sequence by llama.cpp, with weights in the type that the GGUF file has."""
    import llama_cpp

    threads, on_gpu = cores(), jax.default_backend() == "gpu" and llama_cpp.llama_supports_gpu_offload()
    layers = -1 if on_gpu else 0  # on the GPU; −1: all
    model = llama_cpp.Llama(str(path), n_ctx=length + 1, n_threads=threads, n_gpu_layers=layers, verbose=False)

    def generate(count: int) -> tuple[float, list[int]]:
        began, tokens = time.perf_counter(), model.generate([0], temp=0.0, repeat_penalty=1.0)
        generated = list(itertools.islice(tokens, count))
        return time.perf_counter() - began, generated

    first, _ = generate(min(length, 8))
    seconds, generated = generate(length)
    figures = {
        "tokens_per_second": length / seconds,
        "step_seconds": seconds / length,
        "first_seconds": first,
        "parameters": llama_cpp.llama_model_n_params(model.model),
        "file_bytes": path.stat().st_size,
        "threads": threads,
        "versions": versions("llama_cpp"),
        "llama_device": "gpu" if on_gpu else "cpu",
    }
    return figures, generated[:COMPARED]


def _original_model(original: str, dtype: Any):
    """The model of a Hugging Face directory, a GGUF file, or a name of the hub; greedy, without a stop token."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    path = _local(original)
    place = (path.parent, path.name) if path.is_file() else (path, None)
    # Not `.to(dtype)`, which rounds the frequencies of rotary positions, too.
    model = transformers.AutoModelForCausalLM.from_pretrained(place[0], gguf_file=place[1], dtype=dtype)
    model.generation_config = transformers.GenerationConfig()  # its own may have penalties, stop tokens, another cache
    return model


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

"""Measure the reading of prompts against their length: time to the first token, tokens per second, and memory.

t2r benchmark prefill --preset=smollm2_135m --output=DIR [--lengths=2048,8192,32768,131072] [--rows=transformer,t2r]
    [--batch=1] [--chunk=N] [--weights=bfloat16,int8] [--most_seconds=120] [--budget_seconds=N] [--again]
t2r benchmark prefill --model=DIRECTORY ...        (the architecture of a model; --rows=model: without conversion)

Prompts are read --chunk tokens at a time, as `t2r generate` does, and the first token is generated. Larger chunks may
be faster on GPUs, and need more memory: a softmax layer has a weight for each token of a chunk and each of the prompt.
Weights are random. A prompt that does not fit in memory or takes longer than --most_seconds is a line that says so.

Columns, in MiB: `state` is the attention state after the prompt, `program` the compiler's plan for reading it, weights
included, `peak` the device's highest use since the process started (models run from the smallest to the largest).
DIR gets prefill.jsonl, prefill.json, and plots: time (prefill) and memory (prefill_memory).
"""

from typing import Any

from absl import flags

from t2r.commands import _benchmark as shared

RESUMES = True  # after an interruption

_MODELS = shared.define_models(lengths=["2048", "8192", "32768", "131072"], batch=1)
_OUTPUT = shared.define_output()
_WEIGHTS = flags.DEFINE_list("weights", None, "Types of the matrices: that of --dtype, which is the default, and int8.")
_CHUNK = flags.DEFINE_integer(
    "chunk",
    None,
    "Tokens that are read at once. Default: as `t2r generate`, 256 on CPUs and up to 4,096 elsewhere.",
    lower_bound=1,
)
_SECONDS = flags.DEFINE_float("seconds", 2.0, "Repeat each measurement for this time.", lower_bound=0)
_MOST_SECONDS = flags.DEFINE_float("most_seconds", 120, "Give up a prompt that takes longer.", lower_bound=0)


def main() -> dict[str, Any]:
    from t2r.benchmark.prefill import PrefillOptions, benchmark_prefill

    options = PrefillOptions(_CHUNK.value, _SECONDS.value, _MOST_SECONDS.value)
    return benchmark_prefill(shared.request(_MODELS, weights=_WEIGHTS.value), options, shared.output(_OUTPUT))

"""Measure decoding: tokens per second against generated length, beside the least time that memory allows.

t2r benchmark decode --preset=paper_lm --output=DIR [--field=vocab_size=32768 --field=adaptive_cutoffs=()]
    [--rows=transformer,t2r,t2r_unmerged,t2r_75,elu,rfa] [--lengths=512,1024,...,32768] [--batch=16] [--dtype=bfloat16]
    [--largest_batch] [--whole] [--prompt=N] [--peers] [--budget_seconds=N] [--again] [--device_report]
t2r benchmark decode --preset=paper_mt ...         (sources as long as what is generated; encoding apart)
t2r benchmark decode --model=DIRECTORY ...         (its architecture; --rows=model for it as it is)
t2r benchmark decode --preset=paper_mt --topology=v2:2x2 ...    (the TPU compiler's estimate; nothing is run)

On a GPU, transformers and T2R decode by few kernels for each layer, up to 64 texts in bfloat16, and the paper's T2R
language models by one for all layers, up to 16; rows transformer_plain and t2r_plain are without them.

Greedy, unconditional, with random weights. Each step of one length costs the same: --steps of them at the end of a text
are timed, or with --whole all. The floor is the bytes of weights and state that a step reads and writes, over the
memory bandwidth that this run has measured. DIR gets decode.jsonl, line by line, decode.json, decode.png, decode.svg.
"""

import os
from typing import Any

from absl import flags

from t2r.commands import _benchmark as shared

_MODELS, _TOPOLOGY, _OUTPUT = shared.define_models(), shared.define_topology(), shared.define_output()
_STEPS = flags.DEFINE_integer("steps", 256, "Steps in each repetition.", lower_bound=1)
_WHOLE = flags.DEFINE_bool("whole", False, "Time whole generations, from the first token.")
_PROMPT = flags.DEFINE_integer("prompt", 0, "Of language models: also time reading prompts of so many tokens.")
_SECONDS = flags.DEFINE_float("seconds", 2.0, "Repeat each measurement for so long, at least five times.")
_LARGEST = flags.DEFINE_bool("largest_batch", False, "Measure the largest batch that fits, too.")
_LARGEST_AT = flags.DEFINE_list("largest_batch_lengths", None, "At these lengths; default: 4096, or the longest.")
_PEERS = flags.DEFINE_bool("peers", False, "Measure other libraries too, where they can be imported.")
_PEER_LENGTHS = flags.DEFINE_list("peer_lengths", None, "Lengths for them; default: the shortest alone.")


def main() -> dict[str, Any]:
    if _LARGEST.value and not _PEERS.value:  # else JAX takes three quarters of a GPU's memory
        os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")

    from t2r.benchmark.decode import DecodeOptions, benchmark_decode

    request = shared.request(_MODELS)
    peers = shared.parse_lengths(_PEER_LENGTHS.value or [str(request.lengths[0])]) if _PEERS.value else ()
    longest = [str(4096 if 4096 in request.lengths else request.lengths[-1])]
    largest = shared.parse_lengths(_LARGEST_AT.value or longest) if _LARGEST.value else ()
    options = DecodeOptions(_STEPS.value, _WHOLE.value, _SECONDS.value, _PROMPT.value, tuple(largest))
    where = shared.topology(_TOPOLOGY)
    return benchmark_decode(request, options, shared.output(_OUTPUT), peer_lengths=peers, **where)

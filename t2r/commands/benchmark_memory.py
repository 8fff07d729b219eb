"""Measure the size of the attention state against generated length: by formula, as compiled, and on the device.

t2r benchmark memory --preset=paper_mt --output=DIR [--rows=...] [--lengths=...] [--batch=16]
t2r benchmark memory --model=DIRECTORY ...
t2r benchmark memory --preset=paper_mt --topology=v2:2x2 ...      (from the TPU compiler; nothing is run)

Columns, in MiB: `state` is the sum of the arrays; `formula` the same by formula; `program state` the buffers that the
compiled step updates in place, with the padding of the device's layout; `temporary` and `program` the compiler's memory
plan; `device` the memory that the state occupies; `device peak` the highest use since the process started (models run
from the smallest to the largest). The state of a translation model includes that of its source, which is as long as the
target. DIR gets memory.jsonl, memory.json, memory.png and memory.svg.
"""

from typing import Any

from t2r.commands import _benchmark as shared

RESUMES = True  # after an interruption

_MODELS, _TOPOLOGY, _OUTPUT = shared.define_models(), shared.define_topology(), shared.define_output()


def main() -> dict[str, Any]:
    from t2r.benchmark.memory import benchmark_memory

    target = shared.topology(_TOPOLOGY)
    return benchmark_memory(shared.request(_MODELS), shared.output(_OUTPUT), **target)

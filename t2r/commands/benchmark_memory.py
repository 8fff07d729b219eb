"""Measure the memory of attention against generated length: by formula, counted, compiled, and on the device.

t2r benchmark memory --preset=paper_mt --output=DIR [--rows=...] [--lengths=...] [--batch=16]
t2r benchmark memory --model=DIRECTORY ...
t2r benchmark memory --preset=paper_mt --topology=v2:2x2 ...      (as the TPU compiler lays it out)

The state of a translation model has its source in it, as long as the target. DIR gets memory.jsonl, memory.json,
memory.png and memory.svg. `program state` is what the compiled step changes in place, as the device lays it out;
`device peak` is since the process began, so models are measured from the smallest to the largest.
"""

from typing import Any

from t2r.commands import _benchmark as shared

_MODELS, _TOPOLOGY, _OUTPUT = shared.define_models(), shared.define_topology(), shared.define_output()


def main() -> dict[str, Any]:
    from t2r.benchmark.memory import benchmark_memory

    where = shared.topology(_TOPOLOGY)
    return benchmark_memory(shared.request(_MODELS), shared.output(_OUTPUT), **where)

"""Measure the memory of attention against generated length: by formula, counted, compiled, and on the device.

python -m t2r benchmark memory --preset=paper_mt --output=DIR [--rows=...] [--lengths=...] [--batch=16]
python -m t2r benchmark memory --model=DIRECTORY ...
python -m t2r benchmark memory --preset=paper_mt --topology=v2:2x2 ...      (as the TPU compiler lays it out)

The state of a translation model has its source in it, as long as the target. DIR gets memory.jsonl, memory.json,
memory.png and memory.svg. `program state` is what the compiled step changes in place, as the device lays it out;
`device peak` is since the process began, so models are measured from the smallest to the largest.
"""

import math
from typing import Any

from t2r.benchmark import flags as shared

_GIVEN = shared.define()


def main() -> dict[str, Any]:
    from t2r.benchmark import compare, memory

    asked, topology, mesh = shared.read(_GIVEN), _GIVEN.topology.value, shared.parse_mesh(_GIVEN.mesh.value)
    devices = math.prod(mesh.values())
    results = shared.open_results("memory", _GIVEN, topology)
    if topology:
        machine = compare.machine_of(results, topology, devices)
        compare.compile_rows(results, asked, machine, topology, mesh)
    else:
        memory.measure_rows(results, asked)
    print(memory.memory_table(results))
    plots = memory.plot_memory(results, asked, shared.where(results, devices))
    shared.report(results, _GIVEN)
    summary = memory.summary_of(results)
    results.write({"identity": asked.identity, **summary})
    return {**summary, "left_out": len(results.left_out), "plots": plots}

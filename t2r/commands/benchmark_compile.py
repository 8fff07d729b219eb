"""Compile a training or decoding step for a TPU, without one: memory per device, and the compiler's time estimate.

t2r benchmark compile --config=configs/wikitext103.py:t2r --topology=v3:4x4 [--config.mesh.fsdp=8 ...]
t2r benchmark compile --config=configs/wikitext103.py:t2r --topology=v2:2x2 --decode [--batch=16 --length=512]

Install the compiler with pip install 'jax[tpu]' (Linux, x86_64); no TPU is needed. Nothing is measured: step_seconds is
the compiler's estimate, which counts operations and memory traffic but not communication between hosts. The compiler
counts the body of a loop once, so there is no estimate with config.model.scan_layers=True. least_seconds is the time of
the model's matrix products at the vendor's peak rate.
"""

from pathlib import Path
from typing import Any

from absl import flags
from ml_collections import config_flags

_CONFIG = config_flags.DEFINE_config_file(
    "config", help_string="Config: NAME[:VARIANT] of one that ships with t2r, or PATH.py[:VARIANT]."
)
_TOPOLOGY = flags.DEFINE_string(
    "topology", None, "TPU slice: version and chips, such as v5e:4x4; or its cloud name, v5litepod-16.", required=True
)
_DECODE = flags.DEFINE_bool("decode", False, "Compile a decoding step instead of a training step.")
_BATCH = flags.DEFINE_integer("batch", 16, "With --decode: sequences in a batch.", lower_bound=1)
_LENGTH = flags.DEFINE_integer("length", 512, "With --decode: tokens per sequence.", lower_bound=1)
_OUTPUT = flags.DEFINE_string("output", None, "JSON file for the report.")


def main() -> dict[str, Any]:
    from t2r.benchmark.compile import benchmark_compile
    from t2r.console import table

    output = Path(_OUTPUT.value) if _OUTPUT.value else None
    sizes = dict(batch=_BATCH.value, length=_LENGTH.value)
    result = benchmark_compile(_CONFIG.value, _TOPOLOGY.value, decode=_DECODE.value, output=output, **sizes)
    hidden = ("programs", "mesh", "estimate", "compiler", "environment")
    print(table(["", "compiled, not measured"], [(k, v) for k, v in result.items() if k not in hidden]))
    return result

"""Compile a config's step for a TPU nobody has booked: bytes per device, whether it fits, the compiler's time estimate.

t2r benchmark compile --config=configs/wikitext103.py:t2r --topology=v3:4x4 [--config.mesh.fsdp=8 ...]
t2r benchmark compile --config=configs/wikitext103.py:t2r --topology=v2:2x2 --decode [--batch=16 --length=512]

The compiler comes with pip install 'jax[tpu]' on Linux for x86_64; no TPU is needed. Nothing here is measured: times
are the compiler's own estimates, which count products and memory traffic and know nothing of the network between hosts.
It counts a loop's body once, so there is no estimate with config.model.scan_layers. least_seconds is what the model's
products take at the peak that the maker states.
"""

from pathlib import Path
from typing import Any

from absl import flags
from ml_collections import config_flags

_CONFIG = config_flags.DEFINE_config_file("config", help_string="Config file of the run, with an optional :VARIANT.")
_TOPOLOGY = flags.DEFINE_string("topology", None, "TPU and its chips, such as v2:2x2 or v5e:4x4.", required=True)
_DECODE = flags.DEFINE_bool("decode", False, "Compile a decoding step in place of a training step.")
_BATCH = flags.DEFINE_integer("batch", 16, "Decoding: texts at once.", lower_bound=1)
_LENGTH = flags.DEFINE_integer("length", 512, "Decoding: tokens of each text.", lower_bound=1)
_OUTPUT = flags.DEFINE_string("output", None, "File for the report, as JSON.")


def main() -> dict[str, Any]:
    from t2r.benchmark.compile import benchmark_compile
    from t2r.console import table

    output = Path(_OUTPUT.value) if _OUTPUT.value else None
    sizes = dict(batch=_BATCH.value, length=_LENGTH.value)
    result = benchmark_compile(_CONFIG.value, _TOPOLOGY.value, decode=_DECODE.value, output=output, **sizes)
    hidden = ("programs", "mesh", "estimate", "compiler", "environment")
    print(table(["", "compiled, not measured"], [(k, v) for k, v in result.items() if k not in hidden]))
    return result

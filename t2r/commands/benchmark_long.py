"""Generate many tokens in one go, and measure speed and memory of each hundredth: flat from the first to the last.

t2r benchmark long --model=DIRECTORY --tokens=1000000 --output=DIR [--temperature=0.8 --top_k=40 --seed=0] [--batch=1]
t2r benchmark long --preset=smollm2_135m --row=t2r --tokens=1000000 --output=DIR     (random weights)

A model directory is measured as it is, with its own weights, beginning with its end token; with --row, or with a
preset, the weights are random. Texts do not end at an end token: the model writes on. Positions beyond those that a
model was trained on are just numbers, except where they are learned. Softmax layers need a cache for all tokens.

Memory is what the device has allocated; on CPUs, what the process has. The number of tokens is rounded up to a multiple
of 100. DIR gets long.jsonl, long.json, long.png and long.svg.
"""

from typing import Any

from absl import flags

from t2r.commands import _benchmark as shared
from t2r.commands._decoding import ignored

_MODEL, _OUTPUT = shared.define_architecture(batch=1), shared.define_output()
_ROW = flags.DEFINE_string("row", None, "How the architecture is converted; default: t2r; with --model, not at all.")
_TOKENS = flags.DEFINE_integer("tokens", 1_000_000, "Tokens to generate.", lower_bound=1, upper_bound=2**31 - 2**7)
_WEIGHTS = flags.DEFINE_string("weights", None, "Type of the matrices: that of --dtype, or int8.")
_TEMPERATURE = flags.DEFINE_float("temperature", 0.0, "Sampling temperature; 0: greedy.", lower_bound=0)
_TOP_K = flags.DEFINE_integer("top_k", 0, "Sample from the k most likely tokens; 0: from all.", lower_bound=0)
_SEED = flags.DEFINE_integer("seed", 0, "Random seed for sampling.", lower_bound=0, upper_bound=2**32 - 1)


def main() -> dict[str, Any]:
    from t2r.benchmark.long import LongOptions, benchmark_long
    from t2r.benchmark.models import UNCHANGED, make_request
    from t2r.decode.sampling import Sampling
    from t2r.errors import InputError, raise_all

    raise_all("flags:", ignored([_TOP_K, _SEED], _TEMPERATURE))
    if "," in (_WEIGHTS.value or ""):
        raise InputError(f"--weights={_WEIGHTS.value}: choose one type, that of --dtype or int8")
    row = _ROW.value or (UNCHANGED if _MODEL.model.value else "t2r")
    directory = _MODEL.model.value if row == UNCHANGED else None
    options = LongOptions(directory, Sampling(_TEMPERATURE.value, _TOP_K.value), _SEED.value)
    request = make_request(
        **shared.values(_MODEL),
        rows=[row],
        lengths=[_TOKENS.value],
        weights=[_WEIGHTS.value] if _WEIGHTS.value else None,
    )
    return benchmark_long(request, options, shared.output(_OUTPUT))

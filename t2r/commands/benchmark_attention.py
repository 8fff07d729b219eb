"""Measure attention alone, forwards and backwards: T2R, its XLA form, and softmax by jax.nn.dot_product_attention.

t2r benchmark attention --output=DIR [--lengths=512,1024,...,32768] [--tokens=65536] [--heads=8 --head_dim=128
    --features=32] [--dtype=bfloat16] [--forms=t2r,chunked,softmax,t2r_dropout,softmax_dropout] [--peers]

Sequences get fewer as they get longer, so that the tokens stay the same. φ(q) and φ(k) are given: what is timed starts
from them, as softmax attention from q and k. On GPU in bfloat16, t2r is the Pallas kernel, softmax cuDNN's. DIR gets
attention.jsonl, attention.json, and plots of both ways together and of the forward pass.
"""

from typing import Any

from absl import flags

from t2r.commands import _benchmark as shared

_GIVEN = shared.define_output()
_LENGTHS = flags.DEFINE_list("lengths", shared.LENGTHS, "Tokens of a sequence.")
_TOKENS = flags.DEFINE_integer("tokens", 65_536, "Tokens of all sequences together.", lower_bound=1)
_HEADS = flags.DEFINE_integer("heads", 8, "Heads.", lower_bound=1)
_HEAD_DIM = flags.DEFINE_integer("head_dim", 128, "Dimensions of a head.", lower_bound=1)
_FEATURES = flags.DEFINE_integer("features", 32, "Features, k.", lower_bound=1)
_DROPOUT = flags.DEFINE_float("dropout", 0.1, "Of the forms that have it.", lower_bound=0, upper_bound=0.99)
_DTYPE = flags.DEFINE_enum("dtype", "bfloat16", ["float32", "bfloat16"], "Of queries, keys and values.")
_FORMS = flags.DEFINE_list("forms", None, "Forms to compare; default: all.")
_SECONDS = flags.DEFINE_float("seconds", 1.0, "Repeat each measurement for so long, at least five times.")
_PEERS = flags.DEFINE_bool("peers", False, "Measure flash-linear-attention too, where it can be imported.")


def main() -> dict[str, Any]:
    from t2r.benchmark.attention import AttentionSizes, benchmark_attention

    sizes = (_TOKENS, _HEADS, _HEAD_DIM, _FEATURES, _DTYPE, _DROPOUT)
    return benchmark_attention(
        AttentionSizes(*(flag.value for flag in sizes)),
        shared.parse_lengths(_LENGTHS.value),
        _FORMS.value or (),
        shared.output(_GIVEN),
        repeat_for=_SECONDS.value,
        with_peers=_PEERS.value,
    )

"""Measure the speed of the attention operation, forward and backward: T2R against softmax.

t2r benchmark attention --output=DIR [--lengths=512,1024,...,32768] [--tokens=65536] [--heads=8 --head_dim=128
    --features=32] [--dtype=bfloat16] [--forms=t2r,chunked,softmax,t2r_dropout,softmax_dropout] [--peers]

Forms: t2r (linear attention; on GPU in bfloat16 a Pallas kernel), chunked (the same by XLA), softmax
(jax.nn.dot_product_attention; on GPU in bfloat16 cuDNN's kernel), and two of them with dropout. The number of tokens is
constant: longer sequences mean smaller batches. Feature maps and projections are not timed: the inputs are φ(q), φ(k)
and v, or q, k and v.

DIR gets attention.jsonl and attention.json, and plots: forward (attention_forward) and forward plus backward
(attention).
"""

from typing import Any

from absl import flags

from t2r.commands import _benchmark as shared

RESUMES = True  # after an interruption

_OUTPUT = shared.define_output()
_LENGTHS = shared.define_numbers("lengths", shared.LENGTHS, "Sequence lengths in tokens.")
_TOKENS = flags.DEFINE_integer("tokens", 65_536, "Tokens in a batch: batch size times sequence length.", lower_bound=1)
_HEADS = flags.DEFINE_integer("heads", 8, "Attention heads.", lower_bound=1)
_HEAD_DIM = flags.DEFINE_integer("head_dim", 128, "Dimension of a head, d.", lower_bound=1)
_FEATURES = flags.DEFINE_integer("features", 32, "Feature size, k.", lower_bound=1)
_DROPOUT = flags.DEFINE_float(
    "dropout", 0.1, "Dropout rate of the forms with dropout.", lower_bound=0, upper_bound=0.99
)
_DTYPE = flags.DEFINE_enum("dtype", "bfloat16", ["float32", "bfloat16"], "Type of queries, keys and values.")
_FORMS = flags.DEFINE_list("forms", None, "Forms to compare; default: all.")
_SECONDS = flags.DEFINE_float("seconds", 1.0, "Repeat each measurement for this time, and at least five times.")
_PEERS = flags.DEFINE_bool("peers", False, "Also measure flash-linear-attention, if installed.")


def main() -> dict[str, Any]:
    from t2r.benchmark.attention import AttentionSizes, benchmark_attention

    sizes = (_TOKENS, _HEADS, _HEAD_DIM, _FEATURES, _DTYPE, _DROPOUT)
    return benchmark_attention(
        AttentionSizes(*(flag.value for flag in sizes)),
        shared.parse_lengths(_LENGTHS.value),
        _FORMS.value or (),
        shared.output(_OUTPUT),
        repeat_for=_SECONDS.value,
        with_peers=_PEERS.value,
    )

"""Prefetching what the next kernel reads into a GPU's L2 cache (Pallas: Triton, NVIDIA).

A small kernel spends its time on its launch and on waiting for the first loads from memory. A kernel can start these
loads for the one after it. Pallas has no operation for that; this module adds one.
"""

from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
from jax._src.pallas.triton import lowering
from jax._src.pallas.triton.primitives import barrier_effect
from jax.extend.core import Primitive
from jaxtyping import Array, Int

LINE_BYTES = 128  # of a cache line
LINES_PER_BLOCK = 256  # prefetched by one instruction of a program

_prefetch = Primitive("prefetch")


def prefetch(ref: Any, program: Array, programs: int) -> None:
    """In a program: prefetches this program's share of an array."""
    elements_per_line = LINE_BYTES // ref.dtype.itemsize
    for lines in lines_of_program(-(-ref.size // elements_per_line), program, programs):
        _prefetch.bind(ref, lines * elements_per_line)


def lines_of_program(lines: int, program: Array | int, programs: int) -> Iterator[Int[Array, "block"]]:
    """Numbers of the cache lines that this program prefetches, in blocks; past the end, the last line is repeated."""
    count = -(-lines // programs)
    for first in range(0, count, LINES_PER_BLOCK):
        yield jnp.minimum(program * count + first + jnp.arange(LINES_PER_BLOCK), lines - 1)


def _lower_for_triton(context: lowering.LoweringRuleContext, pointer, offsets) -> list:
    del context
    pointers = lowering._add(lowering._bcast_to(pointer, [LINES_PER_BLOCK]), offsets)
    result = lowering.ir.RankedTensorType.get([LINES_PER_BLOCK], lowering._dtype_to_ir_type(jnp.dtype("int32")))
    assembly = "prefetch.global.L2 [$1]; mov.u32 $0, 0;"  # inline assembly must have a result; it is not used
    lowering.tt_dialect.elementwise_inline_asm(
        [result], assembly, constraints="=r,l", pure=False, packed_element=1, args=[pointers]
    )
    return []


_prefetch.multiple_results = True
# Without an effect, the compiler would remove an operation that has no results.
_prefetch.def_effectful_abstract_eval(lambda ref, offsets: ((), {barrier_effect}))
lowering.register_lowering(_prefetch)(_lower_for_triton)

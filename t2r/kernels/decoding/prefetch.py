"""Asking a GPU's cache for what the next kernel will read (Pallas: Triton, NVIDIA).

A small kernel's time is that of starting, and of waiting for the first numbers from memory. The second can begin while
the kernel before it still runs. Pallas has no way to say so; this is one.
"""

from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
from jax._src.pallas.triton import lowering
from jax._src.pallas.triton.primitives import barrier_effect
from jax.extend.core import Primitive
from jaxtyping import Array, Int

LINE = 128  # bytes that a cache takes at once
BLOCK = 256  # lines asked for at once

_prefetch = Primitive("prefetch")


def prefetch(ref: Any, program: Array, programs: int) -> None:
    """In a program: asks for its share of an array."""
    each = LINE // ref.dtype.itemsize
    for lines in share(-(-ref.size // each), program, programs):
        _prefetch.bind(ref, lines * each)


def share(lines: int, program: Array, programs: int) -> Iterator[Int[Array, "block"]]:
    """Numbers of the lines that are a program's, in blocks; the last line again where there are no more."""
    count = -(-lines // programs)
    for first in range(0, count, BLOCK):
        yield jnp.minimum(program * count + first + jnp.arange(BLOCK), lines - 1)


def _for_triton(context: lowering.LoweringRuleContext, pointer, places) -> list:
    del context
    pointers = lowering._add(lowering._bcast_to(pointer, [BLOCK]), places)
    tensor = lowering.ir.RankedTensorType.get([BLOCK], lowering._dtype_to_ir_type(jnp.dtype("int32")))
    assembly = "prefetch.global.L2 [$1]; mov.u32 $0, 0;"  # it has to give a number, which nobody takes
    lowering.tt_dialect.elementwise_inline_asm(
        [tensor], assembly, constraints="=r,l", pure=False, packed_element=1, args=[pointers]
    )
    return []


_prefetch.multiple_results = True
_prefetch.def_effectful_abstract_eval(lambda ref, places: ((), {barrier_effect}))  # lest it is left out
lowering.register_lowering(_prefetch)(_for_triton)

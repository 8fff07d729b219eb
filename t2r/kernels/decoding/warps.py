"""A product of small blocks whose terms are divided among a program's warps (Pallas: Triton, GPU).

Triton divides the outputs of a product among warps. If there are few outputs, every warp computes all of them and reads
all of both operands. Here operands have a leading axis with one entry for each warp, so each warp reads its own part.
Pallas has no lowering for a product with three axes; this module adds it.
"""

import jax
import jax.numpy as jnp
from jax._src.pallas.triton import lowering
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jaxtyping import Array, Float

_add_product = Primitive("add_product_by_warps")


def add_product_by_warps(
    total: Float[Array, "w m n"], a: Float[Array, "w m k"], b: Float[Array, "w n k"]
) -> Float[Array, "w m n"]:
    """total + a · bᵀ for each warp w, in float32."""
    return _add_product.bind(total, a, b)


def _plain(total: Array, a: Array, b: Array) -> Array:
    return total + jax.lax.dot_general(a, b, (((2,), (2,)), ((0,), (0,))), preferred_element_type=jnp.float32)


def _lower_for_triton(context: lowering.LoweringRuleContext, total, a, b):
    del context
    return lowering.tt_dialect.dot(a, lowering.tt_dialect.trans(b, (0, 2, 1)), total)


_add_product.def_impl(_plain)
_add_product.def_abstract_eval(lambda total, a, b: total)
mlir.register_lowering(_add_product, mlir.lower_fun(_plain, multiple_results=False))
lowering.register_lowering(_add_product)(_lower_for_triton)

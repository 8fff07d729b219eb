"""A product of blocks whose sums are divided among a program's warps (Pallas: Triton, GPU).

Triton gives each warp a part of the result. Of a small one it gives all of it to every warp, and all of them read all
of both blocks. With a leading axis there is a part for each warp, but Pallas has no rule for products of three axes.
This is that rule, and nothing else.
"""

import jax
import jax.numpy as jnp
from jax._src.pallas.triton import lowering
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jaxtyping import Array, Float

_add_product = Primitive("add_product_by_warps")


def add_product_by_warps(
    found: Float[Array, "w m n"], a: Float[Array, "w m k"], b: Float[Array, "w n k"]
) -> Float[Array, "w m n"]:
    """found + a · bᵀ of each warp, in float32."""
    return _add_product.bind(found, a, b)


def _plain(found: Array, a: Array, b: Array) -> Array:
    return found + jax.lax.dot_general(a, b, (((2,), (2,)), ((0,), (0,))), preferred_element_type=jnp.float32)


def _for_triton(context: lowering.LoweringRuleContext, found, a, b):
    del context
    return lowering.tt_dialect.dot(a, lowering.tt_dialect.trans(b, (0, 2, 1)), found)


_add_product.def_impl(_plain)
_add_product.def_abstract_eval(lambda found, a, b: found)
mlir.register_lowering(_add_product, mlir.lower_fun(_plain, multiple_results=False))
lowering.register_lowering(_add_product)(_for_triton)

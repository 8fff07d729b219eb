"""A decoding step of linear attention as one kernel: S and z take in a key and a value, and queries read them (Pallas).

The same function as `linear.recurrent` on one token. S is read and written once, in place; plain JAX reads it twice.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from t2r.normalizer import Normalizer


def step(
    q: Float[Array, "b g r k"],
    k: Float[Array, "b g k"],
    v: Float[Array, "b g d"],
    S: Float[Array, "b g k d"],
    z: Float[Array, "b g k"],
    normalizer: Normalizer,
    *,
    interpret: bool = False,
) -> tuple[Float[Array, "b g r d"], Float[Array, "b g k d"], Float[Array, "b g k"]]:
    """The output, in the values' type, and S and z after the token, in float32."""
    batch, groups, per_group, features = q.shape
    size = v.shape[-1]

    def of_a_text(*shape: int) -> pl.BlockSpec:  # the last two dimensions whole, as a TPU's tiles want them
        return pl.BlockSpec((None, *shape), lambda text: (text,) + (0,) * len(shape))

    column, matrix = of_a_text(groups, features, 1), of_a_text(groups, features, size)
    out = jax.ShapeDtypeStruct((batch, groups, per_group, size), v.dtype)
    float32 = [x.astype(jnp.float32) for x in (q, k[..., None], v[:, :, None, :], S, z[..., None])]
    found, S, z = pl.pallas_call(
        functools.partial(_step, normalizer),
        grid=(batch,),
        in_specs=[of_a_text(groups, per_group, features), column, of_a_text(groups, 1, size), matrix, column],
        out_specs=[of_a_text(groups, per_group, size), matrix, column],
        out_shape=[out, *(jax.ShapeDtypeStruct(x.shape, jnp.float32) for x in float32[3:])],
        input_output_aliases={3: 1, 4: 2},
        interpret=interpret,
    )(*float32)
    return found, S, z[..., 0]


def _step(normalizer: Normalizer, q, k, v, S, z, out, new_S, new_z) -> None:
    for group in range(q.shape[0]):
        state, total = S[group] + k[group] * v[group], z[group] + k[group]
        above, below = _dot(q[group], state), _dot(q[group], total)
        out[group] = (above / normalizer(below)).astype(out.dtype)
        new_S[group], new_z[group] = state, total


def _dot(a: Array, b: Array) -> Array:
    return jnp.dot(a, b, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32)

"""One decoding step of linear attention as one kernel: S and z are updated by a key and a value, then queried (Pallas).

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
    """The output, in the dtype of v, and the new S = S + k vᵀ and z = z + k, in float32."""
    batch, groups, per_group, features = q.shape
    size = v.shape[-1]

    def one_sequence(*shape: int) -> pl.BlockSpec:  # a TPU's tiles span the last two dimensions, so blocks hold both
        return pl.BlockSpec((None, *shape), lambda sequence: (sequence,) + (0,) * len(shape))

    column, matrix = one_sequence(groups, features, 1), one_sequence(groups, features, size)
    out_shape = jax.ShapeDtypeStruct((batch, groups, per_group, size), v.dtype)
    inputs = [x.astype(jnp.float32) for x in (q, k[..., None], v[:, :, None, :], S, z[..., None])]
    out, S, z = pl.pallas_call(
        functools.partial(_step, normalizer),
        grid=(batch,),
        in_specs=[one_sequence(groups, per_group, features), column, one_sequence(groups, 1, size), matrix, column],
        out_specs=[one_sequence(groups, per_group, size), matrix, column],
        out_shape=[out_shape, *(jax.ShapeDtypeStruct(x.shape, jnp.float32) for x in inputs[3:])],
        input_output_aliases={3: 1, 4: 2},
        interpret=interpret,
    )(*inputs)
    return out, S, z[..., 0]


def _step(normalizer: Normalizer, q, k, v, S, z, out, new_S, new_z) -> None:
    for group in range(q.shape[0]):
        next_S, next_z = S[group] + k[group] * v[group], z[group] + k[group]
        numerator, denominator = _dot(q[group], next_S), _dot(q[group], next_z)
        out[group] = (numerator / normalizer(denominator)).astype(out.dtype)
        new_S[group], new_z[group] = next_S, next_z


def _dot(a: Array, b: Array) -> Array:
    return jnp.dot(a, b, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32)

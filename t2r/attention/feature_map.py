"""φ: the feature maps of linear attention, by name.

Linear attention replaces exp(q·k/√d) by φ(q)·φ(k). A feature map is a small module that is called
once with the queries and once with the keys of a layer. Dimensions, here and in `linear.py`:

    b batch, n or m length, g key/value heads, r query heads per key/value head, d head size, k features

Queries are (b, n, g, r, d), keys are (b, m, g, d): φ belongs to a key/value head, and all query
heads of its group share it, so that the recurrent state is as small as the group count allows.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, PRNGKeyArray

from t2r.errors import InputError
from t2r.normalizer import Normalizer


class Features(NamedTuple):
    """φ(x) = values · exp(log_scale).

    Maps that exponentiate keep the large part of the exponent apart in `log_scale`, one number per key
    and head, so that `linear.py` can carry a running maximum instead of overflowing. Others leave it None.
    Queries never need it: a factor common to all of a query's features cancels in the normalised output.
    """

    values: Array  # (b, n, g, r, k) for queries, (b, m, g, k) for keys
    log_scale: Float[Array, "b m g"] | None = None


class Constant(nnx.Variable):
    """An array that belongs to the model and is saved with it, but is never trained."""


class T2R(nnx.Module):
    """The paper's: φ(x) = relu(W x + b), one single-layer MLP per head, shared by queries and keys.

    Queries are scaled by d^-½ before φ, keys are not; because of b this does not cancel.
    """

    normalizer = Normalizer(clamp=True, value=1e-2)
    default_features = 32

    def __init__(self, heads: int, head_dim: int, features: int, *, query_scale: float, rngs: nnx.Rngs):
        limit = head_dim**-0.5
        shape = (heads, features, head_dim)
        self.weight = nnx.Param(jax.random.uniform(rngs.params(), shape, minval=-limit, maxval=limit))
        self.bias = nnx.Param(jax.random.uniform(rngs.params(), shape[:2], minval=-limit, maxval=limit))
        self.query_scale = query_scale

    def __call__(self, x: Array, *, is_query: bool, key: PRNGKeyArray | None = None) -> Features:
        if is_query:
            x = x * self.query_scale
        bias = self.bias[...].astype(x.dtype)
        hidden = jnp.einsum("bng...d,gkd->bng...k", x, self.weight[...].astype(x.dtype))
        return Features(jax.nn.relu(hidden + (bias[:, None, :] if is_query else bias)))


class Elu(nnx.Module):
    """Katharopoulos et al. (2020): φ(x) = elu(x) + 1. As many features as head dimensions, no scaling."""

    normalizer = Normalizer(clamp=False, value=1e-6)
    default_features = None  # the head size

    def __init__(self, heads: int, head_dim: int, features: int, *, query_scale: float, rngs: nnx.Rngs):
        if features != head_dim:
            raise InputError(
                f"feature map 'elu' has as many features as the head has dimensions: "
                f"features={features} cannot be, use {head_dim} or leave it out"
            )

    def __call__(self, x: Array, *, is_query: bool, key: PRNGKeyArray | None = None) -> Features:
        return Features(jax.nn.elu(x) + 1)


class Rfa(nnx.Module):
    """Peng et al. (2021): random Fourier features of the Gaussian kernel on normalised vectors.

    φ(x) = scale · [sin W x̂, cos W x̂], x̂ = x/(‖x‖ + 1e-3), W = W̃ ⊙ σ; D directions make k = 2D features.
    W̃ comes from a fixed pool of standard Gaussian matrices: in training each head draws another one at
    every step, in evaluation all use the first. σ (per head and dimension) is learned.
    """

    # Released code has two pairs of scale and clamp that agree in ratio; this is the RFA authors' own.
    scale = 0.1
    normalizer = Normalizer(clamp=True, value=1.0)
    default_features = 32
    pool_size = 64

    def __init__(self, heads: int, head_dim: int, features: int, *, query_scale: float, rngs: nnx.Rngs):
        if features % 2:
            raise InputError(f"feature map 'rfa' makes sine and cosine pairs: features={features} must be even")
        shape = (self.pool_size, features // 2, head_dim)
        self.pool = Constant(jax.random.normal(rngs.params(), shape))
        self.sigma = nnx.Param(jnp.ones((heads, head_dim)))

    def __call__(self, x: Array, *, is_query: bool, key: PRNGKeyArray | None = None) -> Features:
        heads = self.sigma.shape[0]
        drawn = jnp.zeros(heads, int) if key is None else jax.random.randint(key, (heads,), 0, self.pool_size)
        directions = self.pool[...][drawn] * self.sigma[...][:, None, :]  # (g, k/2, d)
        unit = x.astype(jnp.float32)
        unit = unit / (_norm(unit) + 1e-3)
        angles = jnp.einsum("bng...d,gkd->bng...k", unit, directions)
        waves = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)
        return Features((self.scale * waves).astype(x.dtype))


class Performer(nnx.Module):
    """Choromanski et al. (2021), FAVOR+: positive orthogonal random features of the softmax kernel.

    φ(x) = m^-½ · exp(W x − ‖x‖²/2) with x scaled by d^-¼. The largest exponent of each key goes to
    `log_scale`, so that S and z are kept relative to a running maximum: exact, causal and stable.
    """

    # Nothing to regularise, the features are positive; this only keeps an underflow from dividing by zero. Its square
    # stands in the gradient and must not underflow either.
    normalizer = Normalizer(clamp=True, value=1e-15)
    default_features = 32

    def __init__(self, heads: int, head_dim: int, features: int, *, query_scale: float, rngs: nnx.Rngs):
        self.directions = Constant(orthogonal_gaussian(rngs.params(), heads, features, head_dim))
        self.input_scale = query_scale**0.5  # d^-¼ on both sides makes d^-½ in the product

    def __call__(self, x: Array, *, is_query: bool, key: PRNGKeyArray | None = None) -> Features:
        scaled = x.astype(jnp.float32) * self.input_scale
        exponent = jnp.einsum("bng...d,gkd->bng...k", scaled, self.directions[...])
        exponent -= 0.5 * _norm(scaled) ** 2 + 0.5 * jnp.log(exponent.shape[-1])
        # The output does not depend on the maximum, so no gradient has to flow through it.
        largest = jax.lax.stop_gradient(exponent.max(-1))
        values = jnp.exp(exponent - largest[..., None]).astype(x.dtype)
        return Features(values, None if is_query else largest)


def _norm(x: Array) -> Array:
    """‖x‖ over the last axis, kept; with a gradient of zero instead of NaN at zero."""
    square = jnp.sum(x * x, axis=-1, keepdims=True)
    positive = square > 0
    return jnp.where(positive, jnp.sqrt(jnp.where(positive, square, 1.0)), 0.0)


def orthogonal_gaussian(key: PRNGKeyArray, heads: int, features: int, head_dim: int) -> Float[Array, "g k d"]:
    """Rows orthogonal within blocks of `head_dim`, each with the norm of an independent Gaussian vector."""
    blocks = -(-features // head_dim)
    direction_key, norm_key = jax.random.split(key)
    q, r = jnp.linalg.qr(jax.random.normal(direction_key, (heads, blocks, head_dim, head_dim)))
    # QR fixes signs by convention; those of r's diagonal make q uniform among the rotations, and the kernel unbiased.
    q = q * jnp.sign(jnp.diagonal(r, axis1=-2, axis2=-1))[..., None, :]
    rows = q.reshape(heads, blocks * head_dim, head_dim)[:, :features]
    norms = jnp.linalg.norm(jax.random.normal(norm_key, rows.shape), axis=-1, keepdims=True)
    return rows * norms


FEATURE_MAPS = {"t2r": T2R, "elu": Elu, "rfa": Rfa, "performer": Performer}


def feature_map_class(name: str) -> type:
    """The class of a feature map; an unknown name is an error that lists the known ones."""
    if name not in FEATURE_MAPS:
        raise InputError(f"unknown feature map {name!r}: choose one of {', '.join(FEATURE_MAPS)}")
    return FEATURE_MAPS[name]

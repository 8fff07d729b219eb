"""φ: the feature maps of linear attention, by name.

Linear attention replaces the similarity exp(q·k/√d) by φ(q)·φ(k). A feature map is a module that is called once with
the queries and once with the keys of a layer. Axes, here and in all of `t2r.attention`:

    b batch, n queries, m keys, g key/value heads, r query heads per key/value head, d head size, k features

(The paper's r is the number of heads, here g·r, and its h is here `width`.) Queries are (b, n, g, r, d), keys are
(b, m, g, d). Each key/value head has its own φ, which the r query heads of its group share: one state (S, z) for each
key/value head is then enough.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, PRNGKeyArray

from t2r.errors import InputError, unknown
from t2r.normalizer import Normalizer


class Features(NamedTuple):
    """φ(x) = values · exp(log_scale).

    A map that exponentiates puts the largest exponent of each query, or key, and head into `log_scale`, and `linear.py`
    carries a running maximum of the keys', so that nothing overflows. Other maps leave it None. That of a query cancels
    in the normalised output of linear attention; beside exact attention it does not, so `windowed.py` uses it.
    """

    values: Array  # (b, n, g, r, k) for queries, (b, m, g, k) for keys
    log_scale: Array | None = None  # (b, n, g, r) for queries, (b, m, g) for keys; float32


class Constant(nnx.Variable):
    """An array that is saved with the model but never trained."""


class T2R(nnx.Module):
    """The paper's feature map: φ(x) = relu(W_φ x + b_φ), one single-layer MLP for each head (§2.2).

    Queries and keys share it. Queries are scaled by d^-½ before φ, keys are not. The scale matters: because of b_φ it
    does not cancel in the normalised output.
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
        return Features(self.activation(hidden + (bias[:, None, :] if is_query else bias)))

    @staticmethod
    def activation(hidden: Array) -> Array:
        return jax.nn.relu(hidden)


class T2RElu(T2R):
    """T2R with ELU's activation, φ(x) = elu(W_φ x + b_φ) + 1: not in the paper. No feature is ever exactly zero."""

    @staticmethod
    def activation(hidden: Array) -> Array:
        return jax.nn.elu(hidden) + 1


class Hedgehog(nnx.Module):
    """Zhang et al. (2024), Hedgehog: φ(x) = softmax([W x, −W x]) over the k features, with W (k/2, d) for each head.

    W is learned, and its rows are orthonormal at first, in blocks of d. x is scaled by d^-¼: with W the identity, W q·W
    k is softmax attention's score.
    """

    maps_by_softmax = True  # read by t2r.kernels.decoding.layers_packing
    pairs_of = "exponents, W x and −W x"  # so k is even
    # The features are positive and sum to 1. The clamp prevents a division by zero: where all keys are padding, or
    # have their weight in other features than the query.
    normalizer = Normalizer(clamp=True, value=1e-6)
    default_features = 32

    def __init__(self, heads: int, head_dim: int, features: int, *, query_scale: float, rngs: nnx.Rngs):
        _need_pairs(self, features)
        directions = orthogonal_gaussian(rngs.params(), heads, features // 2, head_dim)
        self.weight = nnx.Param(directions / _norm(directions))
        self.input_scale = query_scale**0.5  # d^-¼ for queries and for keys: d^-½ in their product

    def __call__(self, x: Array, *, is_query: bool, key: PRNGKeyArray | None = None) -> Features:
        weight = (self.input_scale * self.weight[...]).astype(x.dtype)
        exponent = jnp.einsum("bng...d,gkd->bng...k", x, weight, preferred_element_type=jnp.float32)
        return Features(jax.nn.softmax(jnp.concatenate([exponent, -exponent], -1), -1).astype(x.dtype))


class Elu(nnx.Module):
    """Katharopoulos et al. (2020): φ(x) = elu(x) + 1, so k = d. Queries are not scaled."""

    normalizer = Normalizer(clamp=False, value=1e-6)
    default_features = None  # the head size

    def __init__(self, heads: int, head_dim: int, features: int, *, query_scale: float, rngs: nnx.Rngs):
        if features != head_dim:
            raise InputError(
                f"feature map 'elu' has as many features as the head has dimensions: "
                f"features={features} must be {head_dim} or left out"
            )

    def __call__(self, x: Array, *, is_query: bool, key: PRNGKeyArray | None = None) -> Features:
        return Features(jax.nn.elu(x) + 1)


class Rfa(nnx.Module):
    """Peng et al. (2021), RFA: random Fourier features of the Gaussian kernel on normalised vectors.

    φ(x) = scale · [sin W x̂, cos W x̂] with x̂ = x / (‖x‖ + 1e-3) and W = W̃ ⊙ σ, where W̃ is (k/2, d).
    W̃ comes from a fixed pool of standard Gaussian matrices. In training each head draws one at every step; in
    evaluation all heads use the first. σ is learned for each head and dimension.
    """

    normalizer = Normalizer(clamp=True, value=1.0)
    default_features = 32
    pairs_of = "sines and cosines"  # so k is even
    pool_size = 64

    def __init__(self, heads: int, head_dim: int, features: int, *, query_scale: float, rngs: nnx.Rngs):
        _need_pairs(self, features)
        shape = (self.pool_size, features // 2, head_dim)
        self.pool = Constant(jax.random.normal(rngs.params(), shape))
        self.sigma = nnx.Param(jnp.ones((heads, head_dim)))

    def __call__(self, x: Array, *, is_query: bool, key: PRNGKeyArray | None = None) -> Features:
        heads = self.sigma.shape[0]
        choice = jnp.zeros(heads, int) if key is None else jax.random.randint(key, (heads,), 0, self.pool_size)
        directions = self.pool[...][choice] * self.sigma[...][:, None, :]  # (g, k/2, d)
        unit = x.astype(jnp.float32)
        unit = unit / (_norm(unit) + 1e-3)
        angles = jnp.einsum("bng...d,gkd->bng...k", unit, directions)
        waves = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)
        return Features((rfa_scale(directions.shape[1]) * waves).astype(x.dtype))


def rfa_scale(directions: int) -> float:
    """The scale of RFA's features: φ(q)·φ(k) is then about 0.64 times the kernel, whatever the number of directions.

    The RFA authors' is 0.1 with 64 directions, and their clamp is 1. With two directions, as in the paper's translation
    models, a scale of 0.1 would leave the normaliser at its clamp for the first 50 tokens.
    """
    return 0.8 * directions**-0.5


class RfaFixed(Rfa):
    """RFA whose W̃ is drawn once, before training: not in the paper.

    With few features a draw is a coarse approximation. A model can adapt to one, not to a new one at every step
    (measured in results/NOTES.md).
    """

    pool_size = 1


class Performer(nnx.Module):
    """Choromanski et al. (2021), FAVOR+: positive orthogonal random features of the softmax kernel.

    φ(x) = k^-½ · exp(W x − ‖x‖²/2) with x scaled by d^-¼. The largest exponent goes to `log_scale`, so that S and z are
    relative to a running maximum: exact, causal, and without overflow.
    """

    # The features are positive, so the clamp only prevents a division by zero after an underflow. The gradient divides
    # by its square, which must not underflow either.
    normalizer = Normalizer(clamp=True, value=1e-15)
    default_features = 32

    def __init__(self, heads: int, head_dim: int, features: int, *, query_scale: float, rngs: nnx.Rngs):
        self.directions = Constant(orthogonal_gaussian(rngs.params(), heads, features, head_dim))
        self.input_scale = query_scale**0.5  # d^-¼ for queries and for keys: d^-½ in their product

    def __call__(self, x: Array, *, is_query: bool, key: PRNGKeyArray | None = None) -> Features:
        scaled = x.astype(jnp.float32) * self.input_scale
        exponent = jnp.einsum("bng...d,gkd->bng...k", scaled, self.directions[...])
        exponent -= 0.5 * _norm(scaled) ** 2 + 0.5 * jnp.log(exponent.shape[-1])
        # The attention output does not depend on this maximum, so no gradient has to flow through it.
        largest = jax.lax.stop_gradient(exponent.max(-1))
        values = jnp.exp(exponent - largest[..., None]).astype(x.dtype)
        return Features(values, largest)


def _need_pairs(feature_map: Hedgehog | Rfa, features: int) -> None:
    if features % 2:
        raise InputError(f"features={features} must be even: they are pairs of {feature_map.pairs_of}")


def _norm(x: Array) -> Array:
    """‖x‖ over the last axis (which becomes 1); its gradient at x = 0 is 0, not NaN."""
    square = jnp.sum(x * x, axis=-1, keepdims=True)
    positive = square > 0
    return jnp.where(positive, jnp.sqrt(jnp.where(positive, square, 1.0)), 0.0)


def orthogonal_gaussian(key: PRNGKeyArray, heads: int, features: int, head_dim: int) -> Float[Array, "g k d"]:
    """Random directions, orthogonal within blocks of d, each with the norm of an independent Gaussian vector."""
    blocks = -(-features // head_dim)
    direction_key, norm_key = jax.random.split(key)
    q, r = jnp.linalg.qr(jax.random.normal(direction_key, (heads, blocks, head_dim, head_dim)))
    # QR's sign convention biases q. With the signs of r's diagonal q is uniform among orthogonal matrices, and so the
    # kernel estimate is unbiased.
    q = q * jnp.sign(jnp.diagonal(r, axis1=-2, axis2=-1))[..., None, :]
    directions = q.reshape(heads, blocks * head_dim, head_dim)[:, :features]
    norms = jnp.linalg.norm(jax.random.normal(norm_key, directions.shape), axis=-1, keepdims=True)
    return directions * norms


FEATURE_MAPS = {
    "t2r": T2R,
    "elu": Elu,
    "rfa": Rfa,
    "rfa_fixed": RfaFixed,
    "performer": Performer,
    "hedgehog": Hedgehog,
    "t2r_elu": T2RElu,
}


def feature_map_class(name: str) -> type:
    """The class of the feature map `name`."""
    if name not in FEATURE_MAPS:
        raise InputError(unknown("feature map", name, FEATURE_MAPS))
    return FEATURE_MAPS[name]

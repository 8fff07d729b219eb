"""Linear attention (the paper's §2.2) as pure functions: quadratic, chunked, recurrent.

The three forms have one signature and compute the same function. With

    S_i = Σ_{j≤i} φ(k_j) ⊗ v_j        z_i = Σ_{j≤i} φ(k_j)        x_out_i = φ(q_i)·S_i / normalizer(φ(q_i)·z_i)

each sum is over the keys in `state`, then over those of this call up to the query's own (without `causal`, over all).
The paper divides by φ(q)·z itself; see `Normalizer`.

Queries φ(q) are (b, n, g, r, k), keys φ(k) are (b, m, g, k), values are (b, m, g, d); axes as in `feature_map.py`.
`mask` (b, m) is False where a key is padding: it then enters neither S nor z. Each form returns the output
(b, n, g, r, d), in the dtype of the values, and the state after the last key, in float32.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from t2r.attention.causal import drop_weights, query_blocks
from t2r.attention.feature_map import Features
from t2r.attention.products import weighted_sums
from t2r.kernels import load as load_kernels
from t2r.kernels.support import is_one_device, kernel_platform
from t2r.normalizer import Normalizer

# The log_scale of "no key yet". Finite, because −∞ − (−∞) is NaN.
LOWEST = -1e30
# Up to this length, computing all pairs of query and key costs less than carrying a state between chunks.
QUADRATIC_LENGTH = 128


class LinearState(NamedTuple):
    """The recurrent state (S, z). With a log_scale, the true values are S · exp(log_scale) and z · exp(log_scale)."""

    S: Float[Array, "b g k d"]
    z: Float[Array, "b g k"]
    log_scale: Float[Array, "b g"] | None = None

    @classmethod
    def zeros(cls, batch: Any, heads: int, features: int, head_dim: int, *, scaled: bool = False) -> "LinearState":
        """The state before the first token; `scaled` is for feature maps whose keys have a log_scale.

        `batch` is a symbolic dimension in programs exported for any batch size.
        """
        log_scale = jnp.full((batch, heads), LOWEST) if scaled else None
        return cls(jnp.zeros((batch, heads, features, head_dim)), jnp.zeros((batch, heads, features)), log_scale)


def update(state: LinearState, k: Features, v: Array, mask: Bool[Array, "b m"] | None = None) -> LinearState:
    """Adds keys and values to the state: S + Σ_j φ(k_j) ⊗ v_j and z + Σ_j φ(k_j).

    With a log_scale, first rescales both terms to the new running maximum.
    """
    k = _zero_padding(k, mask)
    S, z, log_scale = state
    values = k.values
    if k.log_scale is not None:
        log_scale = jnp.maximum(state.log_scale, k.log_scale.max(1))
        values = values.astype(jnp.float32) * jnp.exp(k.log_scale - log_scale[:, None])[..., None]
        shrink = jnp.exp(state.log_scale - log_scale)
        S, z = S * shrink[..., None, None], z * shrink[..., None]
    return LinearState(S + _outer_products(values, v), z + values.sum(1, dtype=jnp.float32), log_scale)


def _outer_products(values: Float[Array, "b m g k"], v: Float[Array, "b m g d"]) -> Float[Array, "b g k d"]:
    """Σ_m φ(k_m) ⊗ v_m, in float32."""
    product = functools.partial(jnp.einsum, "bmgk,bmgd->bgkd", preferred_element_type=jnp.float32)
    float32_product = lambda *arrays: product(*(x.astype(jnp.float32) for x in arrays))  # noqa: E731
    # On CPUs XLA compiles this product of bfloat16 arrays, but in some layouts cannot run it.
    return jax.lax.platform_dependent(values, v, cpu=float32_product, default=product)


def query_state(state: LinearState, q: Features, normalizer: Normalizer, dtype=None) -> Float[Array, "b n g r d"]:
    """x_out = φ(q)·S / normalizer(φ(q)·z)."""
    values = q.values.astype(jnp.float32)
    numerator = weighted_sums(jnp.moveaxis(values, 1, 2), state.S)
    denominator = jnp.einsum("bngrk,bgk->bngr", values, state.z)
    return (numerator / normalizer(denominator)[..., None]).astype(dtype or q.values.dtype)


def quadratic(
    q: Features,
    k: Features,
    v: Float[Array, "b m g d"],
    normalizer: Normalizer,
    *,
    state: LinearState | None = None,
    mask: Bool[Array, "b m"] | None = None,
    causal: bool = True,
    offset: int = 0,
    length: int | None = None,
    dropout: float = 0.0,
    key: PRNGKeyArray | None = None,
) -> tuple[Float[Array, "b n g r d"], LinearState]:
    """x_out_i = Σ_j φ(q_i)·φ(k_j) v_j / Σ_j φ(q_i)·φ(k_j), over all pairs of query and key.

    The only form with dropout, which acts on the normalised attention weights. The queries may be a block of a longer
    sequence: the first query is at the position of key `offset`, and `length` is the length of the sequence.
    """
    has_past = state is not None
    state = state if has_past else initial_state(k, v)
    similarity, state_scale = _similarities(q, k, state, mask, causal, offset)
    denominator = similarity.sum(-1)
    if has_past:
        values = q.values.astype(jnp.float32) * state_scale
        denominator += jnp.einsum("bngrk,bgk->bgnr", values, state.z)
    denominator = normalizer(denominator)[..., None]
    # Dropout commutes with the division below, so this is dropout on the normalised weights.
    similarity = drop_weights(similarity, dropout, key, first=offset, length=length)
    out = jnp.einsum("bgnrm,bmgd->bgnrd", similarity.astype(v.dtype), v, preferred_element_type=jnp.float32)
    if has_past:
        out += jnp.einsum("bngrk,bgkd->bgnrd", values, state.S)
    out /= denominator
    return jnp.moveaxis(out, 1, 2).astype(v.dtype), update(state, k, v, mask)


def weights(
    q: Features, k: Features, normalizer: Normalizer, *, mask: Array | None = None, causal: bool = True
) -> Float[Array, "b g n r m"]:
    """The attention weights φ(q_i)·φ(k_j) / normalizer(φ(q_i)·z_i), for analysis."""
    state = initial_state(k, jnp.zeros((*k.values.shape[:-1], 0)))
    similarity, _ = _similarities(q, k, state, mask, causal)
    return similarity / normalizer(similarity.sum(-1))[..., None]


def chunked(
    q: Features,
    k: Features,
    v: Float[Array, "b m g d"],
    normalizer: Normalizer,
    *,
    state: LinearState | None = None,
    mask: Bool[Array, "b m"] | None = None,
    causal: bool = True,
    chunk: int = 128,
) -> tuple[Float[Array, "b n g r d"], LinearState]:
    """Quadratic within chunks, recurrent between them: linear in length, with large matrix products."""
    state = initial_state(k, v) if state is None else state
    if not causal:  # all queries share one state, which includes every key
        state = update(state, k, v, mask)
        return query_state(state, q, normalizer, v.dtype), state

    batch, length = v.shape[:2]
    count = -(-length // chunk)
    mask = jnp.ones((batch, length), bool) if mask is None else mask

    def split(x: Array) -> Array:  # (b, n, …) → (b, chunks, chunk, …); padding is zero, and so masked
        x = jnp.pad(x, [(0, 0), (0, count * chunk - length)] + [(0, 0)] * (x.ndim - 2))
        return x.reshape(batch, count, chunk, *x.shape[2:])

    chunks = jax.tree.map(split, (q, k, v, mask))
    run_chunks = _parallel_chunks if k.log_scale is None else _sequential_chunks
    out, state = run_chunks(*chunks, normalizer, state)
    return out.reshape(batch, count * chunk, *out.shape[3:])[:, :length], state


def _parallel_chunks(q: Features, k: Features, v: Array, mask: Array, normalizer: Normalizer, state: LinearState):
    """All chunks as one batch. The state before each is the cumulative sum of (S, z) over earlier chunks."""
    batch, count = v.shape[:2]
    # (b, chunks, chunk, …) → (b · chunks, chunk, …)
    merge_axes = lambda tree: jax.tree.map(lambda x: x.reshape(batch * count, *x.shape[2:]), tree)  # noqa: E731
    q, k, v, mask = merge_axes((q, k, v, mask))
    per_chunk = update(initial_state(k, v), k, v, mask)  # what each chunk adds to S and z
    after = jax.tree.map(
        lambda start, x: start[:, None] + jnp.cumsum(x.reshape(batch, count, *x.shape[1:]), 1), state, per_chunk
    )
    before = jax.tree.map(lambda start, x: jnp.concatenate([start[:, None], x[:, :-1]], 1), state, after)
    out, _ = quadratic(q, k, v, normalizer, state=merge_axes(before), mask=mask)
    return out.reshape(batch, count, *out.shape[1:]), jax.tree.map(lambda x: x[:, -1], after)


def _sequential_chunks(q: Features, k: Features, v: Array, mask: Array, normalizer: Normalizer, state: LinearState):
    """Chunks in a scan, for features with a log_scale: a running maximum makes S and z no plain sums."""

    def one_chunk(state, inputs):
        q, k, v, mask = inputs
        out, state = quadratic(q, k, v, normalizer, state=state, mask=mask)
        return state, out

    state, out = jax.lax.scan(one_chunk, state, jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (q, k, v, mask)))
    return jnp.moveaxis(out, 0, 1), state


def recurrent(
    q: Features,
    k: Features,
    v: Float[Array, "b m g d"],
    normalizer: Normalizer,
    *,
    state: LinearState | None = None,
    mask: Bool[Array, "b m"] | None = None,
    causal: bool = True,
) -> tuple[Float[Array, "b n g r d"], LinearState]:
    """The RNN: S_i = S_{i−1} + φ(k_i) ⊗ v_i and z_i = z_{i−1} + φ(k_i), then x_out_i from φ(q_i), S_i and z_i."""
    state = initial_state(k, v) if state is None else state
    mask = jnp.ones(v.shape[:2], bool) if mask is None else mask

    def step(state, inputs):
        q, k, v, mask = jax.tree.map(lambda x: x[:, None], inputs)
        state = update(state, k, v, mask)
        return state, query_state(state, q, normalizer, v.dtype)[:, 0] if causal else None

    per_token = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (q if causal else None, k, v, mask))
    if causal:
        state, out = jax.lax.scan(step, state, per_token, unroll=v.shape[1] == 1)
        return jnp.moveaxis(out, 0, 1), state
    state, _ = jax.lax.scan(step, state, per_token)
    return query_state(state, q, normalizer, v.dtype), state


def causal_attention(
    q: Features,
    k: Features,
    v: Array,
    normalizer: Normalizer,
    *,
    state: LinearState | None = None,
    mask: Bool[Array, "b m"] | None = None,
    dropout: float = 0.0,
    key: PRNGKeyArray | None = None,
    kernels: str = "auto",
) -> tuple[Array, LinearState]:
    """Causal attention, in the form or kernel that suits the length and the device; the only code that chooses."""
    length, drops = v.shape[1], bool(dropout) and key is not None
    platform = kernel_platform(kernels, q.values, v) if k.log_scale is None else None
    if platform and length > QUADRATIC_LENGTH and state is None and (platform == "gpu" or not drops):
        kernel = load_kernels("attention_pairs" if drops else "attention_chunked")
        if kernel is not None:
            k = _zero_padding(k, mask)
            new_state = update(initial_state(k, v), k, v)
            options = dict(dropout=dropout, key=key) if drops else dict(platform=platform)
            return kernel.attention(q.values, k.values, v, normalizer=normalizer, **options), new_state
    if drops:
        return _quadratic_in_blocks(q, k, v, normalizer, state, mask, dropout, key)
    if length == 1:
        kernel_applies = platform and kernels == "on" and state is not None and is_one_device()
        if kernel_applies and (kernel := load_kernels("attention_step")) is not None:
            key_features = _zero_padding(k, mask).values[:, 0]
            out, S, z = kernel.step(q.values[:, 0], key_features, v[:, 0], state.S, state.z, normalizer)
            return out[:, None], LinearState(S, z)
        return recurrent(q, k, v, normalizer, state=state, mask=mask)
    form = quadratic if length <= QUADRATIC_LENGTH else chunked
    return form(q, k, v, normalizer, state=state, mask=mask)


def _quadratic_in_blocks(q, k, v, normalizer, state, mask, dropout, key) -> tuple[Array, LinearState]:
    """`quadratic` in blocks of queries, each with the keys up to its end, so that few masked pairs are computed."""

    def positions(tree: Any, first: int, last: int) -> Any:
        return jax.tree.map(lambda x: x[:, first:last], tree)

    outs = []
    dropout_options = dict(length=v.shape[1], dropout=dropout, key=key)
    for first, last in query_blocks(v.shape[1]):
        block_q, (block_k, block_v, block_mask) = positions(q, first, last), positions((k, v, mask), 0, last)
        out, new_state = quadratic(
            block_q, block_k, block_v, normalizer, state=state, mask=block_mask, offset=first, **dropout_options
        )
        outs.append(out)
    return jnp.concatenate(outs, 1), new_state  # the last block has all keys


def initial_state(k: Features, v: Array) -> LinearState:
    """The empty state for keys and values of these shapes."""
    batch, _, heads, features = k.values.shape
    return LinearState.zeros(batch, heads, features, v.shape[-1], scaled=k.log_scale is not None)


def _zero_padding(k: Features, mask: Bool[Array, "b m"] | None) -> Features:
    """φ(k) with zeros where the mask is False: such keys add nothing to S and z."""
    if mask is None:
        return k
    values = jnp.where(mask[..., None, None], k.values, 0)
    return Features(values, None if k.log_scale is None else jnp.where(mask[..., None], k.log_scale, LOWEST))


def _similarities(
    q: Features, k: Features, state: LinearState, mask, causal: bool, offset: int = 0
) -> tuple[Array, Array | float]:
    """φ(q)·φ(k) for all pairs (b, g, n, r, m), zero where masked, and the scale of S and z beside them.

    With a log_scale both are relative to the running maximum that the recurrent form would have at each query;
    the scale is then (b, n or 1, g, 1, 1). Without one it is 1.
    """
    k = _zero_padding(k, mask)
    n, m = q.values.shape[1], k.values.shape[1]
    similarity = jnp.einsum("bngrk,bmgk->bgnrm", q.values, k.values, preferred_element_type=jnp.float32)
    state_scale = 1.0
    if k.log_scale is not None:
        if causal:
            largest = jax.lax.cummax(k.log_scale, axis=1)[:, offset : offset + n]
        else:
            largest = k.log_scale.max(1, keepdims=True)
        running_max = jnp.maximum(largest, state.log_scale[:, None])  # (b, n or 1, g)
        log_factor = k.log_scale.mT[:, :, None, :] - running_max.mT[..., None]  # (b, g, n or 1, m)
        # Positive only for later keys, which are masked below; the minimum prevents an overflow there.
        similarity *= jnp.exp(jnp.minimum(log_factor, 0))[:, :, :, None]
        state_scale = jnp.exp(state.log_scale[:, None] - running_max)[..., None, None]
    if causal:
        allowed = jnp.arange(m) <= offset + jnp.arange(n)[:, None]
        similarity = jnp.where(allowed[:, None, :], similarity, 0)
    return similarity, state_scale

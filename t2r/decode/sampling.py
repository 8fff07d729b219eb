"""Sampling of the next token."""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray, UInt32

from t2r.errors import raise_all
from t2r.model.largest import largest


@dataclass(frozen=True)
class Sampling:
    """Sampling options: greedy at temperature 0, else random among the `top_k` likeliest and the `top_p` nucleus."""

    temperature: float = 0.0
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    never: tuple[int, ...] = ()  # tokens that are not chosen

    def __post_init__(self):
        problems = []
        if not 0 <= self.temperature < math.inf:
            problems.append(f"temperature={self.temperature} must be at least 0 (0: greedy) and finite")
        if self.top_k < 0:
            problems.append(f"top_k={self.top_k} must be at least 0 (0: no limit)")
        if not 0 < self.top_p <= 1:
            problems.append(f"top_p={self.top_p} must be above 0 and at most 1")
        raise_all("sampling:", problems)


def choose(scores: Float[Array, "b vocab"], sampling: Sampling, key: PRNGKeyArray) -> Int[Array, "b"]:
    """One token per sequence: the argmax, or a sample from the softmax of the truncated scores."""
    if sampling.never:
        scores = scores.at[:, jnp.array(sampling.never)].set(-jnp.inf)
    if sampling.temperature == 0:
        return jnp.argmax(scores, -1).astype(jnp.int32)
    logits = scores / sampling.temperature
    if sampling.top_k:
        threshold = largest(logits, min(sampling.top_k, logits.shape[-1]))[0][:, -1:]
        logits = jnp.where(logits < threshold, -jnp.inf, logits)
    if sampling.top_p < 1:
        logits = keep_top_p(logits, sampling.top_p)
    return jax.random.categorical(key, logits).astype(jnp.int32)


def keep_top_p(logits: Float[Array, "b vocab"], top_p: float | Float[Array, ""]) -> Float[Array, "b vocab"]:
    """Sets logits to -∞ except for the smallest set of likeliest tokens whose total probability reaches `top_p`."""
    ordered = jnp.sort(logits, -1)[:, ::-1]
    likelier = jnp.cumsum(jax.nn.softmax(ordered, -1), -1) - jax.nn.softmax(
        ordered, -1
    )  # probability of all likelier tokens
    threshold = jnp.min(jnp.where(likelier < top_p, ordered, jnp.inf), -1, keepdims=True)
    return jnp.where(logits < threshold, -jnp.inf, logits)


def choose_each(
    scores: Float[Array, "b vocab"],
    temperature: Float[Array, "b"],
    top_k: Int[Array, "b"],
    top_p: Float[Array, "b"],
    keys: UInt32[Array, "b 2"],
) -> tuple[Int[Array, "b"], UInt32[Array, "b 2"]]:
    """`choose` with options and a random key of its own for each sequence, and the keys for the next token.

    Each token is the one that `choose` would give the sequence alone. Nothing is sorted if all are greedy.
    """

    def sample(scores: Array, temperature: Array, k: Array, p: Array, key: Array) -> tuple[Array, Array]:
        next_key, step_key = jax.random.split(jax.random.wrap_key_data(key))
        logits = (scores / jnp.where(temperature > 0, temperature, 1))[None]
        ordered = jnp.sort(logits, -1)[:, ::-1]
        kth = jnp.take(ordered, jnp.clip(k, 1, logits.shape[1]) - 1, axis=1)[:, None]
        logits = jnp.where((k > 0) & (logits < kth), -jnp.inf, logits)
        logits = jnp.where(p < 1, keep_top_p(logits, p), logits)
        return jax.random.categorical(step_key, logits)[0].astype(jnp.int32), jax.random.key_data(next_key)

    greedy = jnp.argmax(scores, -1).astype(jnp.int32)

    def sample_all() -> tuple[Array, Array]:
        tokens, next_keys = jax.vmap(sample)(scores, temperature, top_k, top_p, keys)
        samples = temperature > 0
        return jnp.where(samples, tokens, greedy), jnp.where(samples[:, None], next_keys, keys)

    return jax.lax.cond((temperature > 0).any(), sample_all, lambda: (greedy, keys))

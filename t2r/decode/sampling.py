"""Choosing the next token."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from t2r.errors import raise_all


@dataclass(frozen=True)
class Sampling:
    """How to choose: the likeliest token at temperature 0, else at random among the top_k and the top_p."""

    temperature: float = 0.0
    top_k: int = 0  # 0: all
    top_p: float = 1.0

    def __post_init__(self):
        problems = []
        if self.temperature < 0:
            problems.append(f"temperature={self.temperature} must be at least 0 (0: greedy)")
        if self.top_k < 0:
            problems.append(f"top_k={self.top_k} must be at least 0 (0: no limit)")
        if not 0 < self.top_p <= 1:
            problems.append(f"top_p={self.top_p} must be above 0 and at most 1")
        raise_all("sampling:", problems)


def choose(scores: Float[Array, "b vocab"], sampling: Sampling, key: PRNGKeyArray) -> Int[Array, "b"]:
    """A token for each row, whose softmax is what it is drawn from."""
    if sampling.temperature == 0:
        return jnp.argmax(scores, -1).astype(jnp.int32)
    logits = scores / sampling.temperature
    if sampling.top_k:
        least = jax.lax.top_k(logits, min(sampling.top_k, logits.shape[-1]))[0][:, -1:]
        logits = jnp.where(logits < least, -jnp.inf, logits)
    if sampling.top_p < 1:
        logits = keep_top_p(logits, sampling.top_p)
    return jax.random.categorical(key, logits).astype(jnp.int32)


def keep_top_p(logits: Float[Array, "b vocab"], top_p: float) -> Float[Array, "b vocab"]:
    """Leaves the smallest set of likeliest tokens whose probability reaches top_p, always at least one."""
    ordered = jnp.sort(logits, -1)[:, ::-1]
    before = jnp.cumsum(jax.nn.softmax(ordered, -1), -1) - jax.nn.softmax(ordered, -1)
    least = jnp.min(jnp.where(before < top_p, ordered, jnp.inf), -1, keepdims=True)
    return jnp.where(logits < least, -jnp.inf, logits)

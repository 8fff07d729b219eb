"""Layer dropout: a layer that is dropped is not computed, and nothing is written in its place."""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import jaxpr_as_fun
from jaxtyping import Array, Bool

from t2r.layout import uninitialized

Leaves = list[Array]
Layer = Callable[[Array, Leaves, Leaves], Array]  # of x, what has gradients, and what has none


def run_or_skip(layer: Callable[[Array, Any], Array], keep: Bool[Array, ""], x: Array, others: Any) -> Array:
    """layer(x, others), or x.

    As `jax.lax.cond` does it, with a derivative of its own. JAX's copies the inputs that the backward pass needs, and
    for a layer that is dropped fills with zeros all that it would need.
    """
    leaves, tree = jax.tree.flatten(others)
    is_learned = [jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in leaves]

    def of_both(x: Array, learned: Leaves, fixed: Leaves) -> Array:
        rest = {True: iter(learned), False: iter(fixed)}
        return layer(x, jax.tree.unflatten(tree, [next(rest[kind]) for kind in is_learned]))

    learned, fixed = ([leaf for leaf, kind in zip(leaves, is_learned) if kind is wanted] for wanted in (True, False))
    return _run_or_skip(of_both, keep, x, learned, fixed)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _run_or_skip(layer: Layer, keep: Bool[Array, ""], x: Array, learned: Leaves, fixed: Leaves) -> Array:
    return jax.lax.cond(keep, layer, lambda x, *_: x, x, learned, fixed)


def _forward(layer: Layer, keep: Array, x: Array, learned: Leaves, fixed: Leaves) -> tuple[Array, tuple]:
    def linearized(x: Array, learned: Leaves, fixed: Leaves) -> tuple[Array, Callable]:
        return jax.vjp(lambda x, learned: layer(x, learned, fixed), x, learned)

    traced, (_, back) = jax.make_jaxpr(linearized, return_shape=True)(x, learned, fixed)
    inputs, needed = traced.jaxpr.invars, traced.jaxpr.outvars[1:]
    made = [variable not in inputs for variable in needed]

    def run(*given: Array) -> tuple[Array, list[Array]]:
        out, *needs = jaxpr_as_fun(traced)(*given)
        return out, list(itertools.compress(needs, made))

    def skip(x: Array, *_: Array) -> tuple[Array, list[Array]]:
        return x, [uninitialized(like.shape, like.dtype) for like in itertools.compress(jax.tree.leaves(back), made)]

    given = jax.tree.leaves((x, learned, fixed))
    out, found = jax.lax.cond(keep, run, skip, *given)
    rest = iter(found)
    leaves = [next(rest) if new else given[inputs.index(variable)] for new, variable in zip(made, needed)]
    return out, (keep, jax.tree.unflatten(jax.tree.structure(back), leaves), learned)


def _backward(layer: Layer, kept: tuple, gradient: Array) -> tuple:
    keep, back, learned = kept

    def skip(back: Callable, gradient: Array) -> tuple[Array, Leaves]:
        return gradient, jax.tree.map(jnp.zeros_like, learned)

    return None, *jax.lax.cond(keep, lambda back, gradient: back(gradient), skip, back, gradient), None


_run_or_skip.defvjp(_forward, _backward)

"""Layer dropout: a dropped layer is not computed, and the memory of its residuals is not filled."""

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
Layer = Callable[[Array, Leaves, Leaves], Array]  # (x, leaves with a gradient, leaves without) → output


def run_or_skip(layer: Callable[[Array, Any], Array], keep: Bool[Array, ""], x: Array, others: Any) -> Array:
    """layer(x, others) if `keep`, else x.

    Equals `jax.lax.cond`, with a derivative of its own. The derivative that JAX makes copies those residuals that are
    inputs of the layer, and fills all residuals of a dropped layer with zeros.
    """
    leaves, tree = jax.tree.flatten(others)
    is_learned = [jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in leaves]

    def run_layer(x: Array, learned: Leaves, fixed: Leaves) -> Array:
        remaining = {True: iter(learned), False: iter(fixed)}
        return layer(x, jax.tree.unflatten(tree, [next(remaining[kind]) for kind in is_learned]))

    learned = [leaf for leaf, kind in zip(leaves, is_learned) if kind]
    fixed = [leaf for leaf, kind in zip(leaves, is_learned) if not kind]
    return _run_or_skip(run_layer, keep, x, learned, fixed)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _run_or_skip(layer: Layer, keep: Bool[Array, ""], x: Array, learned: Leaves, fixed: Leaves) -> Array:
    return jax.lax.cond(keep, layer, lambda x, *_: x, x, learned, fixed)


def _forward(layer: Layer, keep: Array, x: Array, learned: Leaves, fixed: Leaves) -> tuple[Array, tuple]:
    def with_pullback(x: Array, learned: Leaves, fixed: Leaves) -> tuple[Array, Callable]:
        return jax.vjp(lambda x, learned: layer(x, learned, fixed), x, learned)

    # Residuals that are inputs are taken from the inputs; only those that the layer computes go through the condition.
    traced, (_, pullback) = jax.make_jaxpr(with_pullback, return_shape=True)(x, learned, fixed)
    input_variables, residual_variables = traced.jaxpr.invars, traced.jaxpr.outvars[1:]
    is_computed = [variable not in input_variables for variable in residual_variables]

    def run(*inputs: Array) -> tuple[Array, list]:
        out, *residuals = jaxpr_as_fun(traced)(*inputs)
        return out, list(itertools.compress(residuals, is_computed))

    def skip(x: Array, *_: Array) -> tuple[Array, list[Array]]:
        computed = itertools.compress(jax.tree.leaves(pullback), is_computed)
        return x, [uninitialized(residual.shape, residual.dtype) for residual in computed]

    inputs = jax.tree.leaves((x, learned, fixed))
    out, computed = jax.lax.cond(keep, run, skip, *inputs)
    remaining = iter(computed)
    residuals = [
        next(remaining) if new else inputs[input_variables.index(variable)]
        for new, variable in zip(is_computed, residual_variables)
    ]
    return out, (keep, jax.tree.unflatten(jax.tree.structure(pullback), residuals), learned)


def _backward(layer: Layer, residuals: tuple, gradient: Array) -> tuple:
    keep, pullback, learned = residuals

    def skip(pullback: Callable, gradient: Array) -> tuple[Array, Leaves]:
        return gradient, jax.tree.map(jnp.zeros_like, learned)

    run = lambda pullback, gradient: pullback(gradient)  # noqa: E731
    return None, *jax.lax.cond(keep, run, skip, pullback, gradient), None


_run_or_skip.defvjp(_forward, _backward)

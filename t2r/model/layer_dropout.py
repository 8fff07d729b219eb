"""Layer dropout: a layer that is dropped is not computed, and nothing is written in its place."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import jaxpr_as_fun
from jaxtyping import Array, Bool

Layer = Callable[[Array, Any, Any], Array]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def run_or_skip(layer: Layer, keep: Bool[Array, ""], x: Array, learned: Any, fixed: Any) -> Array:
    """layer(x, learned, fixed), or x; what is fixed has no gradient.

    As `jax.lax.cond` does it, with a derivative of its own. JAX's copies the inputs that the backward pass needs, and
    for a layer that is dropped fills with zeros all that it would need.
    """
    return jax.lax.cond(keep, layer, lambda x, *_: x, x, learned, fixed)


def _forward(layer: Layer, keep: Array, x: Array, learned: Any, fixed: Any) -> tuple[Array, tuple]:
    def linearized(x: Array, learned: Any, fixed: Any) -> tuple[Array, Callable]:
        return jax.vjp(lambda x, learned: layer(x, learned, fixed), x, learned)

    traced, (_, back) = jax.make_jaxpr(linearized, return_shape=True)(x, learned, fixed)
    inputs, needed = traced.jaxpr.invars, traced.jaxpr.outvars[1:]
    made = [place for place, variable in enumerate(needed) if variable not in inputs]

    def run(*given: Array) -> tuple[Array, list[Array]]:
        out, *needs = jaxpr_as_fun(traced)(*given)
        return out, [needs[place] for place in made]

    def skip(x: Array, *_: Array) -> tuple[Array, list[Array]]:
        shapes = jax.tree.leaves(back)
        return x, [jax.lax.empty(shapes[place].shape, shapes[place].dtype) for place in made]

    given = jax.tree.leaves((x, learned, fixed))
    out, found = jax.lax.cond(keep, run, skip, *given)
    found = dict(zip(made, found))
    leaves = [found[place] if place in found else given[inputs.index(needed[place])] for place in range(len(needed))]
    return out, (keep, jax.tree.unflatten(jax.tree.structure(back), leaves), learned)


def _backward(layer: Layer, kept: tuple, gradient: Array) -> tuple:
    keep, back, learned = kept

    def skip(back: Callable, gradient: Array) -> tuple[Array, Any]:
        return gradient, jax.tree.map(jnp.zeros_like, learned)

    return None, *jax.lax.cond(keep, lambda back, gradient: back(gradient), skip, back, gradient), None


run_or_skip.defvjp(_forward, _backward)

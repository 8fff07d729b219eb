"""A decoding step of all layers as one kernel (Pallas: Triton, GPU).

A recurrent step is small: hundreds of kernels, each shorter than its own launch, take several times as long as reading
the weights does. Here as many programs as the GPU can hold at once go through the layers together. Each has its own
rows of every matrix, asks for them while it waits for the others, and waits at a barrier before it reads what they have
written.

Only for what gains most: language models of merged T2R attention alone, with norms before and plain feed-forwards. It
equals the model's own step, which stays the one to read.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Bool, Float, Int

from t2r.attention.kernels.blocks import dot, is_alone
from t2r.attention.linear import LinearState
from t2r.attention.module import MergedLinearAttention
from t2r.model.transformer import Block, DecodeState, LanguageModel, embed

PROGRAMS = 128  # fewer than any current data centre GPU has multiprocessors: all run at once, or barriers never open
LEAST = 16  # rows or columns of a product of blocks
MOST = 64  # texts at once
TILE = 1024  # columns of a matrix that are multiplied at once: more do not fit beside each other


class Packed(NamedTuple):
    """Weights of all layers, (layers, outputs, inputs) in the type of activations, and vectors in float32."""

    attention_norm: Float[Array, "l 2 e"]  # scale and bias
    projections: Float[Array, "l p e"]  # φ of queries, φ of keys, values
    projections_bias: Float[Array, "l p"]
    out: Float[Array, "l e a"]
    out_bias: Float[Array, "l e"]
    feedforward_norm: Float[Array, "l 2 e"]
    up: Float[Array, "l f e"]
    up_bias: Float[Array, "l f"]
    down: Float[Array, "l e f"]
    down_bias: Float[Array, "l e"]


class Passed(NamedTuple):
    """What programs write and others read."""

    x: Float[Array, "b e"]  # the residual stream after each layer
    middle: Float[Array, "b e"]  # and after its attention
    projected: Float[Array, "b p"]
    attended: Float[Array, "b a"]
    hidden: Float[Array, "b f"]
    S: Float[Array, "l b h k d"]
    z: Float[Array, "l b h k"]
    arrived: Any  # (1,): how often programs have come to a barrier


class Shape(NamedTuple):
    """All that a kernel is compiled for."""

    layers: int
    batch: int
    width: int
    heads: int
    features: int
    head_dim: int
    feedforward: int
    eps: float  # of norms
    least: float  # below the fraction


def suits(model: LanguageModel) -> bool:
    """Whether all layers are of the one kind that the kernel knows."""
    config = model.config
    sizes = (config.width, config.feedforward, config.head_dim, config.attention[0].features or 0)
    return (
        all(spec == config.attention[0] and spec.kind == "merged" for spec in config.attention)
        and not config.encoder_layers
        and (config.norm, config.norm_placement, config.activation) == ("layer", "before", "relu")
        and not (config.gated or config.parallel)
        and config.heads == config.kv_heads
        and all(size >= LEAST and size & (size - 1) == 0 for size in sizes)
    )


def available(model: LanguageModel, texts: int) -> bool:
    """Whether to use it, here: on one GPU, for few texts; for many, products are large enough to be worth a launch."""
    config = model.config
    here = jax.default_backend() == "gpu" and is_alone() and config.kernels != "off"
    return here and texts <= MOST and config.dtype == "bfloat16" and suits(model)


class OneKernel:
    """A model that decodes by the kernel. Its state has S and z of all layers in one array each."""

    def __init__(self, model: LanguageModel, texts: int, *, interpret: bool = False):
        self._model, self._texts, self._interpret = model, texts, interpret
        self._packed, self._shape = pack(model), shape_of(model, texts)

    def __call__(self, tokens: Int[Array, "b 1"], *, state: DecodeState, mask: Bool[Array, "b 1"]):
        """As the model itself, for one token of each text."""
        model, keep = self._model, mask[:, 0]
        x = embed(model, model.embedding, tokens, state.position[:, None])[:, 0]
        x, S, z = run_layers(self._packed, x, *state.layers, keep, self._shape, interpret=self._interpret)
        x = x if model.final_norm is None else model.final_norm(x)
        return x[:, None], DecodeState((S, z), state.position + keep, None)

    def log_probs(self, hidden: Array) -> Array:
        return self._model.log_probs(hidden)

    def stacked(self, state: DecodeState) -> DecodeState:
        """A model's state as this one's; batches are filled up to what products of blocks need."""
        fill = (0, self._shape.batch - self._texts)
        S, z = (jnp.stack([getattr(layer, name) for layer in state.layers]) for name in ("S", "z"))
        return state._replace(layers=tuple(jnp.pad(x, [(0, 0), fill] + [(0, 0)] * (x.ndim - 2)) for x in (S, z)))

    def unstacked(self, state: DecodeState) -> DecodeState:
        """And back."""
        layers = zip(*(x[:, : self._texts] for x in state.layers))
        return state._replace(layers=tuple(LinearState(S, z) for S, z in layers))


def shape_of(model: LanguageModel, batch: int) -> Shape:
    """The shape of a step for so many texts, filled up to what a product of blocks needs."""
    config = model.config
    return Shape(
        config.layers,
        max(LEAST, 1 << (batch - 1).bit_length()),
        config.width,
        config.heads,
        config.attention[0].features,
        config.head_dim,
        config.feedforward,
        config.norm_eps,
        MergedLinearAttention.normalizer.value,
    )


def pack(model: LanguageModel) -> Packed:
    """The weights as the kernel reads them; to be done once, not at each step."""
    dtype = jnp.dtype(model.config.dtype)
    layers = [_pack_layer(block) for block in model.blocks]
    stacked = Packed(*(jnp.stack(arrays) for arrays in zip(*layers)))
    matrices = ("projections", "out", "up", "down")
    return stacked._replace(**{name: getattr(stacked, name).astype(dtype) for name in matrices})


def _pack_layer(block: Block) -> Packed:
    attention, feed = block.attention, block.feedforward
    width = attention.shape.width

    def rows(linear: Any, outputs: int) -> Array:  # (inputs, outputs) → (outputs, inputs), whatever heads there are
        return linear.kernel[...].reshape(-1, outputs).T

    def bias(linear: Any, size: int) -> Array:
        return jnp.zeros(size) if linear.bias is None else linear.bias[...].reshape(size)

    def norm(module: Any) -> Array:
        return jnp.stack([module.scale[...], jnp.zeros(width) if module.bias is None else module.bias[...]])

    heads = [attention.query, attention.key, attention.value]
    kernels = [linear.kernel[...].reshape(width, -1).T for linear in heads]
    return Packed(
        norm(block.attention_norm),
        jnp.concatenate(kernels),
        jnp.concatenate([bias(linear, len(kernel)) for linear, kernel in zip(heads, kernels)]),
        rows(attention.out, width),
        bias(attention.out, width),
        norm(block.feedforward_norm),
        rows(feed.up, feed.up.kernel.shape[1]),
        bias(feed.up, feed.up.kernel.shape[1]),
        rows(feed.down, width),
        bias(feed.down, width),
    )


def run_layers(
    packed: Packed, x: Float[Array, "b e"], S: Array, z: Array, keep: Bool[Array, "b"], shape: Shape, *, interpret=False
) -> tuple[Float[Array, "b e"], Array, Array]:
    """The last hidden layer, and S and z after it; where `keep` is False they stay as they were."""
    texts = len(x)
    fill = shape.batch - texts
    x, keep = jnp.pad(x, [(0, fill), (0, 0)]), jnp.pad(keep, (0, fill)).astype(jnp.float32)
    empty = lambda size: jnp.zeros((shape.batch, size), x.dtype)  # noqa: E731
    size = shape.heads * shape.head_dim
    rows = packed.projections.shape[1]
    arrived = jnp.zeros(1, jnp.int32)
    passed = Passed(x, empty(shape.width), empty(rows), empty(size), empty(shape.feedforward), S, z, arrived)
    if interpret:  # programs come one after the other: each part of a layer is a kernel
        for layer in range(shape.layers):
            for part in PARTS:
                passed = _call(functools.partial(_one_part, part, layer), packed, passed, keep, shape, interpret=True)
    else:
        passed = _call(_all_parts, packed, passed, keep, shape, interpret=False)
    return passed.x[:texts], passed.S, passed.z


def _call(kernel: Callable, packed: Packed, passed: Passed, keep: Array, shape: Shape, *, interpret: bool) -> Passed:
    def body(*refs):
        weights, keep, inputs, outputs = refs[:10], refs[10], refs[11:19], refs[19:]
        del inputs  # the same memory as the outputs
        kernel(shape, Packed(*weights), Passed(*outputs), keep)

    found = pl.pallas_call(
        body,
        grid=(PROGRAMS,),
        out_shape=[jax.ShapeDtypeStruct(array.shape, array.dtype) for array in passed],
        input_output_aliases={11 + number: number for number in range(len(passed))},
        interpret=interpret,
        compiler_params=triton.CompilerParams(num_warps=8, num_stages=1),
    )(*packed, keep, *passed)
    return Passed(*found)


def _all_parts(shape: Shape, weights: Packed, passed: Passed, keep: Any) -> None:
    """All layers. What a part reads that no program writes is asked for before the barrier in front of it."""

    def layer(number, ahead):
        for part, then in zip(PARTS, (*PARTS[1:], PARTS[0])):
            part.work(shape, weights, passed, keep, number, ahead)
            following = number if then is not PARTS[0] else jnp.minimum(number + 1, shape.layers - 1)
            ahead = then.read(shape, weights, passed, following)
            _barrier(passed.arrived, (number * len(PARTS) + PARTS.index(part) + 1) * PROGRAMS)
        return ahead

    jax.lax.fori_loop(0, shape.layers, layer, PARTS[0].read(shape, weights, passed, 0))


def _one_part(part: "Part", number: int, shape: Shape, weights: Packed, passed: Passed, keep: Any) -> None:
    part.work(shape, weights, passed, keep, number, part.read(shape, weights, passed, number))


def _barrier(arrived: Any, target: Array) -> None:
    """Returns when all programs have come here: the count of arrivals only grows."""
    triton.debug_barrier()
    count = triton.atomic_add(arrived, (0,), 1)
    jax.lax.while_loop(lambda count: count < target, lambda _: triton.atomic_add(arrived, (0,), 0), count + 1)
    triton.debug_barrier()


class Part(NamedTuple):
    """A part of a layer, between two barriers: what can be read ahead, and the work."""

    read: Callable
    work: Callable


def _slice(rows: int) -> tuple[Array, int]:
    """This program's rows of a matrix: from where, and how many. Programs beyond the last have none of their own."""
    count = max(LEAST, 1 << ((rows - 1) // PROGRAMS).bit_length())  # a power of two
    return (pl.program_id(0) % (rows // count)) * count, count


def _matrix(name: str) -> Callable:
    """Reads this program's rows of a matrix, in tiles of columns."""

    def read(shape: Shape, weights: Packed, passed: Passed, layer: Array) -> tuple[Array, ...]:
        matrix = getattr(weights, name)
        first, count = _slice(matrix.shape[1])
        return tuple(matrix[layer, pl.ds(first, count), columns] for columns in _tiles(matrix.shape[2]))

    return read


def _tiles(columns: int) -> list[Any]:
    size = min(columns, TILE)
    return [pl.ds(first, size) for first in range(0, columns, size)]


def _product(x: Callable[[Any], Array], tiles: tuple[Array, ...], bias: Any, layer: Array) -> tuple[Array, Any]:
    """x · rowsᵀ + bias of this program's rows, and where they stand; `x` gives its columns."""
    first, count = _slice(bias.shape[1])
    columns = _tiles(sum(tile.shape[1] for tile in tiles))
    found = sum(dot(x(place), tile, 1, 1) for place, tile in zip(columns, tiles))
    return found + bias[layer, pl.ds(first, count)][None, :], (slice(None), pl.ds(first, count))


def _plain(x: Any) -> Callable[[Any], Array]:
    return lambda columns: x[:, columns]


def _normed(x: Any, norm: Any, layer: Array, eps: float) -> Callable[[Any], Array]:
    whole = x[...].astype(jnp.float32)
    mean = whole.mean(1, keepdims=True)
    scale = jax.lax.rsqrt(((whole - mean) ** 2).mean(1, keepdims=True) + eps)

    def normed(columns: Any) -> Array:
        values = (x[:, columns].astype(jnp.float32) - mean) * scale
        return (values * norm[layer, 0, columns][None, :] + norm[layer, 1, columns][None, :]).astype(x.dtype)

    return normed


def _project(shape: Shape, weights: Packed, passed: Passed, keep: Any, layer: Array, rows: tuple) -> None:
    x = _normed(passed.x, weights.attention_norm, layer, shape.eps)
    found, here = _product(x, rows, weights.projections_bias, layer)
    column = here[1].start + jax.lax.broadcasted_iota(jnp.int32, found.shape, 1)
    is_phi = column < 2 * shape.heads * shape.features
    passed.projected[here] = jnp.where(is_phi, jnp.maximum(found, 0.0), found).astype(passed.projected.dtype)


def _place(shape: Shape, number: Array) -> tuple[Array, Array]:
    return number // shape.heads, number % shape.heads


def _read_state(shape: Shape, weights: Packed, passed: Passed, layer: Array) -> tuple[Array, Array]:
    text, head = _place(shape, pl.program_id(0) % (shape.batch * shape.heads))
    return passed.S[layer, text, head, :, :], passed.z[layer, text, head, :]


def _attend(shape: Shape, weights: Packed, passed: Passed, keep: Any, layer: Array, state: tuple[Array, Array]) -> None:
    """S and z of a text's head take in a key and a value, and are read by a query."""
    k, d, phi = shape.features, shape.head_dim, shape.heads * shape.features

    def one(number: Array, S: Array, z: Array) -> None:
        text, head = _place(shape, number)
        vector = lambda first, size: passed.projected[text, pl.ds(first + head * size, size)].astype(jnp.float32)  # noqa: E731
        q, key, v = vector(0, k), vector(phi, k) * keep[text], vector(2 * phi, d)
        S, z = S + key[:, None] * v[None, :], z + key
        below = jnp.maximum((q * z).sum(), shape.least)
        out = (q[:, None] * S).sum(0) / below
        passed.attended[text, pl.ds(head * d, d)] = out.astype(passed.attended.dtype)
        passed.S[layer, text, head, :, :] = S
        passed.z[layer, text, head, :] = z

    all_heads, program = shape.batch * shape.heads, pl.program_id(0)
    pl.when(program < all_heads)(lambda: one(program, *state))
    for first in range(PROGRAMS, all_heads, PROGRAMS):  # more heads than programs

        @pl.when(first + program < all_heads)
        def _(number=first + program):
            text, head = _place(shape, number)
            one(number, passed.S[layer, text, head, :, :], passed.z[layer, text, head, :])


def _mix(shape: Shape, weights: Packed, passed: Passed, keep: Any, layer: Array, rows: tuple) -> None:
    found, here = _product(_plain(passed.attended), rows, weights.out_bias, layer)
    passed.middle[here] = passed.x[here] + found.astype(passed.x.dtype)


def _widen(shape: Shape, weights: Packed, passed: Passed, keep: Any, layer: Array, rows: tuple) -> None:
    x = _normed(passed.middle, weights.feedforward_norm, layer, shape.eps)
    found, here = _product(x, rows, weights.up_bias, layer)
    passed.hidden[here] = jnp.maximum(found, 0.0).astype(passed.hidden.dtype)


def _narrow(shape: Shape, weights: Packed, passed: Passed, keep: Any, layer: Array, rows: tuple) -> None:
    found, here = _product(_plain(passed.hidden), rows, weights.down_bias, layer)
    passed.x[here] = passed.middle[here] + found.astype(passed.x.dtype)


PARTS = (
    Part(_matrix("projections"), _project),
    Part(_read_state, _attend),
    Part(_matrix("out"), _mix),
    Part(_matrix("up"), _widen),
    Part(_matrix("down"), _narrow),
)

"""A decoding step of all layers as one kernel, of the same parts as `fused` (Pallas: Triton, GPU).

As many programs as the GPU can hold at once go through the layers together, and wait for each other where one kernel
would follow another. What is gained is the time between: each asks for its rows of the next matrix before it waits.

Only for merged T2R alone, and no more texts than one product has.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Bool, Float, Int

from t2r.attention.linear import LinearState
from t2r.attention.module import MergedLinearAttention
from t2r.decode import fused, tiles
from t2r.decode.fused import Layer, Norm, Stream
from t2r.decode.tiles import Rows, read_tile
from t2r.model.transformer import DecodeState, LanguageModel


class Shared(NamedTuple):
    """What programs write and others read."""

    before: Stream  # attention
    after: Stream
    projected: Float[Array, "b p"]
    attended: Float[Array, "1 n"]
    hidden: Float[Array, "1 n"]
    S: Float[Array, "l b h k d"]
    z: Float[Array, "l b h k"]
    arrived: Int[Array, "1"]  # how often programs have come to a barrier


def available(model: LanguageModel, texts: int) -> bool:
    """Whether to use it, here: all programs must run at once, or barriers never open."""
    if not fused.available(model, texts) or texts > tiles.TEXTS or not suits(model):
        return False
    return getattr(jax.devices()[0], "core_count", 0) >= tiles.PROGRAMS


def suits(model: LanguageModel) -> bool:
    """Whether layers are of one kind, and no matrix is larger than all programs' tiles."""
    config = model.config
    alike = all(spec == config.attention[0] and spec.kind == "merged" for spec in config.attention)
    largest = max(config.feedforward, 3 * config.heads * config.head_dim)
    return alike and fused.suits(model) and largest <= 32 * tiles.PROGRAMS


class OneKernel(fused.FusedModel):
    """A model that decodes by the kernel. Its state has S and z of all layers in one array each."""

    def __init__(self, model: LanguageModel, *, interpret: bool = False):
        super().__init__(model, interpret=interpret)
        self._stacked = jax.tree.map(lambda *arrays: jnp.stack(arrays), *self._layers)

    def _all_layers(self, stream: Stream, pasts: tuple, mask: Array) -> tuple[Array, tuple]:
        kernel = functools.partial(run_layers, eps=self._model.config.norm_eps, interpret=self._interpret)
        x, *after = kernel(self._stacked, stream, *pasts, mask[:, 0])
        return x, tuple(after)

    def stacked(self, state: DecodeState) -> DecodeState:
        S, z = (jnp.stack([getattr(layer, name) for layer in state.layers]) for name in ("S", "z"))
        return state._replace(layers=(S, z))

    def unstacked(self, state: DecodeState) -> DecodeState:
        return state._replace(layers=tuple(LinearState(S, z) for S, z in zip(*state.layers)))


def run_layers(
    layers: Layer, stream: Stream, S: Array, z: Array, keep: Bool[Array, "b"], *, eps: float, interpret: bool = False
) -> tuple[Float[Array, "1 n"], Array, Array]:
    """The residual stream after all layers, and S and z after them."""
    dtype, size = stream.x.dtype, tiles.TEXTS

    def empty(*shape: int, dtype: Any = dtype) -> Any:  # written before it is read; interpreted kernels pass it on
        return jnp.zeros(shape, dtype) if interpret else jax.ShapeDtypeStruct(shape, dtype)

    shared = Shared(
        before=stream,
        after=Stream(*(empty(*array.shape, dtype=array.dtype) for array in stream)),
        projected=empty(size, layers.projections.bias.shape[-1]),
        attended=empty(1, size * S.shape[2] * S.shape[4]),
        hidden=empty(1, size * layers.up.bias.shape[-1]),
        S=S,
        z=z,
        arrived=jnp.zeros(1, jnp.int32),
    )
    call = functools.partial(_call, layers, keep=keep.astype(jnp.float32), eps=eps, interpret=interpret)
    if interpret:  # programs come one after the other: each stage of a layer is a kernel
        for layer in range(len(S)):
            for stage in STAGES:
                shared = call(functools.partial(_one_stage, stage, layer), shared)
    else:
        shared = call(_all_stages, shared)
    return shared.before.x, shared.S, shared.z


def _call(layers: Layer, kernel: Callable, shared: Shared, *, keep: Array, eps: float, interpret: bool) -> Shared:
    weights, of_weights = jax.tree.flatten(layers)
    arrays, of_arrays = jax.tree.flatten(shared)
    given = [number for number, array in enumerate(arrays) if not isinstance(array, jax.ShapeDtypeStruct)]

    def body(*refs):
        outputs = of_arrays.unflatten(refs[-len(arrays) :])  # those that are given are the same memory
        program = Program(of_weights.unflatten(refs[: len(weights)]), outputs, refs[len(weights)], eps)
        kernel(program)

    found = pl.pallas_call(
        body,
        grid=(tiles.PROGRAMS,),
        out_shape=[jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays],
        input_output_aliases={len(weights) + 1 + place: number for place, number in enumerate(given)},
        interpret=interpret,
        compiler_params=triton.CompilerParams(num_warps=tiles.WARPS, num_stages=1),
    )(*weights, keep, *(arrays[number] for number in given))
    return of_arrays.unflatten(found)


class Program(NamedTuple):
    """One of the programs: what it can read and write."""

    layers: Layer
    shared: Shared
    keep: Any
    eps: float

    def read(self, name: str, layer: Array) -> tiles.Tile:
        """Asks for this program's tile of a matrix; programs beyond the last do what others do."""
        rows: Rows = getattr(self.layers, name)
        return read_tile(rows, self.tile(name), (layer,))

    def tile(self, name: str) -> Array:
        return pl.program_id(0) % getattr(self.layers, name).count

    def head(self, layer: Array, number: Array) -> fused.Head:
        heads = self.shared.S.shape[2]
        text, head = number // heads, number % heads
        return fused.read_head(self.shared.S, self.shared.z, self.keep, text, head, (layer,))

    def project(self, tile: tiles.Tile, turn: Array | None = None) -> None:
        _, _, heads, features, _ = self.shared.S.shape
        norm, rows = Norm(self.eps, 2 * heads * features), self.layers.projections
        found = fused.multiply_normed(self.shared.before, 0, rows, tile, norm, turn)
        fused.put_in_rows(self.shared.projected, 0, tile, found)

    def attend(self, layer: Array, first: fused.Head, turn: Array | None = None) -> None:
        _, texts, heads, _, _ = self.shared.S.shape
        for start in range(0, texts * heads, tiles.PROGRAMS):  # more heads than programs
            number = start + pl.program_id(0)

            @pl.when(number < texts * heads)
            def _(start=start, number=number):
                shared, head = self.shared, first if start == 0 else self.head(layer, number)
                arrays = (shared.attended, shared.S, shared.z)
                fused.attend(shared.projected, head, *arrays, MergedLinearAttention.normalizer, (layer,), turn)

    def mix(self, tile: tiles.Tile, turn: Array | None = None) -> None:
        shared, rows, number = self.shared, self.layers.out, self.tile("out")
        fused.multiply_and_add(shared.before.x, shared.attended, 0, rows, tile, number, shared.after, turn)

    def widen(self, tile: tiles.Tile, turn: Array | None = None) -> None:
        norm = Norm(self.eps, self.layers.up.bias.shape[-1])
        found = fused.multiply_normed(self.shared.after, 0, self.layers.up, tile, norm, turn)
        fused.put_as_factors(self.shared.hidden, 0, tile, found)

    def narrow(self, tile: tiles.Tile, turn: Array | None = None) -> None:
        shared, rows, number = self.shared, self.layers.down, self.tile("down")
        fused.multiply_and_add(shared.after.x, shared.hidden, 0, rows, tile, number, shared.before, turn)


def _first_head(me: Program, layer: Array) -> fused.Head:
    """Of those that are this program's; programs beyond the last read one in vain."""
    _, texts, heads, _, _ = me.shared.S.shape
    return me.head(layer, pl.program_id(0) % (texts * heads))


STAGES = (
    lambda me, layer: me.project(me.read("projections", layer)),
    lambda me, layer: me.attend(layer, _first_head(me, layer)),
    lambda me, layer: me.mix(me.read("out", layer)),
    lambda me, layer: me.widen(me.read("up", layer)),
    lambda me, layer: me.narrow(me.read("down", layer)),
)


def _one_stage(stage: Callable, layer: int, me: Program) -> None:
    stage(me, layer + 0 * pl.program_id(0))  # as in a loop: no constant


def _all_stages(me: Program) -> None:
    """All layers. What no program writes is asked for while others are awaited, or earlier."""
    arrived, last = me.shared.arrived, me.shared.S.shape[0] - 1

    def layer(number, carry):
        projections, turn = carry

        def wait(stage: int) -> Array:
            return _wait(arrived, (number * len(STAGES) + stage) * tiles.PROGRAMS)

        me.project(projections, turn)
        _arrive(arrived)
        head, out, up = _first_head(me, number), me.read("out", number), me.read("up", number)
        turn = wait(1)
        me.attend(number, head, turn)
        _arrive(arrived)
        turn = wait(2)
        me.mix(out, turn)
        _arrive(arrived)
        down = me.read("down", number)
        turn = wait(3)
        me.widen(up, turn)
        _arrive(arrived)
        turn = wait(4)
        me.narrow(down, turn)
        _arrive(arrived)
        projections = me.read("projections", jnp.minimum(number + 1, last))
        return projections, wait(5)

    jax.lax.fori_loop(0, last + 1, layer, (me.read("projections", 0), pl.program_id(0)))


def _arrive(arrived: Any) -> None:
    """Says that this program has written what it had to. What it asks for after this, nobody waits for."""
    triton.debug_barrier()
    triton.atomic_add(arrived, (0,), 1)


def _wait(arrived: Any, target: Array) -> Array:
    """Returns when so many programs have arrived; their number, which only grows."""
    threads = jnp.arange(32 * tiles.WARPS)

    def count() -> Array:  # one thread asks for all
        place = arrived.at[threads * 0]
        return triton.load(place, mask=threads == 0, other=jnp.iinfo(jnp.int32).max, volatile=True).min(0)

    found = jax.lax.while_loop(lambda found: found < target, lambda _: count(), count())
    triton.debug_barrier()
    return found

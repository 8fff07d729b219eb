"""Timing decoding steps: speed and state size against generated length, greedy, unconditional or from a source.

All steps of one length cost the same, since caches have their whole capacity from the start. So unless whole
generations are wanted, some steps at the end of a sequence of that length are timed, in one compiled loop.
"""

import functools
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from t2r.attention.softmax import KVCache
from t2r.benchmark.models import normal
from t2r.benchmark.shared import SPARE, DoesNotFit, Timing, check_fits, is_out_of_memory, peak_bytes, timed
from t2r.decode.generate import Generation, packed_weights, prefill, scan_steps, state_bytes
from t2r.decode.sampling import Sampling
from t2r.environment import available_memory, total_bytes
from t2r.model.loss import source_states
from t2r.model.parameters import arrays_of, with_arrays
from t2r.model.transformer import DecodeState, LanguageModel

NO_END = -1  # no token: texts are generated to their full length


class DecodeSpeed(NamedTuple):
    """One model at one length."""

    length: int
    batch: int
    seconds: float  # of `steps` steps: the median of all repetitions, compilation apart
    spread: float  # slowest less fastest, over the median
    compile_seconds: float
    state_bytes: int
    steps: int

    @property
    def step_seconds(self) -> float:
        return self.seconds / self.steps

    @property
    def tokens_per_second(self) -> float:
        return self.batch * self.steps / self.seconds


def measure(model: LanguageModel, length: int, *, batch: int = 16, repeat_for: float = 2.0) -> DecodeSpeed:
    """Generates `length` tokens for each of `batch` texts, again and again until `repeat_for` seconds have passed."""
    prompts = [[0]] * batch
    program = DecodingProgram.of(model, prefill(model, prompts, length), length, packed_weights(model, batch))
    begin = lambda: prefill(model, prompts, length)  # noqa: E731
    times = timed(program, prepare=begin, repeat_for=repeat_for, least=1, warm_up=0)
    size = state_bytes(model, batch, length)
    return DecodeSpeed(length, batch, times.seconds, times.spread, program.compile_seconds, size, length)


class DecodingProgram(NamedTuple):
    """A compiled loop, and what it is given besides texts."""

    compiled: jax.stages.Compiled
    arrays: Any
    packed: Any  # None: by the model itself
    compile_seconds: float

    @classmethod
    def of(cls, model: LanguageModel, generation: Generation, steps: int, matrices: Any) -> "DecodingProgram":
        began, (graph, arrays) = time.perf_counter(), nnx.split(model)
        compiled = scan_steps.lower(graph, arrays, generation, steps, Sampling(), NO_END, matrices).compile()
        return cls(compiled, arrays, matrices, time.perf_counter() - began)

    def __call__(self, generation: Generation) -> tuple[Generation, jax.Array]:
        return self.compiled(self.arrays, generation, self.packed)


class Decoder:
    """A model whose decoding is measured at several lengths; a program that serves several is compiled once."""

    def __init__(self, model: LanguageModel, *, repeat_for: float = 2.0, plain: bool = False):
        self.model, self.repeat_for = model, repeat_for
        self._packed = functools.cache(lambda batch: None if plain else packed_weights(model, batch))  # for all lengths
        self.translates = bool(model.config.encoder_layers)
        self._programs: dict[Any, DecodingProgram] = {}

    def program(self, batch: int, length: int, steps: int) -> DecodingProgram:
        shapes = generation_of_shapes(self.model, batch, length)
        key = steps, *(leaf.shape for leaf in jax.tree.leaves(shapes))
        if key not in self._programs:
            self._programs[key] = DecodingProgram.of(self.model, shapes, steps, self._packed(batch))
        return self._programs[key]

    def steps(self, batch: int, length: int, steps: int, *, whole: bool = False) -> DecodeSpeed:
        """The last `steps` steps of texts of this length; with `whole`, all of them."""
        steps = length if whole else min(steps, length)
        program = self.program(batch, length, steps)
        check_fits(program.compiled, already=total_bytes((program.arrays, program.packed)))
        generation = filled(generation_of_shapes(self.model, batch, length))
        size = attention_bytes(generation.state)

        def rewind() -> Generation:
            return rewound(generation, length - steps)

        def run(given: Generation) -> jax.Array:
            nonlocal generation
            generation, tokens = program(given)
            return tokens

        few = dict(least=3, warm_up=0) if whole else {}
        times = timed(run, prepare=rewind, repeat_for=self.repeat_for, **few)
        return DecodeSpeed(length, batch, times.seconds, times.spread, program.compile_seconds, size, steps)

    def encoding(self, batch: int, length: int) -> Timing:
        """Reading sources of this length: the encoder, and what each layer of the decoder keeps of it."""
        graph, arrays = nnx.split(self.model)
        sources = np.zeros((batch, length), np.int32)
        compiled = jax.jit(lambda arrays, sources: source_states(nnx.merge(graph, arrays), sources))
        compiled = compiled.lower(arrays, sources).compile()
        check_fits(compiled, already=total_bytes(arrays))
        return timed(lambda _: compiled(arrays, sources), repeat_for=self.repeat_for, least=3)

    def prompts(self, batch: int, length: int) -> Timing:
        """Reading prompts of this length, chunk by chunk."""
        prompts = [[0] * (length + 1)] * batch  # the last token waits for the first step
        return timed(lambda _: prefill(self.model, prompts, 1), repeat_for=self.repeat_for, least=3)

    def largest_batch(self, length: int, steps: int, *, like: int = 128, attempts: int = 6) -> tuple[DecodeSpeed, int]:
        """The speed at the largest batch that runs, and the batch predicted from the program of a smaller one, which
        must not be so small that it has kernels of its own."""
        compiled, arrays, _, _ = self.program(like, length, min(steps, length))
        free, weights = available_memory(), total_bytes(arrays)
        if free is None:
            raise DoesNotFit("nobody says how much memory is free")
        each = (peak_bytes(compiled) - weights) / like
        batch = predicted = rounded_down(int(SPARE * free / each))
        for _ in range(attempts):
            if batch < 1:
                break
            try:
                return self.steps(batch, length, steps), predicted
            except (DoesNotFit, jax.errors.JaxRuntimeError) as error:
                if not is_out_of_memory(error):
                    raise
            batch = rounded_down(int(0.9 * batch))
        raise DoesNotFit(f"not {batch} texts of {length} tokens, nor more")


def rounded_down(count: int) -> int:
    """To three binary digits: sizes that programs like."""
    unit = 2 ** max(count.bit_length() - 3, 0)
    return count // unit * unit


def generation_of_shapes(model: LanguageModel, batch: int, length: int) -> Generation:
    """A generation with room for `length` tokens as shapes; in translation, from sources as long as that."""
    arrays, translates = arrays_of(model), bool(model.config.encoder_layers)

    def begin(arrays: dict[str, Any], sources: Any) -> Generation:
        made = with_arrays(model, arrays)
        state = made.init_state(batch, length, source_states(made, sources) if translates else None)
        key = jax.random.key_data(jax.random.key(0))
        return Generation(state, jnp.zeros(batch, jnp.int32), jnp.zeros(batch, bool), key)

    return jax.eval_shape(begin, arrays, jax.ShapeDtypeStruct((batch, length), jnp.int32))


def filled(shapes: Generation) -> Generation:
    """Random numbers in the shapes of a generation, all slots of caches taken."""

    def array(like: jax.ShapeDtypeStruct) -> jax.Array:
        if like.dtype == bool:
            return jnp.ones(like.shape, bool)
        if jnp.issubdtype(like.dtype, jnp.floating):  # the same for all texts: large states leave no room to make them
            return jnp.broadcast_to(normal(jax.random.key(0), like.shape[-2:], like.dtype), like.shape)
        return jnp.zeros(like.shape, like.dtype)

    generation = jax.tree.map(array, shapes)
    return generation._replace(done=jnp.zeros(shapes.done.shape, bool))


def rewound(generation: Generation, tokens: int) -> Generation:
    """The same with so many tokens generated; what lies behind them in caches is written over."""
    layers = tuple(
        layer._replace(index=jnp.array(tokens, jnp.int32)) if isinstance(layer, KVCache) else layer
        for layer in generation.state.layers
    )
    position = jnp.full_like(generation.state.position, tokens)
    return generation._replace(state=generation.state._replace(layers=layers, position=position))


def attention_bytes(state: DecodeState) -> int:
    """All keys, values, S and z, counted one by one; of a source too. The state may be of shapes."""
    return total_bytes([leaf for leaf in jax.tree.leaves((state.layers, state.source)) if leaf.ndim])


def linear_state_bytes(layers: int, batch: int, heads: int, features: int, head_dim: int) -> int:
    """The paper's formula: S is k × d and z is k for each head, in float32, whatever the length."""
    return layers * batch * heads * features * (head_dim + 1) * 4

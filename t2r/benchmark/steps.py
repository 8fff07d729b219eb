"""Timing of decoding steps, unconditional or from a source, at a given generated length.

A cache has its full capacity from the first step, so all steps of one length cost the same. By default only some steps
at the end of a sequence are timed, in one compiled loop; optionally whole generations.
"""

import functools
import time
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from t2r.attention.module import State
from t2r.attention.softmax import BeamCache, KVCache
from t2r.attention.windowed import WindowedState
from t2r.benchmark.models import normal
from t2r.benchmark.shared import USABLE, DoesNotFit, Timing, check_fits, is_out_of_memory, peak_bytes, time_calls
from t2r.decode.beam import Beam, Search, Special, begin, search_steps
from t2r.decode.generate import Generation, packed_weights, prefill, scan_steps
from t2r.decode.sampling import Sampling
from t2r.environment import available_memory, total_bytes
from t2r.model.loss import source_states
from t2r.model.parameters import arrays_of, with_arrays
from t2r.model.transformer import DecodeState, LanguageModel

TOKENS_OF_A_SEARCH = Special(prefix=(0,), end=0, never=())
Started = TypeVar("Started", Generation, Search)
NO_STOP_TOKEN = -1  # not a token id: every sequence is generated to its full length


class DecodeSpeed(NamedTuple):
    """The decoding speed of one model at one length."""

    length: int
    batch: int
    seconds: float  # for `steps` steps: the median over repetitions, without compilation
    spread: float  # (slowest - fastest) / median
    compile_seconds: float
    state_bytes: int
    steps: int

    @property
    def step_seconds(self) -> float:
        return self.seconds / self.steps

    @property
    def tokens_per_second(self) -> float:
        return self.batch * self.steps / self.seconds


class DecodingProgram(NamedTuple):
    """A compiled loop of decoding steps with its weights: generation → (generation, tokens)."""

    compiled: jax.stages.Compiled
    arrays: Any  # the parameters of the model
    packed: Any  # weights in the layout of t2r's GPU kernels; None: decode without them
    compile_seconds: float

    @classmethod
    def compile(
        cls, model: LanguageModel, generation: Generation, steps: int, packed: Any, sampling: Sampling = Sampling()
    ) -> "DecodingProgram":
        """Compiles `steps` decoding steps for generations of this shape, which may be abstract."""
        began, (graph, arrays) = time.perf_counter(), nnx.split(model)
        compiled = scan_steps.lower(graph, arrays, generation, steps, sampling, NO_STOP_TOKEN, packed).compile()
        return cls(compiled, arrays, packed, time.perf_counter() - began)

    def __call__(self, generation: Generation) -> tuple[Generation, jax.Array]:
        return self.compiled(self.arrays, generation, self.packed)


class Decoder:
    """Measures the decoding of one model at several lengths. A program that serves several lengths is compiled once."""

    def __init__(self, model: LanguageModel, *, repeat_for: float = 2.0, plain: bool = False):
        self.model, self.repeat_for = model, repeat_for
        self._packed = functools.cache(lambda batch: None if plain else packed_weights(model, batch))
        self.translates = bool(model.config.encoder_layers)
        self._programs: dict[Any, DecodingProgram] = {}

    def program(self, batch: int, length: int, steps: int) -> DecodingProgram:
        """The compiled loop of `steps` decoding steps."""
        generation = abstract_generation(self.model, batch, length)
        key = steps, *(leaf.shape for leaf in jax.tree.leaves(generation))
        if key not in self._programs:
            self._programs[key] = DecodingProgram.compile(self.model, generation, steps, self._packed(batch))
        return self._programs[key]

    def steps(self, batch: int, length: int, steps: int, *, whole: bool = False) -> DecodeSpeed:
        """Times the last `steps` steps of sequences of this length; with `whole`, all steps."""
        steps = length if whole else min(steps, length)
        program = self.program(batch, length, steps)
        check_fits(program.compiled, already=total_bytes((program.arrays, program.packed)))
        generation = random_generation(abstract_generation(self.model, batch, length))
        size = attention_bytes(generation.state)

        def prepare() -> Generation:
            return rewind(generation, length - steps)

        def run(start: Generation) -> jax.Array:
            nonlocal generation
            generation, tokens = program(start)  # `start` is donated
            return tokens

        repetitions = dict(least=3, warm_up=0) if whole else {}
        times = time_calls(run, prepare=prepare, repeat_for=self.repeat_for, **repetitions)
        return DecodeSpeed(length, batch, times.seconds, times.spread, program.compile_seconds, size, steps)

    def beam_steps(self, batch: int, length: int, steps: int, size: int) -> DecodeSpeed:
        """Times the last `steps` steps of a beam search in translations of this length, for batch / size sources."""
        steps, beam, began, (graph, arrays) = min(steps, length), Beam(size), time.perf_counter(), nnx.split(self.model)
        packed = self._packed(batch)
        abstract = abstract_search(self.model, batch // size, length, beam, kernels=packed is not None)
        lowered = search_steps.lower(graph, arrays, abstract, steps, TOKENS_OF_A_SEARCH, beam, packed)
        compiled, seconds = lowered.compile(), time.perf_counter() - began
        check_fits(compiled, already=total_bytes((arrays, packed)))
        search, size_in_bytes = random_values(abstract), attention_bytes(abstract.state)

        def prepare() -> Search:
            rewound = rewind(search, length - steps)
            return rewound._replace(
                step=jnp.full_like(search.step, length - steps), limit=jnp.full_like(search.limit, length)
            )

        def run(start: Search) -> jax.Array:
            nonlocal search
            search = compiled(arrays, start, packed)  # `start` is donated
            return search.last

        times = time_calls(run, prepare=prepare, repeat_for=self.repeat_for)
        return DecodeSpeed(length, batch, times.seconds, times.spread, seconds, size_in_bytes, steps)

    def encoding(self, batch: int, length: int) -> Timing:
        """Times the encoding of sources of this length: the encoder, and each decoder layer's state of the source."""
        graph, arrays = nnx.split(self.model)
        sources = np.zeros((batch, length), np.int32)
        encode = jax.jit(lambda arrays, sources: source_states(nnx.merge(graph, arrays), sources))
        compiled = encode.lower(arrays, sources).compile()
        check_fits(compiled, already=total_bytes(arrays))
        return time_calls(lambda _: compiled(arrays, sources), repeat_for=self.repeat_for, least=3)

    def prompts(self, batch: int, length: int) -> Timing:
        """Times the prefill of prompts of this length."""
        prompts = [[0] * (length + 1)] * batch  # prefill leaves the last token for the first decoding step
        return time_calls(lambda _: prefill(self.model, prompts, 1), repeat_for=self.repeat_for, least=3)

    def largest_batch(self, length: int, steps: int, *, like: int = 128, attempts: int = 6) -> tuple[DecodeSpeed, int]:
        """(the speed at the largest batch that fits, the batch size predicted from the memory of a batch of `like`).

        `like` must be larger than the batches that t2r's GPU kernels serve, since their memory differs.
        """
        compiled, arrays, _, _ = self.program(like, length, min(steps, length))
        free, weights = available_memory(), total_bytes(arrays)
        if free is None:
            raise DoesNotFit("the amount of free memory is unknown on this device")
        per_sequence = (peak_bytes(compiled) - weights) / like
        batch = predicted = round_down(int(USABLE * free / per_sequence))
        for _ in range(attempts):
            if batch < 1:
                break
            try:
                return self.steps(batch, length, steps), predicted
            except (DoesNotFit, jax.errors.JaxRuntimeError) as error:
                if not is_out_of_memory(error):
                    raise
            batch = round_down(int(0.9 * batch))
        raise DoesNotFit(f"a batch of {batch} sequences of {length} tokens does not fit")


def round_down(count: int) -> int:
    """Rounds down to three significant binary digits, which gives sizes divisible by a large power of two."""
    unit = 2 ** max(count.bit_length() - 3, 0)
    return count // unit * unit


def abstract_generation(model: LanguageModel, batch: int, length: int) -> Generation:
    """An abstract generation with capacity for `length` tokens; in translation, from sources of the same length."""
    arrays, translates = arrays_of(model), bool(model.config.encoder_layers)

    def start(arrays: dict[str, Any], sources: Any) -> Generation:
        filled_model = with_arrays(model, arrays)
        source = source_states(filled_model, sources) if translates else None
        state = filled_model.init_state(batch, length, source)
        key = jax.random.key_data(jax.random.key(0))
        return Generation(state, jnp.zeros(batch, jnp.int32), jnp.zeros(batch, bool), key)

    return jax.eval_shape(start, arrays, jax.ShapeDtypeStruct((batch, length), jnp.int32))


def abstract_search(model: LanguageModel, sources: int, length: int, beam: Beam, *, kernels: bool) -> Search:
    """An abstract beam search, by kernels or not, with capacity for `length` tokens, from sources of this length."""
    graph, arrays = nnx.split(model)
    shapes = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((sources, length), (sources,))]
    return jax.eval_shape(
        lambda arrays, *inputs: begin(graph, arrays, *inputs, length, length, TOKENS_OF_A_SEARCH, beam, kernels),
        arrays,
        *shapes,
    )


def random_generation(abstract: Generation) -> Generation:
    """A generation with random values; all slots of its caches are in use."""
    return random_values(abstract)._replace(done=jnp.zeros(abstract.done.shape, bool))


def random_values(abstract: Any) -> Any:
    """Arrays of these shapes: random numbers, integers that are zero, booleans that are true."""

    def array(like: jax.ShapeDtypeStruct) -> jax.Array:
        if like.dtype == bool:
            return jnp.ones(like.shape, bool)
        if jnp.issubdtype(like.dtype, jnp.floating):
            # Equal in all sequences: a large state leaves no memory to generate random values for each.
            return jnp.broadcast_to(normal(jax.random.key(0), like.shape[-2:], like.dtype), like.shape)
        return jnp.zeros(like.shape, like.dtype)

    return jax.tree.map(array, abstract)


def rewind(started: Started, tokens: int) -> Started:
    """A generation or search set back to `tokens` generated tokens; later slots of its caches will be overwritten."""

    def rewind_layer(layer: State) -> State:
        if isinstance(layer, KVCache | BeamCache):
            return layer._replace(index=jnp.full_like(layer.index, tokens))
        return layer._replace(count=jnp.full_like(layer.count, tokens)) if isinstance(layer, WindowedState) else layer

    layers, position = tuple(map(rewind_layer, started.state.layers)), jnp.full_like(started.state.position, tokens)
    return started._replace(state=started.state._replace(layers=layers, position=position))


def attention_bytes(state: DecodeState) -> int:
    """Bytes of all arrays of the attention state, including that of a source. The state may be abstract."""
    return total_bytes([leaf for leaf in jax.tree.leaves((state.layers, state.source)) if leaf.ndim])


def linear_state_bytes(layers: int, batch: int, heads: int, features: int, head_dim: int) -> int:
    """The paper's formula: for each head S (k × d) and z (k) in float32, at any length."""
    return layers * batch * heads * features * (head_dim + 1) * 4

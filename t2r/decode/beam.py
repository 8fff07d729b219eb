"""Beam search: the likeliest translations of a batch of sources, in one compiled loop, for any decoding state.

The score of a translation is the sum of its tokens' log-probabilities, stop token included, divided by length^α, as in
the paper's toolkit (fairseq). At each step the candidates are all live beams extended by all tokens. Of the `size`
likeliest candidates, those that end in the stop token become results; the `size` likeliest others are the next live
beams. With `early_stopping` the search is fairseq's, n-best lists included.

A batch has a fixed number of rows, one for each sentence. When a quarter of them are done, as many sentences that wait
take their places, so no row is idle for long. At the end, on CPUs, the last quarter continues as a smaller batch.
Caches have room for the longest of the sentences at hand. They grow and shrink among few sizes, so few programs are
compiled.
"""

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from t2r.attention.module import State
from t2r.attention.softmax import BeamCache, KVCache, resized
from t2r.batch import PADDING, Batch, pad_sequences
from t2r.decode.generate import decoder, packed_weights, state_bytes
from t2r.environment import require_memory
from t2r.errors import raise_all
from t2r.model.largest import largest
from t2r.model.loss import source_states, token_losses
from t2r.model.transformer import DecodeState, Seq2Seq, check_length

LEAST_WIDTH = 16  # tokens to which sources are padded
CACHES = KVCache, BeamCache
# Beams that share a cache: each attends to the slots of all, so more of them have caches of their own.
MOST_THAT_SHARE = 16
NEVER = -1e30  # the log-probability of an impossible event; finite, so that sums and differences are not NaN


@dataclass(frozen=True)
class Beam:
    """The options of a beam search."""

    size: int = 5
    length_penalty: float = 0.6  # α; 0: plain sums, which favour short translations
    # Stop at `size` results, as the paper's toolkit does. These are the first results, not always the best: `size`
    # unlikely beams may end before the likely one. Without it, the search continues while a live beam, at its current
    # length, scores better than the worst of `size` results, and better results replace worse ones.
    early_stopping: bool = False
    min_length: int = 1  # the fewest tokens of a translation, without its stop token

    def __post_init__(self):
        problems = []
        if self.size < 1:
            problems.append(f"beam={self.size} must be at least 1")
        if not 0 <= self.length_penalty < math.inf:
            problems.append(f"length_penalty={self.length_penalty} must be at least 0 and finite")
        if self.min_length < 0:
            problems.append(f"min_length={self.min_length} must be at least 0 (0: a translation may be empty)")
        raise_all("beam search:", problems)


class Hypothesis(NamedTuple):
    """A translation without its stop token, and its score."""

    tokens: list[int]
    score: float
    log_probability: float


class Special(NamedTuple):
    """Tokens with a meaning: the start tokens, the stop token, and those that are never generated."""

    prefix: tuple[int, ...]
    end: int
    never: tuple[int, ...]


class Search(NamedTuple):
    """A search in progress. Live beam j of sentence i is sequence i · size + j of `state`."""

    state: DecodeState
    step: Int[Array, "b"]
    limit: Int[Array, "b"]  # the most tokens of a translation, without its stop token
    last: Int[Array, "b size"]  # the last token of each live beam
    sums: Float[Array, "b size"]  # log-probabilities of the live beams
    # token · size + parent, for each step and live beam: the token added in this step, and the number of the beam that
    # it was added to. Translations are read from it at the end, backwards, so that a step moves none of them.
    history: Int[Array, "b capacity size"]
    results: Int[Array, "b size"]  # of each, the live beam that the stop token ended
    scores: Float[Array, "b size"]  # of the results, best first; NEVER where there is none yet
    lengths: Int[Array, "b size"]  # of the results, stop token included
    done: Bool[Array, "b"]


def translate(
    model: Seq2Seq,
    sources: Int[np.ndarray, "b m"],
    *,
    end: int,
    start: int | tuple[int, ...] | None = None,
    padding: int | None = None,
    beam: Beam = Beam(),
    limits: list[int] | None = None,
    batch: int | None = None,
    on_done: Callable[[int], None] = lambda sentences: None,
) -> list[list[Hypothesis]]:
    """The `beam.size` best translations of each source, best first. Sources are padded with PADDING at the end.

    Decoding starts from the token `start` (None: from the stop token `end`). If `start` has several tokens, such as a
    language token, all but the first count in the length of the score. Neither a first token that is not the stop
    token, such as Marian's `<pad>`, nor the vocabulary's `padding` is ever generated.

    `limits` holds the most tokens of each translation, without its stop token; see `default_limit`. A source that is
    only padding has no translation. At most `batch` sentences (None: all) are translated at a time; `on_done` is called
    with the number of those that are done.
    """
    sources = np.asarray(sources, np.int32)
    lengths = (sources != PADDING).sum(1)
    check_length(model.config, int(lengths.max(initial=0)))
    limits = [default_limit(int(length)) for length in lengths] if limits is None else limits
    prefix = start if isinstance(start, tuple) else (end if start is None else start,)
    limits = within_positions(model, limits, len(prefix))
    special = Special(prefix, end, tuple(sorted({prefix[0], padding} - {end, None})))
    results: list[list[Hypothesis]] = [[] for _ in sources]
    on_done(int((lengths == 0).sum()))
    order = np.argsort(-lengths, kind="stable")[: (lengths > 0).sum()]  # longest first
    if len(order):
        ordered = sources[order, : padded_width(int(lengths.max()))], np.asarray(limits, np.int32)[order]
        for i, hypotheses in _translate(model, *ordered, special, beam, batch or len(order)):
            results[order[i]] = hypotheses
            on_done(1)
    return results


def _translate(
    model: Seq2Seq,
    sources: Int[np.ndarray, "b m"],
    limits: Int[np.ndarray, "b"],
    special: Special,
    beam: Beam,
    rows: int,
) -> Iterator[tuple[int, list[Hypothesis]]]:
    """Translates sources, longest first, in `rows` rows of a batch; yields each one's index and translations."""
    graph, arrays = nnx.split(model)
    rows, lengths, width = min(rows, len(sources)), (sources != PADDING).sum(1), sources.shape[1]
    packed = packed_weights(model, rows * beam.size)
    together = max(1, rows // 4)  # so many sentences start together
    waiting = [np.arange(first, min(first + together, len(sources))) for first in range(0, len(sources), together)]
    capacity = max(default_limit(width), *limits) + 1  # from the padded width, not the lengths: few programs
    most = capacity + len(special.prefix) - 1
    check_memory(model, rows, most, beam)
    options = capacity, min(_room(len(special.prefix)), most), special, beam, packed is not None
    start = lambda *new: begin(graph, arrays, *new, *options)  # noqa: E731
    shapes = jax.eval_shape(start, jnp.zeros((rows, _room(width)), jnp.int32), jnp.zeros(rows, jnp.int32))
    search = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)._replace(done=jnp.ones(rows, bool))
    shrinks = packed is None and jax.default_backend() == "cpu"  # elsewhere fewer rows take as long
    done, owner, steps = np.ones(rows, bool), np.full(rows, -1), np.zeros(rows, int)

    def with_room(search: Search) -> Search:
        """With caches that have room for the next step, and for the source, of each sentence that is not done."""
        most_steps, longest = int(steps[~done].max()) + len(special.prefix), int(lengths[owner][~done].max())
        return _resized(search, min(_room(most_steps), most), _room(longest))

    while waiting or not done.all():
        while waiting and done.sum() >= together:
            new, places = waiting.pop(0), np.flatnonzero(done)[:together]
            own = places[: len(new)]
            done[own], owner[own], steps[own] = False, new, 0
            padded = np.pad(_cut(sources[new]), ((0, together - len(new)), (0, 0)), constant_values=PADDING)
            started = start(padded, np.pad(limits[new], (0, together - len(new))))
            search = _place(with_room(search), started, places)
        if shrinks and not waiting and (~done).sum() <= together < len(done):
            live = np.argsort(done, kind="stable")[:together]
            search, done, owner, steps = _only(search, live), done[live], owner[live], steps[live]
        at_end = together if shrinks and len(done) > together else 0  # sentences left at which the batch shrinks
        rest = rows - together if waiting else at_end
        search = _advance(graph, arrays, with_room(search), rest, special, beam, packed)
        were_done, done, steps = done, np.array(search.done), np.array(search.step)
        found = jax.device_get((search.history, search.results, search.scores, search.lengths))
        for row in np.flatnonzero(done & ~were_done):
            yield int(owner[row]), _hypotheses(*(x[row] for x in found), special, beam)


def _room(needed: int) -> int:
    """The slots of a cache that needs so many: a power of two."""
    least = 32 if jax.default_backend() == "cpu" else 128  # where empty slots cost less
    return max(least, 1 << (needed - 1).bit_length())


def _resized(search: Search, steps: int, source: int) -> Search:
    """The search with caches that have slots for this many steps, and for source tokens."""
    wrong = lambda layers, room: any(isinstance(x, CACHES) and x.capacity != room for x in layers or ())  # noqa: E731
    if not wrong(search.state.layers, steps) and not wrong(search.state.source, source):
        return search
    return _resize(search, steps, source)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _resize(search: Search, steps: int, source: int) -> Search:
    def resize(layers: tuple[State, ...] | None, room: int) -> tuple[State, ...] | None:
        return layers and tuple(resized(layer, room) if isinstance(layer, CACHES) else layer for layer in layers)

    layers, position, sources = search.state
    return search._replace(state=DecodeState(resize(layers, steps), position, resize(sources, source)))


def _hypotheses(
    history: Int[np.ndarray, "capacity size"],
    results: Int[np.ndarray, "size"],
    scores: Float[np.ndarray, "size"],
    lengths: Int[np.ndarray, "size"],
    special: Special,
    beam: Beam,
) -> list[Hypothesis]:
    return [
        Hypothesis(
            _tokens(history[: length - len(special.prefix)], last),
            float(score),
            float(score) * length**beam.length_penalty,
        )
        for last, score, length in zip(results.tolist(), scores, lengths.tolist())
        if score > NEVER / 2
    ]


def _tokens(history: Int[np.ndarray, "steps size"], beam: int) -> list[int]:
    """The tokens of the live beam that has this number after the last of these steps."""
    tokens = []
    for step in reversed(history.tolist()):
        token, beam = divmod(step[beam], len(step))
        tokens.append(token)
    return tokens[::-1]


def padded_width(longest: int) -> int:
    """The width to which sources are padded: few programs are compiled, and little padding is computed.

    It is a multiple of 16, from 64 tokens on of a quarter of the next smaller power of two.
    """
    multiple = max(LEAST_WIDTH, (1 << (longest - 1).bit_length()) // 8)
    return -(-longest // multiple) * multiple


def _cut(sources: Int[np.ndarray, "b m"]) -> Int[np.ndarray, "b width"]:
    """The sources without padding that none of them needs."""
    return sources[:, : padded_width(int((sources != PADDING).sum(1).max()))]


def check_memory(model: Seq2Seq, batch: int, length: int, beam: Beam) -> None:
    """Raises an error, before anything is computed, if the search does not fit into free memory."""
    beams = batch * beam.size
    # Twice the state: a step may reorder the beams from one copy into another. And the log-probabilities in float32.
    needed = 2 * state_bytes(model, beams, length) + 4 * beams * model.config.vocab_size
    what = f"a search with beam={beam.size} for {batch} sentences of up to {length:,} tokens"
    fits = lambda free: max(batch * free // needed, 1)  # noqa: E731
    require_memory(needed, what, lambda free: f"reduce the beam, translate at most {fits(free):,} sentences at a time "
                                              "(batch), or split long lines")  # fmt: skip


def default_limit(source_length: int) -> int:
    """The most tokens a translation may have. It depends only on its source's length, not on the rest of the batch."""
    return 2 * source_length + 16


def within_positions(model: Seq2Seq, limits: list[int], prefix: int) -> list[int]:
    """The limits, no larger than the model's positions, of which the `prefix` start tokens have some."""
    most = model.config.max_positions
    return [min(limit, most - prefix) for limit in limits] if most else limits


@functools.partial(jax.jit, static_argnums=(0, 4, 5, 6, 7, 8))
def begin(
    graph,
    arrays,
    sources: Array,
    limits: Array,
    capacity: int,
    room: int,
    special: Special,
    beam: Beam,
    kernels: bool,
) -> Search:
    """The search for some sources before its first step, with caches for `room` steps of at most `capacity`.

    With `kernels`, which read them, each beam has a cache of its own.
    """
    model: Seq2Seq = nnx.merge(graph, arrays)
    batch, size = sources.shape[0], beam.size
    *leading, _ = special.prefix  # the first step reads the last start token
    # Each live beam has its own state; the source is shared by all beams of a sentence.
    state = model.init_state(batch * size, room, source_states(model, sources))

    def cache(layer: State) -> State:
        if not isinstance(layer, KVCache):
            return layer
        if 1 < size <= MOST_THAT_SHARE and not kernels:
            return BeamCache.like(layer, size)
        return layer._replace(index=state.position)  # sentences join and leave, so each has its own place in the caches

    state = state._replace(layers=tuple(map(cache, state.layers)))
    for token in leading:
        _, state = model(jnp.full((batch * size, 1), token), state=state)
    none = jnp.zeros((batch, size), jnp.int32)
    return Search(
        state=state,
        step=jnp.zeros(batch, jnp.int32),
        limit=limits,
        last=jnp.full((batch, size), special.prefix[-1]),
        sums=jnp.full((batch, size), NEVER).at[:, 0].set(0.0),  # at first all beams are equal: only one counts
        history=jnp.zeros((batch, capacity, size), jnp.int32),
        results=none,
        scores=jnp.full((batch, size), NEVER),
        lengths=none,
        done=jnp.all(sources == PADDING, 1),
    )


@functools.partial(jax.jit, donate_argnums=0)
def _place(search: Search, new: Search, rows: Int[Array, "some"]) -> Search:
    """The search with new sentences in these rows."""

    def put(rows: Array) -> Callable[[Array, Array], Array]:
        def put_in(old: Array, new: Array) -> Array:
            if not old.ndim:  # the one length of all sources' caches, which is not used
                return old
            shape = (len(new), *old.shape[1:])  # a shorter source is padded
            return old.at[rows].set(jnp.pad(new, [(0, most - size) for most, size in zip(shape, new.shape)]))

        return put_in

    return _map_rows(put(rows), put(_sequences(rows, search.sums.shape[1])), search, new)


@jax.jit
def _only(search: Search, rows: Int[Array, "some"]) -> Search:
    """The search in these rows."""

    def take(rows: Array) -> Callable[[Array], Array]:
        return lambda x: x[rows] if x.ndim else x

    return _map_rows(take(rows), take(_sequences(rows, search.sums.shape[1])), search)


def _map_rows(of_rows: Callable[..., Array], of_sequences: Callable[..., Array], *searches: Search) -> Search:
    """Applies one function to all arrays that have a row for each sentence, another to those with one for each beam."""

    def of_layer(*layers: State) -> State:
        return jax.tree.map(of_rows if isinstance(layers[0], BeamCache) else of_sequences, *layers)

    states = [search.state for search in searches]
    layers = tuple(map(of_layer, *(state.layers for state in states)))
    position = of_sequences(*(state.position for state in states))
    source = jax.tree.map(of_rows, *(state.source for state in states))
    others = jax.tree.map(of_rows, *(search._replace(state=None) for search in searches))
    return others._replace(state=DecodeState(layers, position, source))


@functools.partial(jax.jit, static_argnums=(0, 4, 5), donate_argnums=2)
def _advance(
    graph, arrays, search: Search, rest: Int[Array, ""], special: Special, beam: Beam, packed: Any = None
) -> Search:
    """Steps until at most `rest` sentences are not done, or a cache is full; with `packed` weights, by the kernels."""
    step = functools.partial(_step, decoder(nnx.merge(graph, arrays), packed), special=special, beam=beam)
    rooms = [layer.capacity for layer in search.state.layers if isinstance(layer, CACHES)]

    def goes_on(search: Search) -> Bool[Array, ""]:
        longest = jnp.where(search.done, 0, search.step).max() + len(special.prefix)
        return ((~search.done).sum() > rest) & (longest <= min(rooms, default=math.inf))

    return jax.lax.while_loop(goes_on, step, search)


@functools.partial(jax.jit, static_argnums=(0, 3, 4, 5), donate_argnums=2)
def search_steps(graph, arrays, search: Search, count: int, special: Special, beam: Beam, packed: Any = None) -> Search:
    """`count` steps in one compiled loop, whether or not the sentences are done: for benchmarks."""
    step = functools.partial(_step, decoder(nnx.merge(graph, arrays), packed), special=special, beam=beam)
    return jax.lax.scan(lambda search, _: (step(search), None), search, length=count)[0]


def _sequences(rows: Int[Array, "some"], size: int) -> Int[Array, "sequences"]:
    """The sequences of the beams of these rows."""
    return (rows[:, None] * size + jnp.arange(size)).reshape(-1)


def _step(model: Any, search: Search, *, special: Special, beam: Beam) -> Search:
    """One decoding step for each live beam."""
    (batch, size), step, (prefix, end, never) = search.sums.shape, search.step[:, None], special
    hidden, state = model(search.last.reshape(batch * size, 1), state=search.state)
    # Enough tokens that 2 · size remain when those that are never generated, and the stop token, are taken out: it is
    # a candidate of its own. At its limit a translation can only stop.
    count, at_limit = 2 * size + 1 + len(never), step >= search.limit[:, None]
    log_probs, tokens, stop = (
        x.reshape(batch, size, *x.shape[1:]) for x in model.embedding.likeliest(hidden[:, 0], count, end)
    )
    excluded = at_limit[:, :, None] | jnp.isin(tokens, jnp.array((end, *never), jnp.int32))
    stop = jnp.where(~at_limit & (step < beam.min_length), NEVER, stop)
    log_probs = jnp.concatenate([stop[..., None], jnp.where(excluded, NEVER, log_probs)], 2)
    choices = jnp.concatenate([jnp.full_like(tokens[..., :1], end), tokens], 2)

    # Twice as many candidates as beams: even if the best `size` all stop, `size` others remain.
    sums = (search.sums[:, :, None] + log_probs).reshape(batch, -1)
    sums, flat = largest(sums, min(2 * size, sums.shape[1]))
    parent, token = flat // choices.shape[2], jnp.take_along_axis(choices.reshape(batch, -1), flat, 1)
    stops = token == end

    finished = stops & (jnp.arange(sums.shape[1]) < size) & ~search.done[:, None] & (sums > NEVER / 2)
    if beam.early_stopping:  # the first results stay, whatever their scores
        missing = (search.scores < NEVER / 2).sum(1, keepdims=True)
        finished &= jnp.cumsum(finished, 1) <= missing
    length = step + len(prefix)
    scores = jnp.where(finished, sums / length.astype(jnp.float32) ** beam.length_penalty, NEVER)
    best, chosen = largest(jnp.concatenate([search.scores, scores], 1), size)
    results, lengths = (
        jnp.take_along_axis(jnp.concatenate([old, jnp.broadcast_to(new, token.shape)], 1), chosen, 1)
        for old, new in ((search.results, parent), (search.lengths, length))
    )

    live, survivors = largest(jnp.where(stops, NEVER, sums), size)
    parent, token = (jnp.take_along_axis(x, survivors, 1) for x in (parent, token))
    sequences = (jnp.arange(batch)[:, None] * size + parent).reshape(-1)
    full = best[:, -1] > NEVER / 2
    if not beam.early_stopping:
        full &= best[:, -1] >= live[:, 0] / length[:, 0].astype(jnp.float32) ** beam.length_penalty
    return search._replace(
        state=state if size == 1 else model.reorder(state, sequences, size),
        step=search.step + 1,
        last=token,
        sums=live,
        history=search.history.at[jnp.arange(batch), search.step].set(token * size + parent),
        results=results,
        scores=best,
        lengths=lengths,
        done=search.done | full | at_limit[:, 0],
    )


def score(
    model: Seq2Seq, sources: Int[np.ndarray, "b m"], targets: list[list[int]], *, end: int, start: int | None = None
) -> list[float]:
    """The log-probability of each target, stop token included, in one forward pass: for rescoring."""
    start = end if start is None else start
    tokens = pad_sequences([[start, *target, end] for target in targets], len(targets), max(map(len, targets)) + 2)
    graph, arrays = nnx.split(model)
    return np.asarray(_score(graph, arrays, Batch(tokens, np.asarray(sources, np.int32)))).tolist()


@functools.partial(jax.jit, static_argnums=0)
def _score(graph, arrays, batch: Batch) -> Float[Array, "b"]:
    return -token_losses(nnx.merge(graph, arrays), batch)[0].sum(1)

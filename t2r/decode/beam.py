"""Beam search: the likeliest translations of a batch of sources, in one compiled loop, for any decoding state.

The score of a translation is the sum of its tokens' log-probabilities, stop token included, divided by length^α, as in
the paper's toolkit (fairseq). At each step the candidates are all live beams extended by all tokens. Of the `size`
likeliest candidates, those that end in the stop token become results; the `size` likeliest others are the next live
beams. With `early_stopping` the search is fairseq's, n-best lists included.
"""

import functools
import math
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from t2r.batch import PADDING, Batch, pad_sequences
from t2r.decode.generate import state_bytes
from t2r.environment import require_memory
from t2r.errors import raise_all
from t2r.model.loss import source_states, token_losses
from t2r.model.transformer import DecodeState, Seq2Seq, check_length

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

    step: Int[Array, ""]
    state: DecodeState
    tokens: Int[Array, "b size capacity"]  # of the live beams
    sums: Float[Array, "b size"]  # log-probabilities of the live beams
    results: Int[Array, "b size capacity"]
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
) -> list[list[Hypothesis]]:
    """The `beam.size` best translations of each source, best first. Sources are padded with PADDING at the end.

    Decoding starts from the token `start` (None: from the stop token `end`). If `start` has several tokens, such as a
    language token, all but the first count in the length of the score. Neither a first token that is not the stop
    token, such as Marian's `<pad>`, nor the vocabulary's `padding` is ever generated.

    `limits` holds the most tokens of each translation, without its stop token; see `default_limit`. A source that is
    only padding has no translation.
    """
    sources = np.asarray(sources, np.int32)
    lengths = (sources != PADDING).sum(1)
    check_length(model.config, int(lengths.max()))
    limits = [default_limit(int(length)) for length in lengths] if limits is None else limits
    prefix = start if isinstance(start, tuple) else (end if start is None else start,)
    if model.config.max_positions:
        limits = [min(limit, model.config.max_positions - len(prefix)) for limit in limits]
    # From the padded width, not the lengths, so that batches of one width share a compiled program.
    capacity = max(default_limit(sources.shape[1]), *limits) + 1
    check_memory(model, len(sources), capacity + len(prefix) - 1, beam)
    graph, arrays = nnx.split(model)
    special = Special(prefix, end, tuple(sorted({prefix[0], padding} - {end, None})))
    outputs = _search(graph, arrays, sources, np.asarray(limits, np.int32), capacity, special, beam)
    results, scores, counts = (np.asarray(x) for x in outputs)
    return [
        [
            Hypothesis(tokens[: n - len(prefix)].tolist(), float(score), float(score) * n**beam.length_penalty)
            for tokens, score, n in zip(results[i], scores[i], counts[i].tolist())
            if score > NEVER / 2 and lengths[i]
        ]
        for i in range(len(sources))
    ]


def check_memory(model: Seq2Seq, batch: int, length: int, beam: Beam) -> None:
    """Raises an error, before anything is computed, if the search does not fit into free memory."""
    beams = batch * beam.size
    # Twice the state: a step reorders the beams from one copy into another. And the log-probabilities in float32.
    needed = 2 * state_bytes(model, beams, length) + 4 * beams * model.config.vocab_size
    what = f"a search with beam={beam.size} for {batch} sentences of up to {length:,} tokens"
    fits = lambda free: max(batch * free // needed, 1)  # noqa: E731
    require_memory(needed, what, lambda free: f"reduce the beam, translate at most {fits(free):,} sentences at a time "
                                              "(batch), or split long lines")  # fmt: skip


def default_limit(source_length: int) -> int:
    """The most tokens a translation may have. It depends only on its source's length, not on the rest of the batch."""
    return 2 * source_length + 16


@functools.partial(jax.jit, static_argnums=(0, 4, 5, 6))
def _search(graph, arrays, sources, limits, capacity: int, special: Special, beam: Beam):
    model: Seq2Seq = nnx.merge(graph, arrays)
    batch, size = sources.shape[0], beam.size
    source = source_states(model, sources)
    empty = jnp.zeros((batch, size, capacity), jnp.int32)
    first = jnp.full((batch, size), NEVER).at[:, 0].set(0.0)  # at first all beams are equal: only one counts
    no_result = jnp.full((batch, size), NEVER)
    # Each live beam has its own state; the source is shared by all beams of a sentence.
    *leading, _ = special.prefix  # the first step reads the last start token
    state = model.init_state(batch * size, capacity + len(leading), source)
    for token in leading:
        _, state = model(jnp.full((batch * size, 1), token), state=state)
    search = Search(
        step=jnp.zeros((), jnp.int32),
        state=state,
        tokens=empty,
        sums=first,
        results=empty,
        scores=no_result,
        lengths=jnp.zeros((batch, size), jnp.int32),
        done=jnp.all(sources == PADDING, 1),
    )

    def more(search: Search) -> Array:
        return ~search.done.all() & (search.step < capacity)

    step = functools.partial(_step, model, limits=limits, special=special, beam=beam)
    search = jax.lax.while_loop(more, step, search)
    return search.results, search.scores, search.lengths


def _step(model: Seq2Seq, search: Search, *, limits: Array, special: Special, beam: Beam) -> Search:
    """One decoding step for each live beam."""
    (batch, size), step, (prefix, end, never) = search.sums.shape, search.step, special
    last = jnp.where(
        step == 0, prefix[-1], jax.lax.dynamic_index_in_dim(search.tokens, jnp.maximum(step - 1, 0), 2, False)
    )
    hidden, state = model(last.reshape(batch * size, 1), state=search.state)
    # Enough tokens that 2 · size remain when those that are never generated, and the stop token, are taken out: it is
    # a candidate of its own. At its limit a translation can only stop.
    count, at_limit = 2 * size + 1 + len(never), (step >= limits)[:, None]
    log_probs, tokens, stop = (
        x.reshape(batch, size, *x.shape[1:]) for x in model.embedding.likeliest(hidden[:, 0], count, end)
    )
    excluded = at_limit[:, :, None] | jnp.isin(tokens, jnp.array((end, *never), jnp.int32))
    stop = jnp.where(~at_limit & (step < beam.min_length), NEVER, stop)
    log_probs = jnp.concatenate([stop[..., None], jnp.where(excluded, NEVER, log_probs)], 2)
    choices = jnp.concatenate([jnp.full_like(tokens[..., :1], end), tokens], 2)

    # Twice as many candidates as beams: even if the best `size` all stop, `size` others remain.
    sums = (search.sums[:, :, None] + log_probs).reshape(batch, -1)
    sums, flat = jax.lax.top_k(sums, min(2 * size, sums.shape[1]))
    parent, token = flat // choices.shape[2], jnp.take_along_axis(choices.reshape(batch, -1), flat, 1)
    tokens = jnp.take_along_axis(search.tokens, parent[:, :, None], 1)
    tokens = jax.lax.dynamic_update_index_in_dim(tokens, token, step, 2)
    stops = token == end

    finished = stops & (jnp.arange(sums.shape[1]) < size) & ~search.done[:, None] & (sums > NEVER / 2)
    if beam.early_stopping:  # the first results stay, whatever their scores
        missing = (search.scores < NEVER / 2).sum(1, keepdims=True)
        finished &= jnp.cumsum(finished, 1) <= missing
    length = step + len(prefix)
    scores = jnp.where(finished, sums / length.astype(jnp.float32) ** beam.length_penalty, NEVER)
    pool = jnp.concatenate([search.scores, scores], 1)
    best, chosen = jax.lax.top_k(pool, size)
    take = lambda old, new: jnp.take_along_axis(  # noqa: E731
        jnp.concatenate([old, new], 1), chosen.reshape(batch, size, *[1] * (old.ndim - 2)), 1
    )
    results = take(search.results, tokens)
    lengths = take(search.lengths, jnp.broadcast_to(length, token.shape))

    live, survivors = jax.lax.top_k(jnp.where(stops, NEVER, sums), size)
    sequences = (jnp.arange(batch)[:, None] * size + jnp.take_along_axis(parent, survivors, 1)).reshape(-1)
    full = best[:, -1] > NEVER / 2
    if not beam.early_stopping:
        full &= best[:, -1] >= live[:, 0] / length.astype(jnp.float32) ** beam.length_penalty
    return Search(
        step=step + 1,
        state=reorder(state, sequences),
        tokens=jnp.take_along_axis(tokens, survivors[:, :, None], 1),
        sums=live,
        results=results,
        scores=best,
        lengths=lengths,
        done=search.done | full | (step >= limits),
    )


def reorder(state: DecodeState, sequences: Int[Array, "sequences"]) -> DecodeState:
    """The state with the sequences of these indices, repeated or dropped as they say; the sources are unchanged."""
    layers, position = jax.tree.map(lambda x: x[sequences] if x.ndim else x, (state.layers, state.position))
    return DecodeState(layers, position, state.source)


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

"""Beam search over any state: the likeliest translations of a batch of sources, in one compiled loop.

The score of a translation is the sum of its tokens' log-probabilities, its end's among them, over length^α: the
paper's toolkit's length penalty. At each step the candidates are all beams with all next tokens. The ends among the
`beam` likeliest go to the results, and the `beam` likeliest that do not end live on.
"""

import functools
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from t2r.batch import PADDING, Batch, pad_rows
from t2r.errors import raise_all
from t2r.model.loss import source_states, token_losses
from t2r.model.transformer import DecodeState, Seq2Seq, check_length

NEVER = -1e30  # the log-probability of what cannot be; finite, so that sums and differences of it are numbers


@dataclass(frozen=True)
class Beam:
    """How to search."""

    size: int = 5
    length_penalty: float = 0.6  # α; 0: plain sums, which favour short translations
    # Stop at `size` results, as the paper's toolkit does. They may be the first, not the best: a model that is sure of
    # itself ends `size` unlikely beams before its likely one. Without it the search goes on while a living beam, as
    # long as it is, scores better than the last of `size` results.
    early_stopping: bool = False

    def __post_init__(self):
        problems = []
        if self.size < 1:
            problems.append(f"beam={self.size} must be at least 1")
        if self.length_penalty < 0:
            problems.append(f"length_penalty={self.length_penalty} must be at least 0")
        raise_all("beam search:", problems)


class Hypothesis(NamedTuple):
    """A translation, without its end, and its score."""

    tokens: list[int]
    score: float
    log_probability: float


class Search(NamedTuple):
    """A search in progress. Living beams are rows b·size of `state`."""

    step: Int[Array, ""]
    state: DecodeState
    tokens: Int[Array, "b size capacity"]  # of the living
    sums: Float[Array, "b size"]  # log-probabilities of the living
    results: Int[Array, "b size capacity"]
    scores: Float[Array, "b size"]  # of the results, best first; NEVER where there is none yet
    lengths: Int[Array, "b size"]  # of the results, the end counted
    done: Bool[Array, "b"]


def translate(
    model: Seq2Seq,
    sources: Int[np.ndarray, "b m"],
    *,
    end: int,
    start: int | tuple[int, ...] | None = None,
    beam: Beam = Beam(),
    limits: list[int] | None = None,
) -> list[list[Hypothesis]]:
    """The `beam.size` best translations of each source, best first. Sources are rows of ids ended by PADDING.

    Decoding starts from the token `start`, or from `end` where that is the same. Of several, such as one that says
    which language is wanted, all but the first count as the translation's where lengths are compared.

    `limits` is the most tokens each translation may have before its end; see `default_limit`. A source of padding
    alone has no translation.
    """
    sources = np.asarray(sources, np.int32)
    lengths = (sources != PADDING).sum(1)
    check_length(model.config, int(lengths.max()))
    limits = [default_limit(int(length)) for length in lengths] if limits is None else limits
    begun = start if isinstance(start, tuple) else (end if start is None else start,)
    if model.config.positions == "learned":
        limits = [min(limit, model.config.max_positions - len(begun)) for limit in limits]
    # By the width, not by what is in it, so that batches of one width share a program.
    capacity = max(default_limit(sources.shape[1]), *limits) + 1
    graph, arrays = nnx.split(model)
    found = _search(graph, arrays, sources, np.asarray(limits, np.int32), capacity, (begun, end), beam)
    results, scores, counts = (np.asarray(x) for x in found)
    return [
        [
            Hypothesis(row[: n - len(begun)].tolist(), float(score), float(score) * n**beam.length_penalty)
            for row, score, n in zip(results[i], scores[i], counts[i].tolist())
            if score > NEVER / 2 and lengths[i]
        ]
        for i in range(len(sources))
    ]


def default_limit(source_length: int) -> int:
    """The most tokens a translation may have: it depends on its own source alone, whatever else is in the batch."""
    return 2 * source_length + 16


@functools.partial(jax.jit, static_argnums=(0, 4, 5, 6))
def _search(graph, arrays, sources, limits, capacity: int, ends: tuple[tuple[int, ...], int], beam: Beam):
    model: Seq2Seq = nnx.merge(graph, arrays)
    batch, size = sources.shape[0], beam.size
    memory = source_states(model, sources)
    empty = jnp.zeros((batch, size, capacity), jnp.int32)
    first = jnp.full((batch, size), NEVER).at[:, 0].set(0.0)  # all beams are alike: only one of them counts
    nothing = jnp.full((batch, size), NEVER)
    # The state belongs to the living; the sources are shared by all beams of a sentence.
    *before, _ = ends[0]
    state = model.init_state(batch * size, capacity + len(before), memory)
    for token in before:
        _, state = model(jnp.full((batch * size, 1), token), state=state)
    search = Search(
        step=jnp.zeros((), jnp.int32),
        state=state,
        tokens=empty,
        sums=first,
        results=empty,
        scores=nothing,
        lengths=jnp.zeros((batch, size), jnp.int32),
        done=jnp.all(sources == PADDING, 1),
    )

    def more(search: Search) -> Array:
        return ~search.done.all() & (search.step < capacity)

    step = functools.partial(_step, model, limits=limits, ends=ends, beam=beam)
    search = jax.lax.while_loop(more, step, search)
    return search.results, search.scores, search.lengths


def _step(model: Seq2Seq, search: Search, *, limits: Array, ends: tuple[tuple[int, ...], int], beam: Beam) -> Search:
    """One more token for each living beam."""
    (batch, size), step, (begun, end) = search.sums.shape, search.step, ends
    last = jnp.where(
        step == 0, begun[-1], jax.lax.dynamic_index_in_dim(search.tokens, jnp.maximum(step - 1, 0), 2, False)
    )
    hidden, state = model(last.reshape(batch * size, 1), state=search.state)
    log_probs = model.log_probs(hidden[:, 0]).reshape(batch, size, -1)
    vocabulary = log_probs.shape[-1]
    # At its limit a translation can only end; and what only starts translations, such as Marian's <pad>, is in none.
    ids = jnp.arange(vocabulary)
    never = ((step >= limits)[:, None, None] & (ids != end)) | ((ids == begun[0]) & (ids != end))
    sums = search.sums[:, :, None] + jnp.where(never, NEVER, log_probs)

    # Twice as many candidates as beams: if all of the best ones end, as many are left to live on.
    sums, flat = jax.lax.top_k(sums.reshape(batch, -1), min(2 * size, size * vocabulary))
    parent, token = flat // vocabulary, (flat % vocabulary).astype(jnp.int32)
    tokens = jnp.take_along_axis(search.tokens, parent[:, :, None], 1)
    tokens = jax.lax.dynamic_update_index_in_dim(tokens, token, step, 2)
    ends = token == end

    ended = ends & (jnp.arange(sums.shape[1]) < size) & ~search.done[:, None] & (sums > NEVER / 2)
    length = step + len(begun)
    scores = jnp.where(ended, sums / length.astype(jnp.float32) ** beam.length_penalty, NEVER)
    pool = jnp.concatenate([search.scores, scores], 1)
    best, chosen = jax.lax.top_k(pool, size)
    take = lambda old, new: jnp.take_along_axis(  # noqa: E731
        jnp.concatenate([old, new], 1), chosen.reshape(batch, size, *[1] * (old.ndim - 2)), 1
    )
    results = take(search.results, tokens)
    lengths = take(search.lengths, jnp.broadcast_to(length, token.shape))

    living, survivors = jax.lax.top_k(jnp.where(ends, NEVER, sums), size)
    rows = (jnp.arange(batch)[:, None] * size + jnp.take_along_axis(parent, survivors, 1)).reshape(-1)
    full = best[:, -1] > NEVER / 2
    if not beam.early_stopping:
        full &= best[:, -1] >= living[:, 0] / length.astype(jnp.float32) ** beam.length_penalty
    return Search(
        step=step + 1,
        state=reorder(state, rows),
        tokens=jnp.take_along_axis(tokens, survivors[:, :, None], 1),
        sums=living,
        results=results,
        scores=best,
        lengths=lengths,
        done=search.done | full | (step >= limits),
    )


def reorder(state: DecodeState, rows: Int[Array, "rows"]) -> DecodeState:
    """The state of other rows, in any order and number; the sources stay where they are."""
    layers, position = jax.tree.map(lambda x: x[rows] if x.ndim else x, (state.layers, state.position))
    return DecodeState(layers, position, state.source)


def score(
    model: Seq2Seq, sources: Int[np.ndarray, "b m"], targets: list[list[int]], *, end: int, start: int | None = None
) -> list[float]:
    """The log-probability of given translations, their ends counted, by one pass over each: for rescoring."""
    start = end if start is None else start
    rows = pad_rows([[start, *target, end] for target in targets], len(targets), max(map(len, targets)) + 2)
    graph, arrays = nnx.split(model)
    return np.asarray(_score(graph, arrays, Batch(rows, np.asarray(sources, np.int32)))).tolist()


@functools.partial(jax.jit, static_argnums=0)
def _score(graph, arrays, batch: Batch) -> Float[Array, "b"]:
    return -token_losses(nnx.merge(graph, arrays), batch)[0].sum(1)

"""Beam search against enumeration and a naive search, for any batch and every kind of attention."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

from conftest import WINDOW, make_model, micro_mt, slow_but
from t2r import environment
from t2r.batch import PADDING
from t2r.conversion.merge import merge
from t2r.conversion.swap import swap
from t2r.decode import beam as beam_search
from t2r.decode.beam import MOST_THAT_SHARE, Beam, check_memory, score, translate
from t2r.decode.generate import generate_tokens, prefill_translation, state_bytes
from t2r.decode.sampling import Sampling
from t2r.errors import InputError
from t2r.model.embedding import PlainEmbedding

END = 5  # a token that these random models often generate
PAD = 7
# One for each kind of state: a cache; S and z; those and a window; S and z with a scale; mixtures of some. Feature maps
# are tested elsewhere.
KINDS = ["softmax", "merged", "windowed", "performer", "hybrid", "windowed_hybrid"]


def model_of(kind, seed=0, vocab_size=12, **fields):
    """A model with an untied output layer: with a tied one, random models mostly repeat the last token."""
    model = make_model(micro_mt(vocab_size=vocab_size, tied_output=False, **fields), seed)
    if kind == "softmax":
        return model
    sizes = {} if kind == "elu" else dict(features=4, cross_features=8)
    if kind in ("merged", "hybrid"):
        return merge(swap(model, **sizes, keep="1" if kind == "hybrid" else "none"))
    if kind.startswith("windowed"):
        return swap(model, **sizes, **WINDOW, keep="1" if kind == "windowed_hybrid" else "none")
    if kind == "short_window":  # which keys leave even in translations of three tokens
        return swap(model, **sizes, window=1, sinks=1)
    return swap(model, feature_map=kind, **sizes)


def padded(sequences, width):
    array = np.full((len(sequences), width), PADDING, np.int32)
    for row, ids in zip(array, sequences):
        row[: len(ids)] = ids
    return array


def random_sources(lengths, vocab, seed=0):
    rng = np.random.default_rng(seed)
    return [[*rng.integers(3, vocab, length - 1).tolist(), END] for length in lengths]


ALL_CANDIDATES = [
    ("softmax", 0.0, True, 0),
    ("hybrid", 1.3, False, 0),
    ("merged", 0.6, True, 0),
    ("softmax", 0.6, False, 1),
    ("short_window", 1.0, True, 0),
]


@pytest.mark.parametrize(("kind", "penalty", "early", "least"), slow_but(ALL_CANDIDATES, *ALL_CANDIDATES[:3]))
@given(seed=st.integers(0, 2**16))
def test_a_beam_of_all_candidates_equals_enumeration(kind, penalty, early, least, seed):
    """All 15 translations of up to 3 tokens of a vocabulary of 3, or 14 that are not empty, best first, with scores.

    By so many beams that each has a cache of its own.
    """
    vocab, limit, size = 3, 3, MOST_THAT_SHARE + 8
    model = model_of(kind, seed, vocab_size=vocab, source_vocab_size=6, shared_embedding=False)
    source = padded(random_sources([5], 6, seed), 5)
    all_targets = [list(ids) for n in range(least, limit + 1) for ids in itertools.product([0, 1], repeat=n)]
    log_probs = score(model, np.repeat(source, len(all_targets), 0), all_targets, end=2)
    scores = [value / (len(ids) + 1) ** penalty for value, ids in zip(log_probs, all_targets)]
    expected = sorted(zip(scores, all_targets), reverse=True)
    beam = Beam(size, penalty, early, min_length=least)
    hypotheses = translate(model, source, end=2, beam=beam, limits=[limit])[0]
    np.testing.assert_allclose([h.score for h in hypotheses], [value for value, _ in expected], rtol=1e-4)
    rescored = score(model, np.repeat(source, len(expected), 0), [h.tokens for h in hypotheses], end=2)
    np.testing.assert_allclose([h.log_probability for h in hypotheses], rescored, rtol=1e-4)
    assert sorted(h.tokens for h in hypotheses) == sorted(all_targets)


def test_the_start_token_is_never_generated():
    """Marian starts from <pad>, which must not be generated; otherwise six of these nine translations have it."""
    model = make_model(micro_mt(vocab_size=12))
    sources = padded(random_sources([6, 3, 4], 12), 6)
    results = translate(model, sources, start=4, end=END, beam=Beam(3), limits=[8] * 3)
    assert all(len(hypotheses) == 3 for hypotheses in results)
    assert not [h for hypotheses in results for h in hypotheses if 4 in h.tokens]


def fairseq_search(next_log_probs, beam, limit):
    """fairseq's search of one sentence, as its sequence generator does it; the id of <pad> is PAD."""
    live, results = [(0.0, [])], []
    for step in range(limit + 1):
        candidates = []
        for total, ids in live:
            allowed = {END} if step == limit else set(range(12)) - {PAD} - ({END} if step == 0 else set())
            candidates += [(total + value, [*ids, i]) for i, value in enumerate(next_log_probs(ids)) if i in allowed]
        candidates = sorted(candidates, key=lambda c: -c[0])[: 2 * beam.size]
        for total, ids in candidates[: beam.size]:
            if ids[-1] == END and len(results) < beam.size:
                results.append((total / (step + 1) ** beam.length_penalty, ids[:-1]))
        if len(results) == beam.size:
            break
        live = [c for c in candidates if c[1][-1] != END][: beam.size]
    return sorted(results, key=lambda r: -r[0])


def naive_search(next_log_probs, beam, limit):
    """Beam search of one sentence by its definition, with lists; `next_log_probs(prefix)` gives log-probabilities."""
    live, results = [(0.0, [])], []
    for step in range(limit + 1):
        candidates = [
            (total + value, [*ids, token])
            for total, ids in live
            for token, value in enumerate(next_log_probs(ids))
            if (token != PAD and (step or token != END) if step < limit else token == END)
        ]
        candidates.sort(key=lambda c: -c[0])
        finished = [c for c in candidates[: beam.size] if c[1][-1] == END]
        results += [(total / len(ids) ** beam.length_penalty, ids[:-1]) for total, ids in finished]
        results = sorted(results, key=lambda r: -r[0])[: beam.size]
        live = [c for c in candidates if c[1][-1] != END][: beam.size]
        if len(results) == beam.size and (
            not live or results[-1][0] >= live[0][0] / (limit + 1) ** beam.length_penalty
        ):
            break
    return results


@functools.partial(jax.jit, static_argnums=0)
def all_log_probs(graph, arrays, source, tokens):
    model = nnx.merge(graph, arrays)
    return model.log_probs(model(tokens, source=model.source_states(jnp.maximum(source, 0), source != PADDING))[0])


SEARCHES = [
    ("merged", 1, 0.6, True),
    ("merged", 3, 0.0, True),
    ("merged", 3, 0.6, False),
    ("windowed", 3, 0.6, True),
    ("merged", 4, 0.6, True),
    ("merged", 2, 1.5, True),
    ("softmax", 3, 0.6, False),
]


@pytest.mark.parametrize(("kind", "size", "penalty", "early"), slow_but(SEARCHES, SEARCHES[2], SEARCHES[-1]))
@given(seed=st.integers(0, 2**16))
def test_any_beam_equals_the_naive_search(kind, size, penalty, early, seed):
    """All results, in their order; with early stopping those of fairseq."""
    model = model_of(kind, seed)
    sequences = random_sources([3, 7, 2], 12, seed)
    sources, limits, beam = padded(sequences, 8), [4, 9, 6], Beam(size, penalty, early)
    results = translate(model, sources, end=END, padding=PAD, beam=beam, limits=limits)
    for source, limit, hypotheses in zip(sources, limits, results):

        def next_log_probs(prefix, source=source):
            tokens = np.zeros((1, 10), np.int32)
            tokens[0, : len(prefix) + 1] = [END, *prefix]
            return np.asarray(all_log_probs(*nnx.split(model), source[None], tokens))[0, len(prefix)].tolist()

        expected = (fairseq_search if early else naive_search)(next_log_probs, beam, limit)
        np.testing.assert_allclose([h.score for h in hypotheses], [r[0] for r in expected], rtol=1e-4)
        assert [h.tokens for h in hypotheses] == [r[1] for r in expected]


@pytest.mark.parametrize("kind", slow_but(KINDS, "softmax", "merged"))
def test_batches_padding_greedy_and_rescoring(kind):
    """A batch equals its sentences one by one, with any padding; scores equal a forward pass; a beam of 1 is greedy."""
    model = model_of(kind)
    sequences = random_sources([9, 2, 5], 12)
    batch = translate(model, padded([*sequences, []], 12), end=END, beam=Beam(3))
    assert batch.pop() == [], "a source that is only padding has no translation"
    for ids, batched in zip(sequences, batch):
        single = translate(model, padded([ids], 9), end=END, beam=Beam(3))[0]
        assert [h.tokens for h in single] == [h.tokens for h in batched]
        np.testing.assert_allclose([h.score for h in single], [h.score for h in batched], rtol=1e-4)
        values = [h.score for h in batched]
        assert values == sorted(values, reverse=True) and len({tuple(h.tokens) for h in batched}) == 3
    best = [hypotheses[0] for hypotheses in batch]
    rescored = score(model, padded(sequences, 12), [h.tokens for h in best], end=END)
    np.testing.assert_allclose([h.log_probability for h in best], rescored, rtol=1e-4)

    limit = 8
    narrow = translate(model, padded(sequences, 12), end=END, beam=Beam(1, min_length=0), limits=[limit] * 3)
    generation = prefill_translation(model, padded(sequences, 12), limit, start=END)
    _, greedy = generate_tokens(model, generation, limit, end=END)
    assert [hypotheses[0].tokens for hypotheses in narrow] == greedy


@pytest.mark.parametrize("kind", slow_but(KINDS, "hybrid"))
def test_sentences_take_the_places_of_those_that_are_done(kind, monkeypatch):
    """A small batch equals one of all sentences, whose lengths are such that caches of two sizes are used. At the end
    both become smaller."""
    model, done, smaller = model_of(kind), [], []
    only = beam_search._only
    monkeypatch.setattr(beam_search, "_only", lambda search, rows: smaller.append(len(rows)) or only(search, rows))
    sequences = random_sources([3, 70, 9, 2, 40, 5, 33, 12, 2, 4, 7], 12)
    sources = padded([*sequences, []], 72)
    expected = translate(model, sources, end=END, beam=Beam(2))
    found = translate(model, sources, end=END, beam=Beam(2), batch=4, on_done=done.append)
    assert [[h.tokens for h in hypotheses] for hypotheses in found] == [[h.tokens for h in row] for row in expected]
    scores = [[h.score for hypotheses in results for h in hypotheses] for results in (found, expected)]
    np.testing.assert_allclose(*scores, rtol=1e-4)
    assert sum(done) == len(sources) and smaller == [2, 1]


class Confident(PlainEmbedding):
    """Gives its best token most of the probability, and of the rest the stop token more than each of the others."""

    def logits(self, x):
        likely = jax.nn.one_hot(jnp.argmax(super().logits(x)[..., 1:], -1) + 1, 12)
        return jnp.log(0.92 * likely + jnp.full(12, 0.06 / 11).at[0].set(0.02))


def test_unlikely_results_do_not_stop_a_likely_translation():
    """With early stopping, as in the paper's toolkit, unlikely beams that end fill the results; here at every step."""
    model = model_of("t2r")
    model.embedding.__class__ = Confident
    sources, limits = padded(random_sources([6, 6], 12), 6), [10, 10]
    greedy = translate(model, sources, end=0, beam=Beam(1), limits=limits)
    for early in (False, True):
        results = translate(model, sources, end=0, beam=Beam(4, 0.6, early), limits=limits)
        assert [h[0].tokens == g[0].tokens for h, g in zip(results, greedy)] == [not early] * 2


def test_translations_stop_early_and_at_their_limits():
    """The other tests rely on it: these models do both."""
    model = model_of("t2r")
    sequences = random_sources([4] * 24, 12)
    results = translate(model, padded(sequences, 4), end=END, beam=Beam(2))
    lengths = {len(h.tokens) for hypotheses in results for h in hypotheses}
    assert min(lengths) < 12 and max(lengths) <= 2 * 4 + 16 and len(lengths) > 3


def test_sampled_translations_depend_on_the_seed():
    model = model_of("hybrid")
    sources = padded(random_sources([5, 3], 12), 5)
    samples = [
        generate_tokens(
            model, prefill_translation(model, sources, 9, start=END, seed=s), 9, end=END, sampling=Sampling(1.0)
        )[1]
        for s in (1, 1, 2)
    ]
    assert samples[0] == samples[1] != samples[2]


@pytest.mark.slow
def test_any_number_of_start_tokens_is_read():
    """More than caches have room for at first."""
    model = model_of("softmax")
    sources, prefix = padded(random_sources([5, 9], 12), 9), tuple(i % 4 for i in range(40))
    found = translate(model, sources, start=prefix, end=END, beam=Beam(2, 0.0), limits=[3, 3])
    for source, hypotheses in zip(sources, found):
        for hypothesis in hypotheses:
            tokens = jnp.asarray([[*prefix, *hypothesis.tokens, END]])
            log_probs = all_log_probs(*nnx.split(model), jnp.asarray(source)[None], tokens[:, :-1])[0]
            expected = sum(log_probs[i - 1, tokens[0, i]] for i in range(len(prefix), tokens.shape[1]))
            assert hypothesis.log_probability == pytest.approx(float(expected), rel=1e-4)


def test_impossible_searches_are_refused():
    learned = model_of("softmax", positions="learned", max_positions=8)
    with pytest.raises(InputError, match=r"9 tokens are too many .*max_positions=8"):
        translate(learned, padded(random_sources([9], 12), 16), end=END)
    hypotheses = translate(learned, padded(random_sources([3], 12), 16), end=END, beam=Beam(2))[0]
    assert max(len(h.tokens) for h in hypotheses) <= 7
    with pytest.raises(InputError, match=r"beam=0(.|\n)*length_penalty=-1(.|\n)*min_length=-1"):
        Beam(0, -1, min_length=-1)


def test_a_search_that_does_not_fit_is_refused_before_starting(monkeypatch):
    model, sources = make_model(micro_mt()), np.ones((4, 8), np.int32)
    with pytest.raises(InputError, match=r"beam=1000000000 for 4 sentences .* GiB are free: reduce the beam"):
        translate(model, sources, end=2, beam=Beam(10**9))
    # Twice the state of 4 × 3 beams of 2 · 8 + 16 + 1 tokens, and their log-probabilities.
    needed = 2 * state_bytes(model, 12, 33) + 4 * 12 * model.config.vocab_size
    monkeypatch.setattr(environment, "available_memory", lambda: needed - 1)
    with pytest.raises(InputError, match="at most 3 sentences at a time"):
        translate(model, sources, end=2, beam=Beam(3))
    check_memory(model, 3, 33, Beam(3))

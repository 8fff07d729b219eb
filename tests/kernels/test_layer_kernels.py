"""The kernels of a decoding step, interpreted, against the model's own step."""

import functools
import queue

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from t2r.batch import PADDING
from t2r.decode import generate
from t2r.decode.beam import Beam, translate
from t2r.decode.generate import fork, generate_tokens, packed_weights, prefill, prefill_translation, scan_steps
from t2r.decode.sampling import Sampling
from t2r.kernels.decoding import fused_model as fused
from t2r.kernels.decoding import layer_kernels, one_kernel, support, tiles
from t2r.kernels.decoding.prefetch import lines_of_program
from t2r.model.config import AttentionSpec
from t2r.model.loss import source_states
from t2r.model.parameters import abstract_model
from t2r.serve import slots
from t2r.serve.scheduler import Request, Scheduler
from tests.conftest import error, make_model, micro, micro_mt, random_tokens, slow_but
from tests.kernels.test_attention_kernels import imagined_gpu

SOFTMAX, MERGED, NARROW = AttentionSpec(), AttentionSpec("merged", "t2r", 16), AttentionSpec("merged", "t2r", 4)
KINDS = {"t2r": (MERGED,), "softmax": (SOFTMAX,), "both": (MERGED, SOFTMAX)}


@pytest.fixture(autouse=True)
def small_sizes(monkeypatch):
    """Sizes with which a micro model's matrices are one warp's, and the inputs of a feed-forward several parts."""
    monkeypatch.setattr(support, "WARPS", 1)
    monkeypatch.setattr(support, "INPUTS_PER_PART", 32)
    monkeypatch.setattr(support, "LEAST_PROGRAMS", 4)


@pytest.mark.parametrize(
    "kind, batch, placement",
    slow_but([("t2r", 3, "before"), ("softmax", 3, "after"), ("both", 17, "before")], ("softmax", 3, "after")),
)
def test_the_kernels_equal_the_models_step(kind, batch, placement):
    """For batches that do not fill their groups of sequences, one sequence of which has ended."""
    fields = dict(final_norm=batch == 3, adaptive_cutoffs=(), norm_placement=placement)
    model = make_model(micro(attention=KINDS[kind], projection_bias=False, **fields))
    tokens, active = random_tokens(batch, 5), jnp.arange(batch)[:, None] != 1
    _, state = model(tokens, state=model.init_state(batch, 8))
    fast = fused.FusedModel(model, fused.pack_model(model), interpret=True)

    @jax.jit
    def both(state):
        return [form(tokens[:, :1], state=state, mask=active) for form in (model, fast)]

    plain, kernels = both(state)
    indices = np.flatnonzero(active)  # the output of a sequence that has ended is not used, but its state is
    assert error(kernels[0][indices], plain[0][indices]) < 1e-5
    assert error(kernels[1], plain[1]) < 1e-5
    hidden = plain[0][:, 0]
    assert fast.greedy_token(hidden).tolist() == model.greedy_token(hidden).tolist()


TRANSLATION = {
    "t2r": dict(cross_attention=(NARROW,), attention=(MERGED,), heads=8),
    "softmax": {},
    "both, norms before": dict(
        cross_attention=(SOFTMAX, MERGED), attention=(MERGED, SOFTMAX), norm_placement="before", final_norm=True
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", slow_but(TRANSLATION, "both, norms before"))
def test_the_kernels_equal_the_step_of_translation(kind):
    """Two translations of each source, one of which has ended."""
    model = make_model(micro_mt(**TRANSLATION[kind]))
    assert support.suits(model)
    sources, batch = random_tokens(2, 6, 3, vocab=50).at[1, 4:].set(PADDING), 4
    tokens, active = random_tokens(batch, 5, vocab=50), jnp.arange(batch)[:, None] != 1
    fast = fused.FusedModel(model, fused.pack_model(model), interpret=True)

    @jax.jit
    def both():
        _, state = model(tokens, state=model.init_state(batch, 8, source_states(model, sources)))
        return [form(tokens[:, :1], state=state, mask=active) for form in (model, fast)]

    plain, kernels = both()
    indices = np.flatnonzero(active)
    assert error(kernels[0][indices], plain[0][indices]) < 1e-5
    assert error(kernels[1], plain[1]) < 1e-5


@pytest.mark.skipif(jax.default_backend() != "gpu", reason="the kernels themselves run on GPUs only")
@pytest.mark.parametrize("kind", [*KINDS, "one kernel", "translation"])
def test_the_kernels_equal_the_models_step_on_a_gpu(kind, monkeypatch):
    """Eight steps at the paper's width, for a batch that does not fill its group of sequences."""
    monkeypatch.undo()
    make, fields, _ = SHAPES["translation" if kind == "translation" else "language model"]
    chosen = (AttentionSpec("merged", "t2r", 32),) if kind == "one kernel" else KINDS.get(kind, ())
    kinds = {} if kind == "translation" else dict(attention=chosen * (4 // len(chosen)), layers=4)
    model = make_model(make(**{**fields, **kinds}, vocab_size=4096, kernels="on"))
    packed = packed_weights(model, 13)
    assert packed is not None and isinstance(packed.layers, one_kernel.PackedLayers) == (kind == "one kernel")
    graph, arrays = nnx.split(model)
    if kind == "translation":
        first = prefill_translation(model, np.arange(13 * 6).reshape(13, 6), 8, start=0)
    else:
        first = prefill(model, [[sequence + 1, 2, 3] for sequence in range(13)], 8)
    (plain, plain_tokens), (fast, fast_tokens) = (
        scan_steps(graph, arrays, fork(first, 1), 8, Sampling(), -1, weights) for weights in (None, packed)
    )
    same = (plain_tokens == fast_tokens).all(0)  # where two tokens are nearly equally likely, sequences may diverge
    assert same.mean() > 0.6
    for layers in zip(fast.state.layers, plain.state.layers):
        assert error(*(jax.tree.map(lambda x: x[same] if x.ndim else x, layer) for layer in layers)) < 0.02


@pytest.mark.slow
def test_generation_uses_the_kernels_where_they_are_available(monkeypatch):
    """In float32, interpreted: the same tokens, in segments, greedily and sampled."""
    model = make_model(micro(attention=KINDS["both"], adaptive_cutoffs=()))
    assert packed_weights(model, 3) is None  # not on a CPU
    begin = lambda: prefill(model, [[1, 2, 3], [4], [5, 6]], 6, seed=1)  # noqa: E731
    options = [dict(end=-1, segment=4), dict(end=7, segment=4, sampling=Sampling(0.8))]
    plain = [generate_tokens(model, begin(), 6, **kwargs)[1] for kwargs in options]
    monkeypatch.setattr(support, "available", lambda model, batch: True)
    monkeypatch.setattr(fused, "FusedModel", functools.partial(fused.FusedModel, interpret=True))
    calls = []
    monkeypatch.setattr(fused, "linear_step", lambda *args, **kw: calls.append(1) or linear_step(*args, **kw))
    assert [generate_tokens(model, begin(), 6, **kwargs)[1] for kwargs in options] == plain
    assert calls
    monkeypatch.setattr(generate, "available_memory", lambda: 1000)
    assert packed_weights(model, 3) is None  # not enough memory for a second copy of the weights


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["t2r", "both, norms before"])
def test_beam_search_uses_the_kernels_where_they_are_available(kind, monkeypatch):
    """In float32, interpreted: the same translations, of sentences that wait for others' places, too."""
    model = make_model(micro_mt(**TRANSLATION[kind]))
    sources = np.array(random_tokens(5, 6, 3, vocab=50).at[1, 4:].set(PADDING).at[4, 2:].set(PADDING))
    search = functools.partial(translate, model, sources, end=0, beam=Beam(2), limits=[5] * 5, batch=2)
    plain = search()
    monkeypatch.setattr(support, "available", lambda model, batch: True)
    monkeypatch.setattr(fused, "FusedModel", functools.partial(fused.FusedModel, interpret=True))
    batches = []
    count = lambda x, *args, **kw: batches.append(args[0].S.shape[0]) or linear_step(x, *args, **kw)  # noqa: E731
    monkeypatch.setattr(fused, "linear_step", count)
    fast = search()
    assert set(batches) == {4}  # two beams of two sentences
    for ours, theirs in zip(fast, plain, strict=True):
        assert [h.tokens for h in ours] == [h.tokens for h in theirs]
        assert np.allclose([h.score for h in ours], [h.score for h in theirs], atol=1e-5)


@pytest.mark.slow
def test_the_server_uses_the_kernels_where_they_are_available(monkeypatch):
    """In float32, interpreted: the same answers, of sequences that come and go; more than fit are XLA's."""
    model = make_model(micro(attention=KINDS["both"], adaptive_cutoffs=()))
    requests = lambda: [Request([1 + i, 2, 3, 4][: 2 + i], 3 + i, Sampling(i / 4), i) for i in range(3)]  # noqa: E731
    plain, most = answers_of(model, 3, requests())
    assert most == 0  # not on a CPU
    monkeypatch.setattr(support, "available", lambda model, batch: batch <= 2)
    monkeypatch.setattr(slots, "KERNEL_SIZES", (1, 2, 3))
    monkeypatch.setattr(fused, "FusedModel", functools.partial(fused.FusedModel, interpret=True))
    batches = []
    count = lambda x, *args, **kw: batches.append(args[0].S.shape[0]) or linear_step(x, *args, **kw)  # noqa: E731
    monkeypatch.setattr(fused, "linear_step", count)
    assert answers_of(model, 3, requests()) == (plain, 2)
    assert set(batches) <= {1, 2}
    assert answers_of(model, 1, requests()) == (plain, 1)
    assert 1 in batches


def answers_of(model, count, requests):
    """The tokens of each request in a server of this many slots, and how many of these the kernels take."""
    events = queue.Queue()
    scheduler = Scheduler(slots.Slots(model, count, 20), [], lambda some: [events.put(event) for event in some])
    scheduler.start()
    tokens, unfinished = {request: [] for request in requests}, len(requests)
    for request in requests:
        scheduler.submit(request)
    while unfinished:
        event = events.get(timeout=120)
        assert event.problem is None, event.problem
        tokens[event.request].append(event.token)
        unfinished -= bool(event.finish)
    scheduler.close(0)
    scheduler.join(30)
    return list(tokens.values()), scheduler.slots.most_by_kernels


linear_step = layer_kernels.linear_step


def test_the_norm_of_nearly_equal_numbers_is_finite():
    """E[x²] − E[x]² is negative by rounding; the variance is 0."""
    x = 1000 + 7.77 * jnp.arange(64.0)[:, None] * jnp.ones((1, 1024))
    moments = [sums.reshape(64, 8, 128).sum(2) for sums in (x, x * x)]
    mean, square = (parts.sum(1, keepdims=True) / 1024 for parts in moments)
    assert (square - mean**2 < -1e-5).any()
    mean, scale = layer_kernels._mean_and_scale(moments, 1024, 1e-5)
    assert jnp.isfinite(scale).all() and error(mean, x[:, :1]) < 1e-6


def test_only_plain_layers_are_supported():
    assert all(support.suits(abstract_model(micro(attention=kinds))) for kinds in KINDS.values())
    for fields in (
        dict(gated=True), dict(norm_placement="both"), dict(norm="rms"), dict(activation="gelu"),
        dict(attention=(AttentionSpec("linear", "t2r", 16),)), dict(attention=(MERGED,), kv_heads=1),
        dict(attention=(AttentionSpec("windowed", "t2r", 16, window=4), AttentionSpec())),
        dict(width=96), dict(feedforward=80),
    ):  # fmt: skip
        assert not support.suits(abstract_model(micro(**{"attention": (MERGED,), **fields}))), fields


def test_of_equally_likely_tokens_the_first_is_chosen():
    table = jnp.zeros((96, 32)).at[jnp.array([7, 40, 90])].set(1.0)  # in several tiles
    packed = tiles.pack(tiles.Matrix(table, jnp.zeros(96).at[:4].set(-jnp.inf)), jnp.float32)
    x = jnp.array([[1.0], [-1.0]]) * jnp.ones((2, 32))
    assert layer_kernels.greedy_token(tiles.pack_activations(x), packed, interpret=True)[:2].tolist() == [7, 4]


def test_packed_activations_unpack_and_match_their_indices():
    x = jax.random.normal(jax.random.key(0), (17, 64))
    packed = tiles.pack_activations(x)
    assert jnp.array_equal(tiles.unpack_activations(packed)[:17], x)
    assert jnp.array_equal(packed[0][tiles.packed_indices(jnp.arange(64), 64)], x[:16])


def test_products_of_the_papers_size(monkeypatch):
    """Eight warps, and four parts of 1,024 inputs each."""
    monkeypatch.undo()
    x, weights = (jax.random.normal(jax.random.key(seed), (size, 4096)) for seed, size in ((0, 16), (1, 2048)))
    packed = tiles.pack(tiles.Matrix(weights, jnp.arange(2048.0)), jnp.float32)
    assert packed.tiles.shape == (128, 4, 16 * 1024)
    tile = tiles.Tile(list(packed.tiles[3]), packed.weight_sums[48:64], packed.bias[48:64], 48)
    product = tiles.product(list(tiles.pack_activations(x).reshape(4, -1)), tile)
    assert error(product, x @ weights[48:64].T) < 1e-5 and tile.outputs.tolist() == tile.bias.tolist()


def test_packed_weights_unpack_to_the_matrix():
    weights = jax.random.normal(jax.random.key(0), (48, 64))
    packed = tiles.pack(tiles.Matrix(weights, jnp.zeros(48)), jnp.float32)
    assert packed.tiles.shape == (3, 2, 16 * 32) and packed.inputs_per_part == 32
    parts = [[tiles.unpack_weights(part, 16)[0] for part in tile] for tile in packed.tiles]
    assert jnp.array_equal(jnp.block(parts), weights)


@pytest.mark.parametrize("lines, programs", [(16384, 128), (24576, 96), (65536, 128), (1000, 7), (3, 128)])
def test_programs_together_prefetch_every_cache_line(lines, programs):
    prefetched = np.concatenate(
        [np.asarray(block) for program in range(programs) for block in lines_of_program(lines, program, programs)]
    )
    assert set(prefetched.tolist()) == set(range(lines))


PAPER = dict(width=1024, feedforward=4096, dtype="bfloat16")
SHAPES = {
    "language model": (micro, dict(PAPER, heads=8, attention=(MERGED, SOFTMAX), adaptive_cutoffs=()), 5 + 4),
    "translation": (
        micro_mt,
        dict(
            PAPER, heads=16, attention=(MERGED, SOFTMAX), cross_attention=(AttentionSpec("merged", "t2r", 4), SOFTMAX)
        ),
        8 + 6,
    ),
}


@pytest.mark.parametrize("kind", SHAPES)
def test_the_papers_models_lower_for_gpus(kind, monkeypatch):
    """Five kernels for each layer, three more where it attends to a source, and two for the vocabulary, in bfloat16."""
    monkeypatch.undo()
    make, fields, kernels = SHAPES[kind]
    graph, arrays = nnx.split(abstract_model(make(**fields)))
    tokens, mask = jnp.zeros((16, 1), jnp.int32), jnp.ones((16, 1), bool)

    def begin(arrays):
        model = nnx.merge(graph, arrays)
        return model.init_state(
            16, 64, source_states(model, jnp.ones((16, 8), jnp.int32)) if make is micro_mt else None
        )

    def step(arrays, state):
        model = nnx.merge(graph, arrays)
        fast = fused.FusedModel(model, fused.pack_model(model))
        hidden, state = fast(tokens, state=state, mask=mask)
        return fast.greedy_token(hidden[:, 0]), state

    with imagined_gpu():
        lowered = jax.jit(step).trace(arrays, jax.eval_shape(begin, arrays)).lower(lowering_platforms=("cuda",))
    text = lowered.as_text()
    assert text.count("xla.gpu.triton") == kernels + 2

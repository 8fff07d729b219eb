"""Generation does not depend on batching, chunks, or saving in between, for every kind of model."""

import gzip
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from conftest import WINDOW, error, make_model, micro, random_tokens, slow_but
from t2r import environment
from t2r.benchmark.steps import Decoder, linear_state_bytes
from t2r.conversion.merge import merge
from t2r.conversion.swap import swap
from t2r.decode import generate
from t2r.decode.generate import append_prompts, fork, generate_tokens, prefill, state_bytes
from t2r.decode.sampling import Sampling, choose, choose_each
from t2r.decode.state_file import load_generation, save_generation
from t2r.decode.text import SEPARATOR, generate_text, write_texts
from t2r.errors import InputError
from t2r.model.config import AttentionSpec
from t2r.model.parameters import arrays_of, with_arrays
from t2r.store import model_dir
from t2r.store.model_dir import LoadedModel

NO_STOP = -1
# One for each kind of state: a cache; S and z; those and a window; S and z with a scale, without and with a window;
# mixtures with softmax layers. Feature maps are tested elsewhere.
KINDS = ["softmax", "merged", "windowed", "performer", "windowed_performer", "hybrid", "windowed_hybrid"]


def model_of(kind):
    model = make_model(micro())
    if kind == "softmax":
        return model
    if kind in ("merged", "hybrid"):
        swapped = swap(model, features=8, keep="1" if kind == "hybrid" else "none")
        return merge(swapped)
    if kind.startswith("windowed"):
        _, _, kind = kind.partition("_")
        feature_map, keep = "performer" if kind == "performer" else "t2r", "1" if kind == "hybrid" else "none"
        return swap(model, feature_map=feature_map, features=8, keep=keep, **WINDOW)
    return swap(model, feature_map=kind, features=None if kind == "elu" else 8)


def prompt(length, seed=0):
    return np.asarray(random_tokens(1, length, seed))[0].tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_decoding_is_the_argmax_of_a_forward_pass_for_any_batch(kind):
    """Prompts of different lengths, prefilled in chunks, against one forward pass over each result."""
    model = model_of(kind)
    prompts = [prompt(11, 1), prompt(3, 2), prompt(1, 3)]
    _, sequences = generate_tokens(model, prefill(model, prompts, 6, chunk=4), 6, end=NO_STOP, segment=4)
    forward = jax.jit(lambda tokens: jnp.argmax(model.log_probs(model(tokens)[0]), -1))
    for ids, generated in zip(prompts, sequences):
        assert forward(jnp.array([ids + generated]))[0, len(ids) - 1 : -1].tolist() == generated


@pytest.mark.parametrize("kind", slow_but(KINDS, "softmax", "merged"))
def test_a_state_is_saved_loaded_forked_and_continued(kind, tmp_path):
    model = model_of(kind)
    sampling = Sampling(temperature=1.0)
    whole_state, whole = generate_tokens(
        model, prefill(model, [prompt(5), prompt(2, 1)], 12), 12, end=NO_STOP, sampling=sampling
    )
    half, first = generate_tokens(
        model, prefill(model, [prompt(5), prompt(2, 1)], 4), 4, end=NO_STOP, sampling=sampling
    )
    save_generation(tmp_path / "state", half, model)
    loaded = load_generation(tmp_path / "state", model)
    copies = fork(loaded, 2)
    end_state, second = generate_tokens(model, loaded, 8, end=NO_STOP, sampling=sampling)
    assert [a + b for a, b in zip(first, second)] == whole
    assert error(end_state.state.position, whole_state.state.position) == 0
    # Greedy: copies of one sequence stay equal, and differ from those of the other.
    _, forked = generate_tokens(model, copies, 8, end=NO_STOP)
    assert len(forked) == 4 and forked[0] == forked[1] and forked[2] == forked[3] and forked[0] != forked[2]


@pytest.mark.parametrize("kind", slow_but(["softmax", "merged", "windowed"], "softmax", "merged"))
def test_appending_a_prompt_equals_reading_it_at_once(kind):
    """A prompt in two parts, with generated tokens in between, against the same tokens as one prompt."""
    model = model_of(kind)
    generation, generated = generate_tokens(model, prefill(model, [prompt(4)], 20), 3, end=NO_STOP)
    generation = append_prompts(model, generation, [prompt(6, 5)])
    _, after = generate_tokens(model, generation, 5, end=NO_STOP)
    _, expected = generate_tokens(model, prefill(model, [prompt(4) + generated[0] + prompt(6, 5)], 5), 5, end=NO_STOP)
    assert after == expected
    # A prompt of one token, which is not in the state yet.
    short = append_prompts(model, prefill(model, [prompt(1)], 9), [prompt(3, 5)])
    _, expected = generate_tokens(model, prefill(model, [prompt(1) + prompt(3, 5)], 5), 5, end=NO_STOP)
    assert generate_tokens(model, short, 5, end=NO_STOP)[1] == expected


def test_sequences_stop_at_the_stop_token_and_the_others_continue():
    model = model_of("merged")
    prompts = [prompt(3, seed) for seed in range(4)]
    _, free = generate_tokens(model, prefill(model, prompts, 10), 10, end=NO_STOP)
    stop = free[0][4]
    streamed = []
    _, sequences = generate_tokens(
        model, prefill(model, prompts, 10), 10, end=stop, segment=2, on_tokens=streamed.append
    )
    assert sequences == [ids[: ids.index(stop)] if stop in ids else ids for ids in free]
    assert np.concatenate(streamed, 1).shape[1] <= 10
    stops = free[0][6], stop  # some models have several stop tokens: the first that is generated counts
    _, first = generate_tokens(model, prefill(model, prompts[:1], 10), 10, end=stops, segment=2)
    assert first == sequences[:1]


def test_what_is_kept_after_the_last_stop_does_not_depend_on_how_many_steps_ran():
    """Each sequence keeps the stop token that it chose, and the random key is the same, however long segments are."""
    model, sampling = model_of("merged"), Sampling(temperature=1.0)
    start = lambda: prefill(model, [prompt(3), prompt(3, 1)], 40, seed=1)  # noqa: E731
    _, free = generate_tokens(model, start(), 12, end=NO_STOP, sampling=sampling)
    stops = next((a, b) for a in free[0] for b in free[1] if a not in free[1] and b not in free[0])
    kept = [
        generate_tokens(model, start(), 40, end=stops, sampling=sampling, segment=segment)[0] for segment in (1, 3, 40)
    ]
    assert kept[0].last.tolist() == list(stops) and kept[0].done.all()
    for other in kept[1:]:
        assert other.last.tolist() == kept[0].last.tolist() and (other.key == kept[0].key).all()
        assert error(other.state, kept[0].state) == 0


@pytest.mark.parametrize("kind", slow_but(["softmax", "merged", "windowed"], "softmax", "merged"))
def test_the_state_of_a_finished_sequence_does_not_change(kind):
    """When a prompt is appended, it continues as if it had been alone in the batch."""
    model = model_of(kind)
    candidates = [prompt(3, seed) for seed in range(8)]
    _, free = generate_tokens(model, prefill(model, candidates, 9), 9, end=NO_STOP)
    # Two sequences, of which one soon generates a token that the other never does: that is the stop token.
    i, j, stop = next(
        (i, j, token) for i in range(8) for j in range(8) for token in free[i][:4] if i != j and token not in free[j]
    )
    prompts, generated = [candidates[i], candidates[j]], free[i][: free[i].index(stop) + 1]
    generation, _ = generate_tokens(model, prefill(model, prompts, 20), 9, end=stop)
    assert generation.state.position.tolist() == [3 + len(generated) - 1, 3 + 9 - 1]
    _, after = generate_tokens(model, append_prompts(model, generation, [prompt(2, 7), prompt(4, 8)]), 6, end=NO_STOP)
    _, expected = generate_tokens(model, prefill(model, [prompts[0] + generated + prompt(2, 7)], 6), 6, end=NO_STOP)
    assert after[:1] == expected


def test_sampling_respects_its_limits_and_its_seed():
    log_probs = jnp.log(jnp.array([[0.5, 0.3, 0.15, 0.05]]))
    draw = lambda **options: {  # noqa: E731
        int(choose(log_probs, Sampling(**options), jax.random.key(i))[0]) for i in range(200)
    }
    assert draw() == {0}
    assert draw(temperature=1.0) == {0, 1, 2, 3}
    assert draw(temperature=1.0, top_k=2) == {0, 1}
    assert draw(temperature=1.0, top_p=0.9) == {0, 1, 2}
    assert draw(temperature=1.0, top_p=0.01) == {0}
    assert draw(temperature=1.0, top_k=99) == {0, 1, 2, 3}
    assert draw(temperature=0.05) == {0}
    model = model_of("merged")
    samples = [
        generate_tokens(model, prefill(model, [prompt(3)], 9, seed=s), 9, end=NO_STOP, sampling=Sampling(1.0))[1]
        for s in (1, 1, 2)
    ]
    assert samples[0] == samples[1] != samples[2]
    with pytest.raises(InputError, match=r"temperature=-1(.|\n)*top_k=-2(.|\n)*top_p=0"):
        Sampling(-1, -2, 0)


def test_the_state_of_an_rnn_has_the_constant_size_of_the_formula():
    rnn, transformer = model_of("merged"), model_of("softmax")
    sizes = [state_bytes(rnn, 16, length) for length in (1, 64, 4096)]
    assert set(sizes) == {linear_state_bytes(layers=2, batch=16, heads=2, features=8, head_dim=16)}
    actual = prefill(rnn, [prompt(2)] * 16, 50).state.layers
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(actual)) == sizes[0]
    assert state_bytes(transformer, 16, 4096) > 60 * state_bytes(transformer, 16, 64)
    # With a window: the keys and values of its 3 tokens and of a sink, and a counter for each sequence, too.
    sizes = {state_bytes(model_of("windowed"), 16, length) - sizes[0] for length in (1, 64, 4096)}
    assert sizes == {2 * 16 * (2 * (3 + 1) * 2 * 16 * 4 + 4)}


def test_the_benchmark_counts_what_it_generates():
    measured = Decoder(model_of("merged"), repeat_for=0.01).steps(2, 8, 8)
    assert measured.tokens_per_second == pytest.approx(16 / measured.seconds) and measured.compile_seconds > 0


def test_a_length_that_does_not_fit_is_refused_before_starting(monkeypatch):
    model = model_of("softmax")
    with pytest.raises(InputError, match=r"GiB are free: generate at most [\d,]+ tokens"):
        prefill(model, [prompt(3)], 10**12)
    monkeypatch.setattr(environment, "available_memory", lambda: 10_000)
    with pytest.raises(InputError, match="convert the softmax layers") as raised:
        prefill(model, [prompt(3)], 1000)
    fits = named_length(raised)
    assert state_bytes(model, 1, fits) <= 10_000 < state_bytes(model, 1, fits + 2)


def named_length(raised):
    return int(str(raised.value).split("at most ")[1].split(" ")[0].replace(",", ""))


def test_only_memory_that_is_still_needed_is_asked_for(monkeypatch):
    """A state that is large enough needs no more; one that must grow needs the larger one beside it."""
    model, rnn = model_of("softmax"), model_of("merged")
    generation, linear = prefill(model, [prompt(3)], 20), prefill(rnn, [prompt(3)], 1)
    monkeypatch.setattr(environment, "available_memory", lambda: 0)
    generation, _ = generate_tokens(model, generation, 20, end=NO_STOP)
    generate_tokens(rnn, linear, 64, end=NO_STOP)
    monkeypatch.setattr(environment, "available_memory", lambda: state_bytes(model, 1, 50) - 16)
    used = int(generation.state.position[0])
    for more in (lambda: generate_tokens(model, generation, 50 - used, end=NO_STOP),
                 lambda: append_prompts(model, generation, [prompt(50 - used - 1)])):  # fmt: skip
        with pytest.raises(InputError, match="sequences of 50 tokens needs") as raised:
            more()
        assert named_length(raised) + used == 49
    generate_tokens(model, generation, 49 - used, end=NO_STOP)


def test_the_time_of_a_generation_is_without_compilation(tokenizer, monkeypatch):
    step = generate.step

    def slow_to_trace(*args):
        time.sleep(1.0)
        return step(*args)

    monkeypatch.setattr(generate, "step", slow_to_trace)
    model = make_model(micro(vocab_size=300, layers=1, adaptive_cutoffs=()))
    began = time.monotonic()
    result = generate_text(LoadedModel(model, tokenizer, {}), ["The"], 3)
    assert time.monotonic() - began > 1.0 > result.seconds > 0


def test_bad_prompts_are_refused():
    learned = make_model(micro(positions="learned", max_positions=8))
    with pytest.raises(InputError, match=r"12 tokens are too many .*max_positions=8"):
        prefill(learned, [prompt(10)], 2)
    generation, _ = generate_tokens(learned, prefill(learned, [prompt(4)], 4), 2, end=NO_STOP)
    with pytest.raises(InputError, match="max_positions=8"):
        generate_tokens(learned, generation, 9, end=NO_STOP)
    with pytest.raises(InputError, match="at least one token"):
        prefill(learned, [[]], 2)


def test_a_state_of_another_model_is_refused(tmp_path):
    model = model_of("merged")
    save_generation(tmp_path / "state", prefill(model, [prompt(3)], 4), model)
    with pytest.raises(InputError, match=r"another kind of model(.|\n)*state\.layers\.0"):
        load_generation(tmp_path / "state", model_of("softmax"))
    with pytest.raises(InputError, match=r"another kind of model(.|\n)*state\.layers\.0"):
        load_generation(tmp_path / "state", model_of("windowed"))
    scaled = with_arrays(model, {name: 1.01 * array for name, array in arrays_of(model).items()})
    with pytest.raises(InputError, match="only by the model that wrote it"):
        load_generation(tmp_path / "state", scaled)
    (tmp_path / "state").write_bytes(b"junk")
    with pytest.raises(InputError, match="damaged"):
        load_generation(tmp_path / "state", model_of("merged"))
    with pytest.raises(InputError, match="no state file"):
        load_generation(tmp_path / "nothing", model_of("merged"))


def test_text_is_streamed_token_by_token(saved_lm):
    """Each token is shown as it is generated, and all pieces together are the text, also beyond the stream's window."""
    loaded, pieces = model_dir.load(saved_lm), []
    sampling = Sampling(1.0)
    whole = generate_text(loaded, ["The"], 90, sampling=sampling, seed=6, on_text=pieces.append)
    assert "".join(pieces) == whole.texts[0] and whole.tokens > 70
    assert len(pieces) == whole.tokens + (whole.tokens < 90) + 1, "one piece per token, one for a stop, one at the end"
    assert generate_text(loaded, ["The"], 90, sampling=sampling, seed=6).texts == whole.texts


def test_a_file_of_texts_has_those_that_ended(tmp_path, saved_lm):
    """At a length at which some texts of a random model end; a shorter file has the first texts of a longer one."""
    loaded, options = model_dir.load(saved_lm), dict(prompt="The", sampling=Sampling(1.0), batch=16)
    made = write_texts(loaded, tmp_path / "five.txt", 5, 64, **options)
    texts = (tmp_path / "five.txt").read_bytes().decode().removesuffix("\n").split(SEPARATOR)
    assert texts == made.texts and len(texts) == 5 and all(text.startswith("The") for text in texts)
    write_texts(loaded, tmp_path / "two.txt.gz", 2, 64, **options)
    assert gzip.decompress((tmp_path / "two.txt.gz").read_bytes()).decode() == SEPARATOR.join(texts[:2]) + "\n"
    many = [write_texts(loaded, tmp_path / f"{seed}.txt", 40, 64, seed=seed, **options).texts for seed in (0, 1)]
    first, second = ({text for text in texts if len(text) > 30} for texts in many)  # short ones may be alike
    assert first and not first & second, "files of seeds that follow each other share no texts"
    all_of_a_batch = generate_text(loaded, ["The"] * 16, 64, sampling=Sampling(1.0))
    ended = [text for text, done in zip(all_of_a_batch.texts, all_of_a_batch.generation.done.tolist()) if done]
    assert 0 < len(ended) < 16 and texts[: len(ended)] == [("The" + text).strip() for text in ended][:5]


def test_prompts_padded_to_a_width_give_the_same_tokens():
    model = make_model(micro(attention=(AttentionSpec("linear", "t2r", 8), AttentionSpec())))
    prompts = [[5, 6, 7], [8]]
    plain, padded = (generate_tokens(model, prefill(model, prompts, 6, width=w), 6, end=1)[1] for w in (1, 12))
    assert plain == padded


def test_each_sequence_may_have_its_own_sampling():
    """Its token is the one that `choose` gives it alone, with its own key, which only sampling changes."""
    options = [
        Sampling(),
        Sampling(0.7),
        Sampling(1.0, 5),
        Sampling(1.3, 0, 0.6),
        Sampling(0.9, 4, 0.8),
        Sampling(1.0, 999),
    ]
    scores = 3 * jax.random.normal(jax.random.key(1), (len(options), 50))
    keys = [jax.random.key(number) for number in range(len(options))]
    columns = zip(*((option.temperature, option.top_k, option.top_p) for option in options))
    given = [jnp.array(column, dtype) for column, dtype in zip(columns, (jnp.float32, jnp.int32, jnp.float32))]
    data = jnp.stack([jax.random.key_data(key) for key in keys])
    tokens, next_keys = choose_each(scores, *given, data)
    split = [jax.random.split(key) for key in keys]
    alone = [choose(scores[i : i + 1], option, split[i][1])[0] for i, option in enumerate(options)]
    assert tokens.tolist() == [int(token) for token in alone]
    expected = [data[0], *(jax.random.key_data(pair[0]) for pair in split[1:])]
    assert next_keys.tolist() == jnp.stack(expected).tolist()

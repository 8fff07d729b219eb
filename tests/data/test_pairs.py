"""Sentence pairs: where they come from, how they are split, and the batches they make."""

import gzip
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from t2r.batch import PADDING
from t2r.data.buckets import Buckets, Encoded, EncodedPairs, choose_bounds
from t2r.data.pairs import is_pairs, load_pairs, split_of
from t2r.data.prepared import prepare_tokenizers
from t2r.data.tokenizer import load_pair
from t2r.errors import InputError

NUMBERS = "builtin:numbers-en-de"


def test_numbers_are_spelled_in_both_languages_and_split_apart():
    splits = {split: load_pairs(NUMBERS, split) for split in ("train", "valid", "test")}
    everything = load_pairs(NUMBERS, "all")
    assert ("forty-two", "zweiundvierzig") in everything and ("zero", "null") in everything
    sources = [{source for source, _ in pairs} for pairs in splits.values()]
    assert sum(map(len, sources)) == len(everything) == len(set().union(*sources)) == 30_000
    assert min(map(len, sources)) > 500


def test_sources_that_differ_in_punctuation_only_fall_into_one_split():
    for word in ("Run", "Stop", "Who", "Wow", "Fire"):
        assert len({split_of(text) for text in (f"{word}!", f"{word}.", word.lower(), f" {word} ?")}) == 1
    assert {split_of(f"sentence {i}") for i in range(500)} == {"train", "valid", "test"}
    assert split_of("?!") in ("train", "valid", "test")


def test_two_files_and_tables_say_the_same(tmp_path):
    pairs = [(f"source {i}", f"Ziel\u2028{i}") for i in range(300)]  # a line separator that does not end lines
    (tmp_path / "a.txt").write_text("".join(f"{s}\n" for s, _ in pairs))
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress("".join(f"{t}\r\n" for _, t in pairs).encode()))
    (tmp_path / "c.tsv").write_text("".join(f"{t}\t{s}\tCC-BY\n" for s, t in pairs))
    two = f"pairs:{tmp_path}/a.txt,{tmp_path}/b.txt.gz"
    assert load_pairs(two, "all") == load_pairs(f"tsv:{tmp_path}/c.tsv,2,1", "all") == pairs
    splits = [load_pairs(two, split) for split in ("train", "valid", "test")]
    assert sum(map(len, splits)) == 300 and not {s for s, _ in splits[0]} & {s for s, _ in splits[2]}
    assert is_pairs(two) and not is_pairs("text:a") and not is_pairs("builtin:pydoc")


def test_what_is_no_list_of_pairs_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("one\ntwo\n")
    (tmp_path / "b.txt").write_text("eins\n")
    (tmp_path / "c.tsv").write_text("one\teins\ntwo\nthree\n")
    (tmp_path / "d.tsv").write_text("one\t\n\tzwei\n")
    for spec, message in [
        (f"pairs:{tmp_path}/a.txt,{tmp_path}/b.txt", "has 2 lines and .*b.txt 1"),
        (f"pairs:{tmp_path}/a.txt", "use builtin:numbers-en-de, pairs:"),
        (f"tsv:{tmp_path}/c.tsv", "2 of them, the first is line 2"),
        (f"tsv:{tmp_path}/c.tsv,0,1", "counted from 1"),
        (f"tsv:{tmp_path}/d.tsv", "none has both sides"),
        (f"tsv:{tmp_path}/none.tsv", "no text file"),
    ]:
        with pytest.raises(InputError, match=message):
            load_pairs(spec, "all")


@given(lengths=st.lists(st.integers(1, 12), min_size=1, max_size=30), count=st.integers(1, 5))
def test_bounds_waste_as_little_as_any_could(lengths, count):
    def padded(bounds):
        return sum(min(bound for bound in bounds if bound >= length) for length in lengths)

    found, sizes = choose_bounds(lengths, count), sorted(set(lengths))
    every = [(*some, sizes[-1]) for n in range(count) for some in itertools.combinations(sizes[:-1], n)]
    assert padded(found) == min(map(padded, every)) and len(found) <= count


def encoded(count, seed=0):
    chance = np.random.default_rng(seed)
    return [Encoded([i] * chance.integers(2, 20), [i] * chance.integers(3, 20)) for i in range(count)]


@pytest.mark.parametrize("multiple", [1, 4])
def test_an_epoch_has_every_pair_once_in_batches_of_like_length(multiple):
    pairs = encoded(200)
    buckets = Buckets(EncodedPairs.of(pairs), tokens=64, count=4, multiple=multiple, seed=3)
    orders = []
    for epoch in range(2):
        batches = [buckets.batch(epoch * len(buckets) + i).whole() for i in range(len(buckets))]
        rows = [(s, t) for batch in batches for s, t in zip(batch.source, batch.tokens) if s[0] != PADDING]
        found = [(s[s != PADDING].tolist(), t[t != PADDING].tolist()) for s, t in rows]
        assert sorted(found) == sorted((list(p.source), list(p.target)) for p in pairs)
        orders.append(found)
        shapes = {batch.source.shape for batch in batches}
        assert len(shapes) <= 4 and all(rows % multiple == 0 for rows, _ in shapes)
        assert all(rows * width <= max(64, multiple * width) for rows, width in shapes)
        places = sum(batch.source.size + batch.tokens[:, 1:].size for batch in batches)
        real = sum((batch.source != PADDING).sum() + (batch.tokens[:, 1:] != PADDING).sum() for batch in batches)
        assert buckets.padding == pytest.approx(1 - real / places)
    assert orders[0] != orders[1]


def test_pairs_that_are_too_long_empty_or_uneven_are_left_out():
    end = 7
    sides = {
        "good": ([1, 1, end], [end, 2, end]),
        "no source": ([end], [end, 2, end]),
        "no target": ([3, end], [end, end]),
        "uneven": ([4] * 9, [end] * 5),
        "long": ([5] * 30, [end] * 30),
    }
    pairs = EncodedPairs.of([Encoded(*pair) for pair in sides.values()])

    def kept(**options):
        buckets = Buckets(pairs, tokens=64, **options)
        numbers = {int(row) for i in range(len(buckets)) for row in buckets.batch(i).rows if row >= 0}
        assert len(pairs) - len(numbers) == buckets.left_out
        return {name for number, name in enumerate(sides) if number in numbers}

    assert kept() == {"good", "uneven", "long"}
    assert kept(longest=29, ratio=1.5) == {"good"}


def test_a_saved_iterator_of_pairs_goes_on_where_it_was():
    make = lambda: Buckets(EncodedPairs.of(encoded(50)), tokens=40, count=3, seed=1).training_batches(2)  # noqa: E731
    batches = make()
    for _ in range(11):
        next(batches)
    state = batches.get_state()
    expected = [next(batches) for _ in range(15)]
    again = make()
    again.set_state(state)
    for parts in expected:
        for found, wanted in zip(next(again), parts):
            np.testing.assert_array_equal(found.whole().source, wanted.whole().source)
            np.testing.assert_array_equal(found.whole().tokens, wanted.whole().tokens)


@pytest.mark.parametrize("joint", [True, False])
def test_tokenizers_of_pairs_survive_the_disk(joint, tmp_path):
    pair = prepare_tokenizers(tmp_path, NUMBERS, "valid", "sentencepiece", 340, 330, joint)
    assert pair.joint == joint
    assert (pair.target.vocab_size, pair.source.vocab_size) == (340, 340 if joint else 330)
    text = "zwölftausenddreihundert"
    target = pair.encode_target(text)
    assert target[0] == target[-1] == pair.target.end and pair.target.decode(target[1:-1]) == text
    assert pair.encode_source("twelve")[-1] == pair.source.end
    (tmp_path / "model").mkdir()
    pair.save(tmp_path / "model")
    again = load_pair(tmp_path / "model")
    assert again.joint == joint and again.encode_target(text) == target

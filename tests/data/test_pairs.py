"""Sentence pairs: sources, splits, and batches in buckets of similar length."""

import gzip
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from t2r.batch import PADDING
from t2r.data.buckets import Buckets, Encoded, EncodedPairs, choose_bounds
from t2r.data.pairs import is_pairs, load_pairs, split_of
from t2r.data.prepared import prepare_tokenizers, stamps_of
from t2r.data.sources import files_of
from t2r.data.tokenizer import load_pair
from t2r.errors import InputError

NUMBERS = "builtin:numbers-en-de"


def test_numbers_are_spelled_in_both_languages_and_splits_do_not_overlap():
    splits = {split: load_pairs(NUMBERS, split) for split in ("train", "valid", "test")}
    everything = load_pairs(NUMBERS, "all")
    assert ("forty-two", "zweiundvierzig") in everything and ("zero", "null") in everything
    sources = [{source for source, _ in pairs} for pairs in splits.values()]
    assert sum(map(len, sources)) == len(everything) == len(set().union(*sources)) == 30_000
    assert min(map(len, sources)) > 500


def test_sources_that_differ_only_in_punctuation_are_in_one_split():
    for word in ("Run", "Stop", "Who", "Wow", "Fire"):
        assert len({split_of(text) for text in (f"{word}!", f"{word}.", word.lower(), f" {word} ?")}) == 1
    assert {split_of(f"sentence {i}") for i in range(500)} == {"train", "valid", "test"}
    assert split_of("?!") in ("train", "valid", "test")


def test_two_files_and_a_table_give_the_same_pairs(tmp_path):
    pairs = [(f"source {i}", f"Ziel\u2028{i}") for i in range(300)]  # a line separator that does not end lines
    (tmp_path / "a.txt").write_text("".join(f"{s}\n" for s, _ in pairs))
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress("".join(f"{t}\r\n" for _, t in pairs).encode()))
    (tmp_path / "c.tsv").write_text("".join(f"{t}\t{s}\tCC-BY\n" for s, t in pairs))
    two = f"pairs:{tmp_path}/a.txt,{tmp_path}/b.txt.gz"
    table = f"tsv:{tmp_path}/c.tsv,2,1"
    assert load_pairs(two, "all") == load_pairs(table, "all") == pairs
    assert files_of(f"{two} + {table}") == [tmp_path / name for name in ("a.txt", "b.txt.gz", "c.tsv")]
    assert len(stamps_of(f"{two} + {table}")) == 3
    splits = [load_pairs(two, split) for split in ("train", "valid", "test")]
    assert sum(map(len, splits)) == 300 and not {s for s, _ in splits[0]} & {s for s, _ in splits[2]}
    assert is_pairs(two) and not is_pairs("text:a") and not is_pairs("builtin:pydoc")


def test_bad_pair_files_are_refused(tmp_path):
    (tmp_path / "a.txt").write_text("one\ntwo\n")
    (tmp_path / "b.txt").write_text("eins\n")
    (tmp_path / "c.tsv").write_text("one\teins\ntwo\nthree\n")
    (tmp_path / "d.tsv").write_text("one\t\n\tzwei\n")
    for spec, message in [
        (f"pairs:{tmp_path}/a.txt,{tmp_path}/b.txt", "has 2 lines and .*b.txt 1"),
        (f"pairs:{tmp_path}/a.txt", "use builtin:numbers-en-de, pairs:"),
        (f"tsv:{tmp_path}/c.tsv", "2 of them, the first is line 2"),
        (f"tsv:{tmp_path}/c.tsv,0,1", "counted from 1"),
        (f"tsv:{tmp_path}/d.tsv", "none of its 2 lines has both sides"),
        (f"tsv:{tmp_path}/none.tsv", "no text file"),
    ]:
        with pytest.raises(InputError, match=message):
            load_pairs(spec, "all")


@given(lengths=st.lists(st.integers(1, 12), min_size=1, max_size=30), count=st.integers(1, 5))
def test_bounds_minimise_padding(lengths, count):
    def padded(bounds):
        return sum(min(bound for bound in bounds if bound >= length) for length in lengths)

    bounds, sizes = choose_bounds(lengths, count), sorted(set(lengths))
    all_choices = [(*some, sizes[-1]) for n in range(count) for some in itertools.combinations(sizes[:-1], n)]
    assert padded(bounds) == min(map(padded, all_choices)) and len(bounds) <= count


def encoded(count, seed=0):
    rng = np.random.default_rng(seed)
    return [Encoded([i] * rng.integers(2, 20), [i] * rng.integers(3, 20)) for i in range(count)]


@pytest.mark.parametrize("multiple", [1, 4])
def test_an_epoch_has_every_pair_once_in_batches_of_similar_length(multiple):
    pairs = encoded(200)
    buckets = Buckets(EncodedPairs.of(pairs), tokens=64, count=4, multiple=multiple, seed=3)
    orders = []
    for epoch in range(2):
        batches = [buckets.batch(epoch * len(buckets) + i).whole() for i in range(len(buckets))]
        padded = [(s, t) for batch in batches for s, t in zip(batch.source, batch.tokens) if s[0] != PADDING]
        unpadded = [(s[s != PADDING].tolist(), t[t != PADDING].tolist()) for s, t in padded]
        assert sorted(unpadded) == sorted((list(p.source), list(p.target)) for p in pairs)
        orders.append(unpadded)
        shapes = {batch.source.shape for batch in batches}
        assert len(shapes) <= 4 and all(count % multiple == 0 for count, _ in shapes)
        assert all(count * width <= max(64, multiple * width) for count, width in shapes)
        total = sum(batch.source.size + batch.tokens[:, 1:].size for batch in batches)
        real = sum((batch.source != PADDING).sum() + (batch.tokens[:, 1:] != PADDING).sum() for batch in batches)
        assert buckets.padding == pytest.approx(1 - real / total)
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

    def used(**options):
        buckets = Buckets(pairs, tokens=64, **options)
        indices = {int(index) for i in range(len(buckets)) for index in buckets.batch(i).rows if index >= 0}
        assert len(pairs) - len(indices) == buckets.left_out
        return {name for index, name in enumerate(sides) if index in indices}

    assert used() == {"good", "uneven", "long"}
    assert used(longest=29, ratio=1.5) == {"good"}


def test_a_restored_iterator_of_pairs_continues_where_it_was_saved():
    make = lambda: Buckets(EncodedPairs.of(encoded(50)), tokens=40, count=3, seed=1).training_batches(2)  # noqa: E731
    batches = make()
    for _ in range(11):
        next(batches)
    state = batches.get_state()
    expected = [next(batches) for _ in range(15)]
    restored = make()
    restored.set_state(state)
    for parts in expected:
        for actual, target in zip(next(restored), parts):
            np.testing.assert_array_equal(actual.whole().source, target.whole().source)
            np.testing.assert_array_equal(actual.whole().tokens, target.whole().tokens)


@pytest.mark.parametrize("joint", [True, False])
def test_tokenizers_of_pairs_are_saved_and_loaded(joint, tmp_path):
    pair = prepare_tokenizers(tmp_path, NUMBERS, "valid", "sentencepiece", 340, 330, joint)
    assert pair.joint == joint
    assert (pair.target.vocab_size, pair.source.vocab_size) == (340, 340 if joint else 330)
    text = "zwölftausenddreihundert"
    target = pair.encode_target(text)
    assert target[0] == target[-1] == pair.target.end and pair.target.decode(target[1:-1]) == text
    assert pair.encode_source("twelve")[-1] == pair.source.end
    (tmp_path / "model").mkdir()
    pair.save(tmp_path / "model")
    loaded = load_pair(tmp_path / "model")
    assert loaded.joint == joint and loaded.encode_target(text) == target

"""Batches: contiguous blocks, each once per epoch, from an iterator whose state can be saved and restored."""

import threading
import time

import numpy as np
import pytest

from t2r.data.batches import Blocks, Documents, Repeating, training_batches
from t2r.data.prepared import fill_if_absent, prepare_tokenizer, prepare_tokens
from t2r.errors import InputError


def test_blocks_are_contiguous_and_overlap_by_the_one_token_they_predict():
    blocks = Blocks(np.arange(35), 10)
    assert len(blocks) == 3
    np.testing.assert_array_equal(blocks[1], np.arange(10, 21))


def test_each_document_begins_a_sequence_and_long_ones_continue_in_the_next():
    documents = Documents(np.arange(10, 22), np.array([3, 10, 12]), 4, start=7)
    tokens = documents.read(np.arange(len(documents))).tokens
    assert tokens.tolist() == [
        [7, 10, 11, 12, -1], [7, 13, 14, 15, 16], [16, 17, 18, 19, -1], [7, 20, 21, -1, -1]
    ]  # fmt: skip


def test_every_epoch_has_each_block_once_in_a_new_order():
    batches = training_batches(Blocks(np.arange(81), 10), batch=4, seed=1)
    epochs = [np.concatenate([next(batches)[0].whole().tokens[:, 0] for _ in range(2)]) for _ in range(3)]
    for epoch in epochs:
        assert sorted(epoch) == list(range(0, 80, 10))
    assert epochs[0].tolist() != epochs[1].tolist()


@pytest.mark.parametrize(("batch", "parts"), [(1, 1), (3, 1), (6, 3)])
def test_a_restored_iterator_continues_where_it_was_saved(batch, parts):
    batches = training_batches(Blocks(np.arange(101), 10), batch=batch, seed=2, parts=parts)
    for _ in range(7):
        next(batches)
    state = batches.get_state()
    expected = [next(batches) for _ in range(9)]
    restored = training_batches(Blocks(np.arange(101), 10), batch=batch, seed=2, parts=parts)
    restored.set_state(state)
    for actual, target in zip((next(restored) for _ in range(9)), expected):
        assert len(actual) == parts and actual[0].whole().tokens.shape == (batch // parts, 11)
        np.testing.assert_array_equal([part.rows for part in actual], [part.rows for part in target])


def test_too_little_text_is_refused():
    with pytest.raises(InputError, match=r"2 sequences of data.length, fewer than data.batch=3"):
        training_batches(Blocks(np.arange(25), 10), batch=3, seed=0)


def test_the_tokenizer_is_trained_once(tmp_path, text_file):
    first = prepare_tokenizer(tmp_path / "run", f"text:{text_file}", "train", "sentencepiece", 300)
    text_file.write_text("quite another text, which the tokenizer never sees\n" * 50)
    second = prepare_tokenizer(tmp_path / "run", f"text:{text_file}", "train", "sentencepiece", 300)
    assert first.encode("The bright lamp") == second.encode("The bright lamp")
    assert prepare_tokenizer(tmp_path / "run", f"text:{text_file}", "train", "word", 0).kind == "word"


def test_runs_that_share_a_folder_prepare_it_once(tmp_path):
    """Threads stand for processes: each has its own file handle of the lock."""
    filled = []

    def fill(folder):
        filled.append(folder)
        time.sleep(0.1)
        (folder / "content").write_text("whole")

    threads = [threading.Thread(target=fill_if_absent, args=(tmp_path / "shared" / "it", fill)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(filled) == 1 and (tmp_path / "shared" / "it" / "content").read_text() == "whole"


def test_tokens_are_cached_until_text_or_tokenizer_change(tmp_path, text_file, tokenizer):
    spec = f"text:{text_file}"
    first, ends = prepare_tokens(tmp_path / "run", spec, "all", tokenizer)
    assert ends.tolist() == [len(first)]
    assert isinstance(first, np.memmap) and first.tolist() == tokenizer.encode_document(text_file.read_text())
    (folder,) = (tmp_path / "run").iterdir()
    prepare_tokens(tmp_path / "run", spec, "all", tokenizer)
    assert list((tmp_path / "run").iterdir()) == [folder]
    text_file.write_text("another text\n")
    changed, _ = prepare_tokens(tmp_path / "run", spec, "all", tokenizer)
    assert changed.tolist() == tokenizer.encode_document("another text\n")


def test_the_beginning_of_some_sequences_repeats():
    blocks, indices = Blocks(np.arange(100_001), 100), np.arange(1000)
    plain, repeating = blocks.read(indices).tokens, Repeating(blocks, 0.25, seed=3).read(indices).tokens
    changed = np.flatnonzero((plain != repeating).any(1))
    assert 200 < len(changed) < 300
    for index in changed:
        period = int(np.argmax(repeating[index, 2:] == repeating[index, 1])) + 1
        assert 100 // 8 <= period <= 100 // 2 and repeating[index, 0] == plain[index, 0]
        np.testing.assert_array_equal(repeating[index, 1:], np.resize(plain[index, 1 : period + 1], 100))
    # Each sequence by itself, as a process of several reads it, is the same.
    np.testing.assert_array_equal(Repeating(blocks, 0.25, seed=3).read(indices[7:9]).tokens, repeating[7:9])


def test_documents_that_repeat_keep_their_lengths():
    documents = Documents(np.arange(10, 60), np.array([3, 20, 50]), 16, start=7)
    indices = np.arange(len(documents))
    plain, repeating = documents.read(indices).tokens, Repeating(documents, 1.0, seed=0).read(indices).tokens
    np.testing.assert_array_equal(plain == -1, repeating == -1)
    assert (plain != repeating).any()

"""Text sources: splits that do not overlap, and files that are refused."""

import gzip
import hashlib
import json

import pytest

from t2r.data.sources import SPLITS, STORIES, load_documents, pydoc_documents, split_of
from t2r.errors import InputError
from t2r.evaluation.perplexity import document_perplexity
from t2r.store import model_dir


def test_pydoc_splits_are_prose_and_do_not_overlap():
    documents = {split: load_documents("builtin:pydoc", split) for split in SPLITS}
    sizes = {split: sum(map(len, texts)) for split, texts in documents.items()}
    assert sizes["train"] > 1_000_000 and min(sizes["valid"], sizes["test"]) > 50_000
    assert sum(sizes.values()) == sum(map(len, load_documents("builtin:pydoc", "all")))
    train = "\n\n".join(documents["train"])
    held_out = [
        p for split in ("valid", "test") for text in documents[split] for p in text.split("\n\n") if len(p) > 200
    ]
    assert len(held_out) > 200 and not [paragraph for paragraph in held_out if paragraph in train]


def test_a_documents_split_depends_only_on_its_name():
    """So the model that ships was not trained on the test split of another Python version."""
    assert [split_of(name) for name in ("topic/if", "module/abc.py", "module/types.py")] == ["valid", "train", "train"]
    names = pydoc_documents().keys()
    assert {split_of(name) for name in names} == set(SPLITS)


def test_stories_are_what_their_provenance_says_and_splits_do_not_overlap():
    text, said = gzip.decompress(STORIES.read_bytes()), json.loads(STORIES.with_name("stories.json").read_text())
    assert (len(text), hashlib.sha256(text).hexdigest()) == (said["bytes"], said["sha256"])
    documents = {split: load_documents("builtin:stories", split) for split in SPLITS}
    everything = load_documents("builtin:stories", "all")
    assert len(everything) == said["stories"] == len(set(everything)) == sum(map(len, documents.values()))
    assert f"--texts={said['stories']} " in said["command"] and "--model=builtin:stories" in said["command"]
    assert [len(documents[split]) for split in ("valid", "test")] == [94, 94]


@pytest.mark.slow
def test_the_model_that_wrote_the_stories_finds_them_likely():
    """At a temperature below 1, a model's own text surprises it less than text of its training data does."""
    model, tokenizer, provenance = model_dir.load("builtin:stories")
    stories = [tokenizer.encode(story) for story in load_documents("builtin:stories", "test")[:8]]
    own = document_perplexity(model, stories, start=tokenizer.end, window=256, quiet=True).perplexity
    assert own < 0.75 * provenance["history"][0]["valid_perplexity"]


def test_a_file_is_split_into_consecutive_parts(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("".join(f"line {i}\n" for i in range(200)))
    parts = [load_documents(f"text:{path}", split)[0] for split in SPLITS]
    assert "".join(parts) == path.read_text() == load_documents(f"text:{path}", "all")[0]
    assert [part.count("\n") for part in parts] == [180, 10, 10]


def test_a_file_may_mark_the_ends_of_its_documents(tmp_path):
    path = tmp_path / "stories.txt"
    path.write_text("one\nmore\n<|endoftext|>\n\ntwo: a <|endoftext|> within\n<|endoftext|>\r\n<|endoftext|>")
    assert load_documents(f"text:{path}", "all") == ["one\nmore", "two: a <|endoftext|> within"]
    path.write_text("<|endoftext|>\n" * 2)
    with pytest.raises(InputError, match="nothing between them"):
        load_documents(f"text:{path}", "all")


def test_compressed_files_are_read(tmp_path):
    path = tmp_path / "text.txt.gz"
    path.write_bytes(gzip.compress("schöne Grüße\n".encode()))
    assert load_documents(f"text:{path}", "all") == ["schöne Grüße\n"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.txt", b"", "is empty"),
        ("blank.txt", b" \n\n ", "is empty"),
        ("binary.txt", b"text\0more", "NUL byte at 4"),
        ("image.txt", b"\x89PNG\r\n", "byte 0 is 0x89"),
        ("cut.txt.gz", gzip.compress(b"some text " * 100)[:-20], "truncated"),
        ("not.txt.gz", b"plain text", "cannot read"),
    ],
    ids=["empty", "blank", "NUL", "image", "truncated gzip", "not gzip"],
)
def test_files_that_are_not_text_are_refused(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=message) as raised:
        load_documents(f"text:{tmp_path / name}", "all")
    assert name in str(raised.value)


def test_unknown_sources_and_splits_are_refused(tmp_path):
    for spec in ("builtin:wikipedia", "text:", "file.txt"):
        with pytest.raises(InputError, match="builtin:stories, builtin:pydoc, text:PATH"):
            load_documents(spec, "all")
    with pytest.raises(InputError, match="train, valid, test, all"):
        load_documents("builtin:pydoc", "dev")
    with pytest.raises(InputError, match="no text file"):
        load_documents(f"text:{tmp_path}/none.txt", "all")
    with pytest.raises(InputError, match="is a folder"):
        load_documents(f"text:{tmp_path}", "all")
    (tmp_path / "short.txt").write_text("one\ntwo\n")
    with pytest.raises(InputError, match="too few for a valid split"):
        load_documents(f"text:{tmp_path}/short.txt", "valid")

"""Tokenizers and token ids that are computed once per folder, a work directory or one that several runs share.

One process writes them atomically, and others wait for it. Token ids are memory-mapped, so a process reads only the
examples it needs.
"""

import tempfile
import zlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np

from t2r import processes
from t2r.console import Progress
from t2r.data.buckets import EncodedPairs
from t2r.data.pairs import load_pairs
from t2r.data.sources import files_of, load_documents
from t2r.data.tokenizer import Tokenizer, TokenizerPair, load_tokenizer, train_tokenizer
from t2r.errors import InputError
from t2r.files import atomic_directory, one_at_a_time

# A tokenizer is trained on at most this many pairs, evenly spaced among all: enough for a stable vocabulary.
TOKENIZER_PAIRS = 2_000_000


def cached_directory(workdir: Path, name: str, request: str, fill: Callable[[Path], None]) -> Path:
    """The cache folder of `request`, a string with all that the content depends on.

    If it does not exist yet, the first process creates it with `fill`.
    """
    folder = workdir / f"{name}-{zlib.crc32(request.encode()):08x}"
    processes.on_first_process(lambda: fill_if_absent(folder, fill))
    return folder


def fill_if_absent(folder: Path, fill: Callable[[Path], None]) -> None:
    """Creates a folder with `fill`, atomically, unless it exists. Of runs that share it, the first one does."""
    if folder.exists():
        return
    with one_at_a_time(folder.parent):
        if not folder.exists():  # another run may have filled it meanwhile
            with atomic_directory(folder) as unfinished:
                fill(unfinished)


def prepare_tokenizer(workdir: Path, spec: str, split: str, kind: str, vocab_size: int) -> Tokenizer:
    """A tokenizer trained on a split of text data."""

    def fill(folder: Path) -> None:
        train_tokenizer(kind, "\n".join(load_documents(spec, split)), vocab_size).save(folder)

    return load_tokenizer(cached_directory(workdir, "tokenizer", f"{spec} {split} {kind} {vocab_size}", fill))


def prepare_tokenizers(
    workdir: Path, spec: str, split: str, kind: str, vocab_size: int, source_vocab_size: int, joint: bool
) -> TokenizerPair:
    """The tokenizers of a translation model: one trained on both languages if `joint`, else one for each."""

    def trained(side: str, size: int) -> Tokenizer:
        def fill(folder: Path) -> None:
            pairs = load_pairs(spec, split)
            chosen = range(0, len(pairs), -(-len(pairs) // TOKENIZER_PAIRS))
            columns = {"source": [0], "target": [1], "joint": [0, 1]}[side]
            text = "\n".join(pairs[index][column] for index in chosen for column in columns)
            field = "data.source_vocab_size" if side == "source" else "data.vocab_size"
            train_tokenizer(kind, text, size, sentences=True, field=field).save(folder)

        return load_tokenizer(cached_directory(workdir, "tokenizer", f"{spec} {split} {kind} {size} {side}", fill))

    if joint:
        joint_tokenizer = trained("joint", vocab_size)
        return TokenizerPair(joint_tokenizer, joint_tokenizer)
    return TokenizerPair(trained("source", source_vocab_size or vocab_size), trained("target", vocab_size))


def tokenize(tokenizer: Tokenizer, documents: Sequence[str]) -> np.ndarray:
    """All documents as one array of token ids, an end token after each."""
    return np.concatenate([np.asarray(tokenizer.encode_document(text), np.int32) for text in documents])


def prepare_tokens(workdir: Path, spec: str, split: str, tokenizer: Tokenizer) -> tuple[np.ndarray, np.ndarray]:
    """A split of text data: one array of token ids, and the index after each document's last token."""

    def fill(folder: Path) -> None:
        write_ids(folder / "tokens", ([tokenizer.encode_document(text)] for text in load_documents(spec, split)))

    return read_ids(cached_directory(workdir, "tokens", _request(spec, split, tokenizer), fill) / "tokens")


def prepare_pairs(workdir: Path, spec: str, split: str, tokenizer: TokenizerPair) -> EncodedPairs:
    """A split of sentence pairs as token ids."""

    def fill(folder: Path) -> None:
        pairs = load_pairs(spec, split)
        with Progress(f"tokenize {split}", len(pairs)) as progress:
            write_ids(folder / "pairs", (_encode(tokenizer, pair, progress) for pair in pairs))

    return EncodedPairs(
        *read_ids(cached_directory(workdir, "tokens", _request(spec, split, tokenizer), fill) / "pairs")
    )


def _encode(tokenizer: TokenizerPair, pair: tuple[str, str], progress: Progress) -> tuple[list[int], list[int]]:
    progress.advance()
    return tokenizer.encode_source(pair[0]), tokenizer.encode_target(pair[1])


def write_ids(path: Path, examples: Iterable[Sequence[Sequence[int]]]) -> None:
    """Writes examples, each one or more lists of ids: all ids concatenated (.ids), and each list's end (.ends.npy)."""
    ends, position = [], 0
    with path.with_suffix(".ids").open("wb") as file:
        for example in examples:
            for ids in example:
                file.write(np.asarray(ids, np.int32).tobytes())
                position += len(ids)
                ends.append(position)
    np.save(path.with_suffix(".ends.npy"), np.asarray(ends, np.int64))


def read_ids(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """What `write_ids` wrote: all ids, and the index after each list's last id; both memory-mapped."""
    try:
        ends = np.load(path.with_suffix(".ends.npy"), mmap_mode="r")
        ids = np.memmap(path.with_suffix(".ids"), np.int32, "r")
        complete = ends.ndim == 1 and ends.dtype == np.int64 and ends[-1] == len(ids)
    except (OSError, ValueError, EOFError, AttributeError, IndexError):  # damaged files
        complete = False
    if not complete:
        raise InputError(f"the prepared data in {path.parent} is damaged: remove this folder; it is then made again")
    return ids, ends


def _request(spec: str, split: str, tokenizer: Tokenizer | TokenizerPair) -> str:
    """All that the token ids depend on: the data spec, the files' sizes and times, and the tokenizer's content."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save(Path(folder))
        content = b"".join(path.read_bytes() for path in sorted(Path(folder).rglob("*")) if path.is_file())
    return f"{spec} {split} {stamps_of(spec)} {zlib.crc32(content):08x}"


def stamps_of(spec: str) -> list[tuple[int, int]]:
    """Sizes and modification times of the files that a data spec names."""
    return stamps(files_of(spec))


def stamps(paths: Iterable[Path]) -> list[tuple[int, int]]:
    """Sizes and modification times of those of these files that exist."""
    return [(path.stat().st_size, path.stat().st_mtime_ns) for path in paths if path.is_file()]

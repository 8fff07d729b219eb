"""What is made from data once per work directory and kept there: tokenizers, and data as token ids.

One process makes it, whole or not at all. Ids are then mapped into memory, so that a process reads from disk only the
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
from t2r.data.sources import load_documents, split_spec
from t2r.data.tokenizer import Tokenizer, TokenizerPair, load_tokenizer, train_tokenizer
from t2r.files import atomic_directory

# Pairs that a tokenizer is learned from, at most: evenly spaced among all.
TOKENIZER_PAIRS = 2_000_000


def cached_directory(workdir: Path, name: str, request: str, fill: Callable[[Path], None]) -> Path:
    """The folder `fill` has filled for a request, by now or before; of several processes the first does it."""
    folder = workdir / f"{name}-{zlib.crc32(request.encode()):08x}"
    processes.on_first_process(lambda: fill_if_absent(folder, fill))
    return folder


def fill_if_absent(folder: Path, fill: Callable[[Path], None]) -> None:
    """Fills a folder, unless it is there: whole or not at all."""
    if not folder.exists():
        with atomic_directory(folder) as unfinished:
            fill(unfinished)


def prepare_tokenizer(workdir: Path, spec: str, split: str, kind: str, vocab_size: int) -> Tokenizer:
    """A tokenizer learned from a split of a text."""

    def learn(folder: Path) -> None:
        train_tokenizer(kind, "\n".join(load_documents(spec, split)), vocab_size).save(folder)

    return load_tokenizer(cached_directory(workdir, "tokenizer", f"{spec} {split} {kind} {vocab_size}", learn))


def prepare_tokenizers(
    workdir: Path, spec: str, split: str, kind: str, vocab_size: int, source_vocab_size: int, joint: bool
) -> TokenizerPair:
    """The tokenizers of a translation model likewise: one learned from both sides, or one from each."""

    def learned(side: str, size: int) -> Tokenizer:
        def learn(folder: Path) -> None:
            pairs = load_pairs(spec, split)
            chosen = range(0, len(pairs), -(-len(pairs) // TOKENIZER_PAIRS))
            sides = {"source": [0], "target": [1], "joint": [0, 1]}[side]
            text = "\n".join(pairs[place][which] for place in chosen for which in sides)
            train_tokenizer(kind, text, size, sentences=True).save(folder)

        return load_tokenizer(cached_directory(workdir, "tokenizer", f"{spec} {split} {kind} {size} {side}", learn))

    if joint:
        both = learned("joint", vocab_size)
        return TokenizerPair(both, both)
    return TokenizerPair(learned("source", source_vocab_size or vocab_size), learned("target", vocab_size))


def tokenize(tokenizer: Tokenizer, documents: Sequence[str]) -> np.ndarray:
    """Documents as one array of ids, each with its end."""
    return np.concatenate([np.asarray(tokenizer.encode_document(text), np.int32) for text in documents])


def prepare_tokens(workdir: Path, spec: str, split: str, tokenizer: Tokenizer) -> tuple[np.ndarray, np.ndarray]:
    """A split of a text as one array of ids, and where each document ends."""

    def fill(folder: Path) -> None:
        write_ids(folder / "tokens", ([tokenizer.encode_document(text)] for text in load_documents(spec, split)))

    return read_ids(cached_directory(workdir, "tokens", _request(spec, split, tokenizer), fill) / "tokens")


def prepare_pairs(workdir: Path, spec: str, split: str, tokenizer: TokenizerPair) -> EncodedPairs:
    """A split of sentence pairs as ids."""

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


def write_ids(path: Path, rows: Iterable[Sequence[Sequence[int]]]) -> None:
    """Rows of so many lists of ids each, one after the other, and where each ends."""
    ends, place = [], 0
    with path.with_suffix(".ids").open("wb") as file:
        for row in rows:
            for ids in row:
                file.write(np.asarray(ids, np.int32).tobytes())
                place += len(ids)
                ends.append(place)
    np.save(path.with_suffix(".ends.npy"), np.asarray(ends, np.int64))


def read_ids(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """All ids, and where each list of them ends; both in memory only where they are looked at."""
    ends = np.load(path.with_suffix(".ends.npy"), mmap_mode="r")
    return np.memmap(path.with_suffix(".ids"), np.int32, "r"), ends


def _request(spec: str, split: str, tokenizer: Tokenizer | TokenizerPair) -> str:
    """What the ids depend on: the data, if it is files their sizes and times, and the tokenizer."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save(Path(folder))
        content = b"".join(path.read_bytes() for path in sorted(Path(folder).rglob("*")) if path.is_file())
    return f"{spec} {split} {stamps_of(spec)} {zlib.crc32(content):08x}"


def stamps_of(spec: str) -> list[tuple[int, int]]:
    """Sizes and times of the files that a data spec names."""
    names = [name for part in split_spec(spec) for name in part.partition(":")[2].split(",")]
    return [(path.stat().st_size, path.stat().st_mtime_ns) for path in map(Path, names) if path.is_file()]

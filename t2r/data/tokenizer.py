"""Text ↔ token ids: sentencepiece subwords, or whole words as in WikiText."""

import io
import os
from collections import Counter
from pathlib import Path
from typing import Protocol

import sentencepiece

from t2r.errors import InputError


class Tokenizer(Protocol):
    """What the rest of the house needs to know of a tokenizer."""

    kind: str
    vocab_size: int
    end: int  # the id that stands between texts, and so before the first
    stop: int  # the id that ends generation; -1: none does
    glue: str  # what stands between a prompt and what follows it

    def encode(self, text: str) -> list[int]: ...
    def encode_document(self, text: str) -> list[int]: ...  # with its end
    def decode(self, ids: list[int]) -> str: ...
    def save(self, folder: Path) -> None: ...


class SentencePiece:
    """Subwords. Lossless: spaces and line ends are kept, unseen characters are spelled in bytes."""

    kind, glue = "sentencepiece", ""
    file = "tokenizer.model"

    def __init__(self, model: bytes):
        self._model = model
        self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        self.vocab_size = self._processor.vocab_size()
        self.end = self.stop = self._processor.eos_id()

    @classmethod
    def train(cls, text: str, vocab_size: int) -> "SentencePiece":
        """Learns subwords from a text. Ids fall with frequency, as adaptive embeddings need."""
        model = io.BytesIO()
        try:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=iter(line for line in text.splitlines() if line),
                model_writer=model,
                vocab_size=vocab_size,
                model_type="bpe",
                byte_fallback=True,
                user_defined_symbols=["\n"],
                normalization_rule_name="identity",
                remove_extra_whitespaces=False,
                allow_whitespace_only_pieces=True,
                add_dummy_prefix=False,
                num_threads=os.cpu_count() or 1,
                minloglevel=2,
            )
        except RuntimeError as error:
            raise InputError(
                f"sentencepiece could not learn {vocab_size} subwords from {len(text):,} characters: set another "
                f"data.vocab_size ({' '.join(str(error).split())})"
            ) from None
        return cls(model.getvalue())

    @classmethod
    def load(cls, folder: Path) -> "SentencePiece":
        return cls((folder / cls.file).read_bytes())

    def encode(self, text: str) -> list[int]:
        return self._processor.encode(text)

    def encode_document(self, text: str) -> list[int]:
        return [*self.encode(text), self.end]

    def decode(self, ids: list[int]) -> str:
        return self._processor.decode([int(i) for i in ids])

    def save(self, folder: Path) -> None:
        (folder / self.file).write_bytes(self._model)


class Words:
    """Words between spaces, with `<unk>` for all others and `<eos>` at each line end, as WikiText is scored."""

    kind, glue = "word", " "
    file = "vocabulary.txt"
    stop = -1  # lines end, texts go on

    def __init__(self, words: list[str]):
        self._words = words
        self._ids = {word: i for i, word in enumerate(words)}
        self.vocab_size = len(words)
        self.end, self._unknown = self._ids["<eos>"], self._ids["<unk>"]

    @classmethod
    def train(cls, text: str, vocab_size: int) -> "Words":
        """The most frequent words, by falling frequency; vocab_size 0 keeps all."""
        counts = Counter(text.split())
        counts["<eos>"] += text.count("\n")
        counts["<unk>"] += 1
        ordered = sorted(counts, key=lambda word: (-counts[word], word))
        special = ["<eos>", "<unk>"]
        kept = ordered[: vocab_size or len(ordered)]
        missing = [word for word in special if word not in kept]
        return cls(kept[: len(kept) - len(missing)] + missing)

    @classmethod
    def load(cls, folder: Path) -> "Words":
        return cls((folder / cls.file).read_text("utf-8").split("\n"))

    def encode(self, text: str) -> list[int]:
        ids = []
        for line in text.split("\n"):
            ids += [self._ids.get(word, self._unknown) for word in line.split()] + [self.end]
        return ids[:-1]  # what follows the last line end is an unfinished line

    def encode_document(self, text: str) -> list[int]:
        return self.encode(text if text.endswith("\n") else text + "\n")

    def unknown(self, ids) -> int:
        """How many of these ids stand for words the vocabulary lacks."""
        return sum(int(i) == self._unknown for i in ids)

    def decode(self, ids: list[int]) -> str:
        return " ".join("\n" if i == self.end else self._words[i] for i in ids)

    def save(self, folder: Path) -> None:
        (folder / self.file).write_text("\n".join(self._words), "utf-8")


KINDS = {kind.kind: kind for kind in (SentencePiece, Words)}


def train_tokenizer(kind: str, text: str, vocab_size: int) -> Tokenizer:
    """A tokenizer of the named kind, learned from a text."""
    if kind not in KINDS:
        raise InputError(f"unknown tokenizer {kind!r}: choose one of {', '.join(KINDS)}")
    return KINDS[kind].train(text, vocab_size)


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer that lies in a folder, whichever kind it is."""
    for kind in KINDS.values():
        if (folder / kind.file).exists():
            return kind.load(folder)
    raise InputError(f"no tokenizer in {folder}: expected {' or '.join(kind.file for kind in KINDS.values())}")

"""Text ↔ token ids: sentencepiece subwords, whole words as in WikiText, and the tokenizers of imported models."""

import functools
import io
import json
import os
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, SupportsIndex, runtime_checkable

import sentencepiece

from t2r.data.byte_pairs import BytePairs
from t2r.errors import InputError, unknown
from t2r.extras import require
from t2r.files import read_file, read_json

_CACHED_WORDS = 2**16  # words whose subwords are remembered: most of a text


COPY = "copy the tokenizer again"  # what to do about a damaged file


@runtime_checkable
class Tokenizer(Protocol):
    """What all tokenizers have in common."""

    kind: str
    vocab_size: int
    end: int  # separates documents, so it precedes the first token of each; it also ends source sentences
    stop: int  # ends generation; -1: no token does
    start: int  # the first token of the decoder's input in translation
    begins: bool  # whether `end` must precede every prompt, because the model was always trained with it
    separator: str  # the string between a prompt and its continuation

    def encode(self, text: str) -> list[int]: ...
    def encode_document(self, text: str) -> list[int]: ...  # with its end token
    def decode(self, ids: Sequence[SupportsIndex]) -> str: ...
    def save(self, folder: Path) -> None: ...


def _processor(model: bytes) -> sentencepiece.SentencePieceProcessor:
    if not model:
        raise InputError(f"a sentencepiece model of 0 bytes has no pieces: {COPY}")
    return sentencepiece.SentencePieceProcessor(model_proto=model)


class SentencePiece:
    """Sentencepiece subwords with byte fallback for unknown characters. In documents, all white space is preserved.

    `begin` is the id that an imported model has seen before every document; None: those trained here have none.
    """

    kind, separator = "sentencepiece", ""
    file, ids_file = "tokenizer.model", "sentencepiece_ids.json"

    def __init__(self, model: bytes, begin: int | None = None):
        self._model, self._begin = model, _positive(begin)
        self._processor = _processor(model)
        self.vocab_size = self._processor.vocab_size()
        self.stop = self.start = self._processor.eos_id()
        self.begins, self.end = begin is not None, self.stop if begin is None else begin

    @classmethod
    def train(
        cls, text: str, vocab_size: int, *, sentences: bool = False, field: str = "data.vocab_size"
    ) -> "SentencePiece":
        """Trains byte-pair subwords. Ids are in order of falling frequency, which adaptive embeddings need.

        With `sentences`, one per line, sentencepiece's defaults hold: a space is put before the first word, extra
        white space is dropped. `field` is the field of the config that errors name.
        """
        model = io.BytesIO()
        preserve_white_space = dict(
            user_defined_symbols=["\n"],
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            add_dummy_prefix=False,
        )
        try:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=iter(line for line in text.splitlines() if line),
                model_writer=model,
                vocab_size=vocab_size,
                model_type="bpe",
                byte_fallback=True,
                normalization_rule_name="identity",
                character_coverage=0.9999,
                input_sentence_size=10_000_000,
                num_threads=os.cpu_count() or 1,
                minloglevel=2,
                **({} if sentences else preserve_white_space),
            )
        except RuntimeError as error:
            reason = " ".join(str(error).split())
            raise InputError(
                f"sentencepiece could not train {vocab_size} subwords on {len(text):,} characters: "
                + _size_advice(reason, field)
            ) from None
        return cls(model.getvalue())

    @classmethod
    def load(cls, folder: Path) -> "SentencePiece":
        ids = folder / cls.ids_file
        return cls((folder / cls.file).read_bytes(), **(_token_ids(ids) if os.path.lexists(ids) else {}))

    def encode(self, text: str) -> list[int]:
        return self._processor.encode(text)

    def encode_document(self, text: str) -> list[int]:
        return [*self.encode(text), *([self.stop] if self.begins else []), self.end]

    def decode(self, ids: Sequence[SupportsIndex]) -> str:
        return self._processor.decode([int(i) for i in ids])

    def tokens(self) -> list[str]:
        """The subwords, in the order of their ids."""
        return [self._processor.id_to_piece(i) for i in range(self.vocab_size)]

    def save(self, folder: Path) -> None:
        (folder / self.file).write_bytes(self._model)
        if self.begins:
            (folder / self.ids_file).write_text(json.dumps({"begin": self._begin}) + "\n")


def _size_advice(reason: str, field: str) -> str:
    """How to change the vocabulary size, from sentencepiece's message about it."""
    if most := re.search(r"too high .* <= (\d+)", reason):
        return f"the text has no more than {most[1]}; set --config.{field}={most[1]} or less, or give more text"
    if least := re.search(r"smaller than required_chars. \d+ vs (\d+)", reason):
        return f"bytes and characters alone are {least[1]}; set --config.{field}={least[1]} or more"
    return f"change --config.{field}, or the text ({reason})"


class Words:
    """Words separated by spaces, `<unk>` for unknown ones and `<eos>` at each line end, as WikiText is scored."""

    kind, separator, begins = "word", " ", False
    file = "vocabulary.txt"
    line_end = "<eos>"
    stop = -1  # `<eos>` ends only a line

    def __init__(self, words: list[str]):
        self._words = words
        self._ids = {word: i for i, word in enumerate(words)}
        self.vocab_size = len(words)
        self.end, self._unknown = self._ids[self.line_end], self._ids["<unk>"]
        self.start = self.end

    @classmethod
    def train(cls, text: str, vocab_size: int, **_: Any) -> "Words":
        """The `vocab_size` most frequent words (0: all), in order of falling frequency."""
        counts = Counter(text.split())
        counts["<eos>"] += text.count("\n")
        counts["<unk>"] += 1
        ordered = sorted(counts, key=lambda word: (-counts[word], word))
        special = ["<eos>", "<unk>"]
        words = ordered[: vocab_size or len(ordered)]
        missing = [word for word in special if word not in words]
        return cls(words[: len(words) - len(missing)] + missing)

    @classmethod
    def load(cls, folder: Path) -> "Words":
        return cls((folder / cls.file).read_text("utf-8").split("\n"))

    def encode(self, text: str) -> list[int]:
        ids = []
        for line in text.split("\n"):
            ids += [self._ids.get(word, self._unknown) for word in line.split()] + [self.end]
        return ids[:-1]  # the last line is unfinished: no `<eos>` yet

    def encode_document(self, text: str) -> list[int]:
        return self.encode(text if text.endswith("\n") else text + "\n")

    def unknown(self, ids) -> int:
        """The number of ids that are `<unk>`."""
        return sum(int(i) == self._unknown for i in ids)

    def decode(self, ids: Sequence[SupportsIndex]) -> str:
        return " ".join("\n" if i == self.end else self._words[i] for i in ids)

    def tokens(self) -> list[str]:
        """The words, in the order of their ids."""
        return list(self._words)

    def save(self, folder: Path) -> None:
        (folder / self.file).write_text("\n".join(self._words), "utf-8")


class FairseqWords(Words):
    """The dictionary of an imported fairseq language model: words, with `</s>` at each line end."""

    kind, file, line_end = "fairseq_word", "dictionary.txt", "</s>"


class FairseqSubwords:
    """The dictionary of an imported fairseq model with subwords; those that do not end a word end in `@@`.

    Text is tokenised into words by Moses' rules for `language`, then into subwords by the byte-pair `codes`. Without
    codes, the text must already be subwords separated by spaces.
    """

    kind, separator, begins = "fairseq_subword", " ", True
    file = "subwords.json"

    def __init__(self, words: list[str], codes: str | None = None, language: str | None = None):
        self._words, self._codes, self._language = words, codes, language
        self._ids = {word: i for i, word in enumerate(words)}
        self.vocab_size = len(words)
        self.end = self.stop = self.start = self._ids["</s>"]
        self.padding, self._unknown = self._ids["<pad>"], self._ids["<unk>"]
        self._hidden = {self._ids["<s>"], self.padding}
        self._split = functools.lru_cache(_CACHED_WORDS)(BytePairs(codes)) if codes else lambda word: [word]

    @classmethod
    def load(cls, folder: Path) -> "FairseqSubwords":
        return cls(**read_json(folder / cls.file, COPY))

    @functools.cached_property
    def _moses(self):
        moses = require("sacremoses", "translation")
        return moses.MosesTokenizer(self._language), moses.MosesDetokenizer(self._language)

    def encode(self, text: str) -> list[int]:
        ids = []
        for line in text.split("\n"):
            # Dashes are split off and special characters escaped, as in these models' training data.
            words = self._moses[0].tokenize(line, aggressive_dash_splits=True) if self._language else line.split()
            ids += [self._ids.get(piece, self._unknown) for word in words for piece in self._split(word)] + [self.end]
        return ids[:-1]

    def encode_document(self, text: str) -> list[int]:
        return [*self.encode(text.removesuffix("\n")), self.end]

    def decode(self, ids: Sequence[SupportsIndex]) -> str:
        pieces = ["\n" if i == self.end else self._words[i] for i in ids if i not in self._hidden]
        lines = f"{' '.join(pieces)} ".replace("@@ ", "").split("\n")
        return "\n".join(self._moses[1].detokenize(line.split()) if self._language else line.strip() for line in lines)

    def tokens(self) -> list[str]:
        """The subwords, in the order of their ids."""
        return list(self._words)

    def save(self, folder: Path) -> None:
        content = {"words": self._words, "codes": self._codes, "language": self._language}
        (folder / self.file).write_text(json.dumps(content, ensure_ascii=False), "utf-8")


class Hub:
    """The `tokenizer.json` of an imported Hugging Face model, with its special tokens.

    `begin` precedes every document (None: nothing does); `stop` and `other_stops` end generation. A translation starts
    with `start`, then `second` if there is one, and never has `padding`. `language` replaces the source language token
    of `tokenizer.json`. `chat_template` is the Jinja program that writes conversations, None if the model has none.
    """

    kind, separator = "hub", ""
    file, ids_file, template_file = "tokenizer.json", "tokenizer_ids.json", "chat_template.jinja"

    def __init__(
        self,
        content: str,
        begin: int | None,
        stop: int,
        start: int | None = None,
        other_stops: Sequence[int] = (),
        second: int | None = None,
        language: int | None = None,
        padding: int | None = None,
        chat_template: str | None = None,
    ):
        self.content, self._begin, self.chat_template = content, _positive(begin), chat_template
        self._tokens = require("tokenizers", "hub").Tokenizer.from_str(content)
        self.vocab_size = self._tokens.get_vocab_size()
        self.stop, self.begins, self.other_stops = stop, begin is not None, tuple(other_stops)
        self.end = stop if begin is None else begin
        self.start, self.second, self._language = stop if start is None else start, second, language
        self.padding = padding
        self._replaced = set() if language is None else set(languages(self._tokens).values())

    @classmethod
    def load(cls, folder: Path) -> "Hub":
        template = folder / cls.template_file
        template = read_file(template, COPY) if template.exists() else None
        return cls(read_file(folder / cls.file, COPY), **_token_ids(folder / cls.ids_file), chat_template=template)

    def encode(self, text: str) -> list[int]:
        return self._tokens.encode(text, add_special_tokens=False).ids

    def encode_document(self, text: str) -> list[int]:
        return [*self.encode(text), *([] if self.stop in (-1, self.end) else [self.stop]), self.end]

    def encode_source(self, text: str) -> list[int]:
        """A source sentence with the special tokens around it that the model was trained with."""
        return [self._language if i in self._replaced else i for i in self._tokens.encode(text).ids]

    def decode(self, ids: Sequence[SupportsIndex]) -> str:
        return self._tokens.decode([int(i) for i in ids])

    def piece(self, token: int) -> str:
        """A token as it stands in `tokenizer.json`, also a special one; "" if there is none with this id."""
        return (self._tokens.id_to_token(token) if token >= 0 else None) or ""

    def save(self, folder: Path) -> None:
        (folder / self.file).write_text(self.content, "utf-8")
        ids = {"begin": self._begin, "stop": self.stop, "start": self.start, "other_stops": self.other_stops}
        ids |= {"second": self.second, "language": self._language, "padding": self.padding}
        (folder / self.ids_file).write_text(json.dumps(ids) + "\n")
        if self.chat_template is not None:
            (folder / self.template_file).write_text(self.chat_template, "utf-8")


def languages(tokens) -> dict[str, int]:
    """The language tokens of a `tokenizer.json`, such as `en_XX` or NLLB's `eng_Latn`, and their ids."""
    special = [token.content for token in tokens.get_added_tokens_decoder().values() if token.special]
    pattern = "[a-z]{2,3}_([A-Z]{2}|[A-Z][a-z]{3})"
    return {name: tokens.token_to_id(name) for name in special if re.fullmatch(pattern, name)}


class Pieces:
    """Marian's and M2M-100's tokenizer: sentencepiece splits the text, a separate vocabulary maps the pieces to ids.

    In M2M-100 the token `language` precedes a source, and a translation starts with `</s>`, then `second`, its
    language; in Marian, without languages, it starts with `<pad>`.
    """

    kind, separator, begins = "pieces", "", False
    file, vocabulary_file, languages_file = "pieces.model", "pieces.json", "pieces_languages.json"

    def __init__(
        self, model: bytes, vocabulary: dict[str, int], language: int | None = None, second: int | None = None
    ):
        self._model, self._vocabulary = model, vocabulary
        self._language, self.second = language, second
        self._processor = _processor(model)
        self._pieces = {i: piece for piece, i in vocabulary.items()}
        self.vocab_size = max(vocabulary.values()) + 1
        self.end = self.stop = vocabulary["</s>"]
        self.padding, self._unknown = vocabulary["<pad>"], vocabulary["<unk>"]
        self.start = self.padding if language is None else self.stop
        named = {i for piece, i in vocabulary.items() if re.fullmatch("__[a-z]{2,3}__", piece)}  # M2M-100's languages
        self._hidden = {self.end, self.padding, *named}

    @classmethod
    def load(cls, folder: Path) -> "Pieces":
        languages = folder / cls.languages_file
        ids = _token_ids(languages, least=0) if languages.exists() else {}
        return cls((folder / cls.file).read_bytes(), _token_ids(folder / cls.vocabulary_file, least=0), **ids)

    def encode(self, text: str) -> list[int]:
        pieces = self._processor.encode(text, out_type=str)
        return [self._vocabulary.get(piece, self._unknown) for piece in pieces]

    def encode_document(self, text: str) -> list[int]:
        return [*self.encode(text), self.end]

    def encode_source(self, text: str) -> list[int]:
        """A source sentence with the special tokens around it that the model was trained with."""
        return [*([] if self._language is None else [self._language]), *self.encode(text), self.end]

    def decode(self, ids: Sequence[SupportsIndex]) -> str:
        pieces = [self._pieces.get(int(i), "<unk>") for i in ids if int(i) not in self._hidden]
        return "".join(pieces).replace("\u2581", " ").strip()

    def tokens(self) -> list[str]:
        """The pieces, in the order of their ids, which may have gaps."""
        return [self._pieces.get(i, f"<unused_{i}>") for i in range(self.vocab_size)]

    def save(self, folder: Path) -> None:
        (folder / self.file).write_bytes(self._model)
        (folder / self.vocabulary_file).write_text(json.dumps(self._vocabulary, ensure_ascii=False), "utf-8")
        if self._language is not None:
            ids = {"language": self._language, "second": self.second}
            (folder / self.languages_file).write_text(json.dumps(ids) + "\n")


def _positive(begin: int | None) -> int | None:
    if begin is not None and begin < 0:
        raise InputError(f"begin={begin} is not a token id: {COPY}")
    return begin


def _token_ids(path: Path, least: int = -1) -> dict[str, Any]:
    """The token ids in a JSON file: a whole number, a list of them, or null for each name."""
    content = read_json(path, COPY)
    for name, value in content.items():
        for number in value if isinstance(value, list) else [value]:
            if number is not None and (type(number) is not int or not least <= number < 2**31):
                raise InputError(f"{path}: {name}={number!r} is not a token id; {COPY}")
    return content


LEARNED = {kind.kind: kind for kind in (SentencePiece, Words)}
KINDS = (*LEARNED.values(), FairseqWords, FairseqSubwords, Hub, Pieces)


def train_tokenizer(kind: str, text: str, vocab_size: int, **options: Any) -> Tokenizer:
    """A tokenizer of this kind, trained on a text; `options` are those of `SentencePiece.train`."""
    if kind not in LEARNED:
        raise InputError(unknown("tokenizer", kind, LEARNED))
    return LEARNED[kind].train(text, vocab_size, **options)


def stop_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Tokens that end generation. If documents begin with `end`, another `end` starts a new one, so it is a stop."""
    begins = (tokenizer.end,) if tokenizer.begins else ()
    return tuple(dict.fromkeys((tokenizer.stop, *getattr(tokenizer, "other_stops", ()), *begins)))


def decoder_start_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    """The tokens that every translation starts with: one, or two in models that need a language token."""
    second = getattr(tokenizer, "second", None)
    return (tokenizer.start,) if second is None else (tokenizer.start, second)


def prompt_ids(tokenizer: Tokenizer, ids: list[int]) -> list[int]:
    """The prompt as model input: `end` is put first if the prompt is empty or the model needs it."""
    return [tokenizer.end, *ids] if tokenizer.begins or not ids else ids


def continuation_prefix(tokenizer: Tokenizer, last: int | None = None) -> list[int]:
    """Ids that `decode_after` needs for a continuation of the token `last`: those of a letter.

    Tokenizers such as Llama's drop the space before the first word of a text, which a continuation needs. There are no
    such ids after `end`, where a text begins, and for tokenizers that have a separator.
    """
    return [] if tokenizer.separator or last == tokenizer.end else tokenizer.encode("a")


def decode_after(tokenizer: Tokenizer, prefix: list[int], ids: Sequence[SupportsIndex]) -> str:
    """The text that these ids add to that of the prefix."""
    return tokenizer.decode([*prefix, *ids])[len(tokenizer.decode(prefix)) :]


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer in a folder; its file name tells its kind."""
    for kind in KINDS:
        if (folder / kind.file).exists():
            try:
                return kind.load(folder)
            except InputError as error:
                raise InputError(f"{folder / kind.file}: {error}") from None
            except Exception as error:  # libraries raise many kinds for a damaged file
                reason = " ".join(str(error).split())[:200] or type(error).__name__
                raise InputError(f"{folder / kind.file} is damaged ({reason}): {COPY}") from None
    raise InputError(f"no tokenizer in {folder}: expected {' or '.join(kind.file for kind in KINDS)}")


class TokenizerPair(NamedTuple):
    """The tokenizers of a translation model; they are one object if the vocabulary is joint."""

    source: Tokenizer
    target: Tokenizer

    @property
    def joint(self) -> bool:
        return self.source is self.target

    def encode_source(self, text: str) -> list[int]:
        """A source sentence with its end token."""
        if hasattr(self.source, "encode_source"):
            return self.source.encode_source(text)
        return [*self.source.encode(text), self.source.end]

    def encode_target(self, text: str) -> list[int]:
        """A target sentence with its start and stop tokens."""
        return [*decoder_start_ids(self.target), *self.target.encode(text), self.target.stop]

    def save(self, folder: Path) -> None:
        """Saves a joint tokenizer into the folder, two into its subfolders `source` and `target`."""
        if self.joint:
            return self.target.save(folder)
        for name, tokenizer in (("source", self.source), ("target", self.target)):
            (folder / name).mkdir()
            tokenizer.save(folder / name)


def same_tokens(one: Tokenizer | TokenizerPair, other: Tokenizer | TokenizerPair) -> bool:
    """Whether two models read text as the same tokens, judged by a sentence with many kinds of characters."""
    text = "The 3 quick foxes jump over 21 lazy dogs;\n\tzwölf Boxkämpfer."
    return _example(one, text) == _example(other, text)


def _example(tokenizer: Tokenizer | TokenizerPair, text: str) -> list[list[int]]:
    if isinstance(tokenizer, TokenizerPair):
        return [tokenizer.encode_source(text), tokenizer.encode_target(text)]
    return [tokenizer.encode_document(text)]


def load_pair(folder: Path) -> TokenizerPair:
    """The tokenizers in a translation model's folder."""
    if (folder / "source").is_dir():
        return TokenizerPair(load_tokenizer(folder / "source"), load_tokenizer(folder / "target"))
    joint = load_tokenizer(folder)
    return TokenizerPair(joint, joint)

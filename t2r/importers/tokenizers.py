"""The tokenizers that lie beside imported weights."""

import json
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer as Tokens

from t2r.console import say
from t2r.data.tokenizer import (
    FairseqSubwords,
    FairseqWords,
    Hub,
    Pieces,
    SentencePiece,
    Tokenizer,
    TokenizerPair,
    languages,
)
from t2r.errors import InputError, raise_all
from t2r.model.config import ModelConfig


class Languages(NamedTuple):
    """Those that a model of many is to translate from and into, such as `en_XX`; None: as its own files say."""

    source: str | None = None
    target: str | None = None


def find_tokenizer(
    folder: Path, config: dict[str, Any], *, translates: bool, chosen: Languages = Languages()
) -> Tokenizer | TokenizerPair:
    """A directory's tokenizer, of whichever kind; for a translation model, both."""
    is_hub = not (folder / "source.spm").exists() and translates
    if any(chosen) and not is_hub:
        raise InputError(f"{folder} is no model of many languages: leave --source_language and --target_language out")
    if (folder / "source.spm").exists():
        return marian(folder)
    if not (folder / "tokenizer.json").exists() and (folder / "tokenizer.model").exists() and not translates:
        return SentencePiece.load_file(folder / "tokenizer.model")
    tokenizer = hub(folder, config, chosen if translates else None)
    return TokenizerPair(tokenizer, tokenizer) if translates else tokenizer


def hub(folder: Path, config: dict[str, Any], chosen: Languages | None = None) -> Hub:
    """tokenizer.json, or the two files that GPT-2 had before there was one; if it translates, with the languages."""
    if (folder / "tokenizer.json").exists():
        content = (folder / "tokenizer.json").read_text("utf-8")
    elif (folder / "vocab.json").exists() and (folder / "merges.txt").exists():
        from tokenizers.implementations import ByteLevelBPETokenizer

        content = ByteLevelBPETokenizer(str(folder / "vocab.json"), str(folder / "merges.txt")).to_str()
    else:
        files = "tokenizer.json, tokenizer.model, or vocab.json and merges.txt"
        raise InputError(f"no tokenizer in {folder}: expected {files}")
    ids = {**config, **_json(folder / "generation_config.json")}
    stops = ids.get("eos_token_id")
    stops = stops if isinstance(stops, list) else [-1 if stops is None else stops]
    # Some put a beginning before every text, which others know of and never use.
    tokens = Tokens.from_str(content)
    begin = ids.get("bos_token_id")
    begin = begin if tokens.encode("a").ids[:1] == [begin] else None
    if chosen is None:
        return Hub(content, begin, stops[0], None, stops[1:])
    start, second = ids.get("decoder_start_token_id"), ids.get("forced_bos_token_id")
    known = languages(tokens)
    source, target = _language_ids(known, chosen)
    if start in known.values():  # it says the language, too
        start = start if target is None else target
    elif target is not None:
        second = target
    elif len(known) > 1 and second is None:
        say(f"{folder} knows {len(known)} languages; which it translates into, the text decides: or --target_language")
    return Hub(content, begin, stops[0], start, stops[1:], second, source)


def _language_ids(known: dict[str, int], chosen: Languages) -> tuple[int | None, int | None]:
    problems = [
        f"--{side}_language={name}: {'choose one of ' + ', '.join(known) if known else 'the model names no languages'}"
        for side, name in zip(chosen._fields, chosen)
        if name is not None and name not in known
    ]
    raise_all("no such language:", problems)
    return known.get(chosen.source), known.get(chosen.target)


def marian(folder: Path) -> TokenizerPair:
    """Two sentencepiece models and a vocabulary, of both languages or of each."""
    found = _json(folder / "vocab.json")
    missing = [name for name in ("</s>", "<pad>", "<unk>") if name not in found]
    if missing:
        raise InputError(f"{folder / 'vocab.json'} has no {', '.join(missing)}")
    target = _json(folder / "target_vocab.json") or found
    sides = Pieces((folder / "source.spm").read_bytes(), found), Pieces((folder / "target.spm").read_bytes(), target)
    return TokenizerPair(*sides)


def fairseq(folder: Path, settings: dict[str, Any], config: ModelConfig) -> Tokenizer | TokenizerPair:
    """fairseq's dictionaries, with the byte-pair codes that may lie beside them."""
    if settings.get("bpe") not in (None, "subword_nmt", "fastbpe"):
        raise InputError(f"bpe={settings['bpe']!r} cannot be read: subword_nmt and fastbpe can")
    found = [folder / name for name in ("bpecodes", "code") if (folder / name).exists()]
    codes = _text(found[0]) if found else None
    uses_moses = codes is not None and settings.get("tokenizer") in (None, "moses")
    if not config.encoder_layers:
        words = dictionary(folder / "dict.txt", config.vocab_size)
        # Language models do not say what language they are of; Moses' rules differ in little but abbreviations.
        return FairseqSubwords(words, codes, "en" if uses_moses else None) if codes else FairseqWords(words)
    if codes is None:
        say(f"no bpecodes in {folder}: texts to translate must come in the model's own subwords, spaces between them")
    sides = []
    for side, size in (("source", config.source_vocab_size), ("target", config.vocab_size)):
        language = settings.get(f"{side}_lang")
        if not language:
            raise InputError(f"the checkpoint has no {side}_lang: it does not say which dictionary is which")
        words = dictionary(folder / f"dict.{language}.txt", size)
        sides.append(FairseqSubwords(words, codes, language if uses_moses else None))
    return TokenizerPair(*sides)


def dictionary(path: Path, size: int) -> list[str]:
    """The words of a fairseq dictionary, `word count` a line, after the four that all of them have."""
    words, problems = ["<s>", "<pad>", "</s>", "<unk>"], []
    known = set(words)
    for number, line in enumerate(_text(path).removesuffix("\n").split("\n"), 1):
        # A word may come again, and then replaces the one before it, which keeps its number.
        again = line.rstrip().endswith(" #fairseq:overwrite")
        word, _, count = line.rstrip().removesuffix(" #fairseq:overwrite").rpartition(" ")
        if not count.isdigit():
            problems.append(f"line {number} is {line!r}, not a word and its count")
        elif word in known and not again:
            problems.append(f"line {number}: {word!r} is there already")
        words.append(word)
        known.add(word)
    raise_all(f"{path} is no fairseq dictionary:", problems[:10])
    if len(words) != size:
        raise InputError(
            f"{path} has {len(words):,} words, four of all dictionaries included, and the model's embedding {size:,}: "
            "it is the vocabulary of another model"
        )
    return words


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except FileNotFoundError:
        raise InputError(f"no {path}: it belongs beside the checkpoint") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text: byte {error.start}") from None


def _json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text("utf-8")) if path.exists() else {}

"""Reads the tokenizer files beside imported weights."""

from pathlib import Path
from typing import Any, NamedTuple

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
from t2r.extras import require
from t2r.files import read_json
from t2r.model.config import ModelConfig

M2M100_FILE = "sentencepiece.bpe.model"


class Languages(NamedTuple):
    """The languages a multilingual model translates from and into, such as `en_XX`; None: as its own files say."""

    source: str | None = None
    target: str | None = None


def find_tokenizer(
    folder: Path, config: dict[str, Any], *, translates: bool, chosen: Languages = Languages()
) -> Tokenizer | TokenizerPair:
    """The tokenizer of a Hugging Face directory; for a translation model, those of source and target."""
    if any(chosen) and ((folder / "source.spm").exists() or not translates):
        raise InputError(f"{folder} is not a multilingual model: leave out --source_language and --target_language")
    if (folder / "source.spm").exists():
        return marian(folder)
    if not (folder / "tokenizer.json").exists() and (folder / M2M100_FILE).exists() and translates:
        tokenizer = m2m100(folder, chosen)
        return TokenizerPair(tokenizer, tokenizer)
    if not (folder / "tokenizer.json").exists() and (folder / "tokenizer.model").exists() and not translates:
        return sentencepiece(folder, config)
    tokenizer = hub(folder, config, chosen if translates else None)
    return TokenizerPair(tokenizer, tokenizer) if translates else tokenizer


def sentencepiece(folder: Path, config: dict[str, Any]) -> SentencePiece:
    """Reads tokenizer.model, of a directory without tokenizer.json; by default such tokenizers put BOS in front."""
    model = (folder / "tokenizer.model").read_bytes()
    adds_bos = _json(folder / "tokenizer_config.json").get("add_bos_token", True)
    return SentencePiece(model, config.get("bos_token_id") if adds_bos else None)


def hub(folder: Path, config: dict[str, Any], chosen: Languages | None = None) -> Hub:
    """Reads tokenizer.json, or GPT-2's older vocab.json and merges.txt; `chosen` is for translation models."""
    if (folder / "tokenizer.json").exists():
        content = (folder / "tokenizer.json").read_text("utf-8")
    elif (folder / "vocab.json").exists() and (folder / "merges.txt").exists():
        implementations = require("tokenizers.implementations", "hub")
        content = implementations.ByteLevelBPETokenizer(str(folder / "vocab.json"), str(folder / "merges.txt")).to_str()
    else:
        files = "tokenizer.json, tokenizer.model, or vocab.json and merges.txt"
        raise InputError(f"no tokenizer in {folder}: expected {files}")
    ids = {**config, **_json(folder / "generation_config.json")}
    stops = ids.get("eos_token_id")
    stops = stops if isinstance(stops, list) else [-1 if stops is None else stops]
    # Some tokenizers put bos_token_id before every document; others define it and never use it.
    try:
        tokens = require("tokenizers", "hub").Tokenizer.from_str(content)
    except InputError:
        raise
    except Exception as error:  # the library raises nothing more specific
        raise InputError(f"{folder / 'tokenizer.json'} is damaged ({error}): copy it again") from None
    begin = ids.get("bos_token_id")
    begin = begin if tokens.encode("a").ids[:1] == [begin] else None
    if chosen is None:
        return Hub(content, begin, stops[0], None, stops[1:], chat_template=chat_template(folder))
    start, second = ids.get("decoder_start_token_id"), ids.get("forced_bos_token_id")
    available = languages(tokens)
    source, target = _language_ids(available, chosen)
    if config.get("model_type") == "m2m_100":  # NLLB: the template of tokenizer.json may have another order of tokens
        content = _source_template(tokens, chosen.source or _default_source(folder, available), stops[0])
    if start in available.values():  # the start token is the language token
        start = start if target is None else target
    elif target is not None:
        second = target
    elif len(available) > 1 and second is None:
        say(f"{folder} has {len(available)} languages: without --target_language the model chooses")
    return Hub(content, begin, stops[0], start, stops[1:], second, source, ids.get("pad_token_id"))


def chat_template(folder: Path) -> str | None:
    """The template of conversations: in a file of its own, or in tokenizer_config.json, where there may be several."""
    if (folder / Hub.template_file).is_file():
        return _text(folder / Hub.template_file)
    stored = _json(folder / "tokenizer_config.json").get("chat_template")
    if isinstance(stored, list):
        named = {item.get("name"): item.get("template") for item in stored if isinstance(item, dict)}
        stored = named.get("default")
    return stored if isinstance(stored, str) else None


def _default_source(folder: Path, available: dict[str, int]) -> str:
    """The source language in NLLB's tokenizer_config.json, or English, as in transformers."""
    name = _json(folder / "tokenizer_config.json").get("src_lang") or "eng_Latn"
    if name not in available:
        raise InputError(f"{folder} has no language {name!r}: give --source_language")
    return name


def _source_template(tokens: Any, language: str, end: int) -> str:
    """The `tokenizer.json` that puts the language before a source and the end token after it."""
    names = {language: tokens.token_to_id(language), tokens.id_to_token(end): end}
    template = require("tokenizers.processors", "hub").TemplateProcessing
    before, after = names
    tokens.post_processor = template(single=f"{before} $A {after}", special_tokens=[*names.items()])
    return tokens.to_str()


def _language_ids(available: dict[str, int], chosen: Languages) -> tuple[int | None, int | None]:
    problems = [
        f"--{side}_language={name}: {'choose from ' + ', '.join(available) if available else 'the model has none'}"
        for side, name in zip(chosen._fields, chosen)
        if name is not None and name not in available
    ]
    raise_all("no such language:", problems)
    return available.get(chosen.source), available.get(chosen.target)


def marian(folder: Path) -> TokenizerPair:
    """Marian's two sentencepiece models, with one vocabulary for both languages or one for each."""
    vocabulary = _json(folder / "vocab.json")
    missing = [name for name in ("</s>", "<pad>", "<unk>") if name not in vocabulary]
    if missing:
        raise InputError(f"{folder / 'vocab.json'} has no {', '.join(missing)}")
    target = _json(folder / "target_vocab.json") or vocabulary
    return TokenizerPair(
        Pieces((folder / "source.spm").read_bytes(), vocabulary), Pieces((folder / "target.spm").read_bytes(), target)
    )


def m2m100(folder: Path, chosen: Languages) -> Pieces:
    """M2M-100's sentencepiece model and vocabulary, which its languages (`en`, as the token `__en__`) follow."""
    vocabulary = _json(folder / "vocab.json")
    tokens = _json(folder / "special_tokens_map.json").get("additional_special_tokens", [])
    tokens = [token["content"] if isinstance(token, dict) else token for token in tokens]
    missing = [name for name in ("</s>", "<pad>", "<unk>") if name not in vocabulary]
    missing = [f"{folder / 'vocab.json'} has no {name}" for name in missing]
    if not tokens:
        name = folder / "special_tokens_map.json"
        missing.append(
            f"there is no {name} with additional_special_tokens, the languages (transformers 5 does not write it: copy "
            "the one of the original model)"
        )
    raise_all("the tokenizer is not complete:", missing)
    first = max(vocabulary.values()) + 1
    vocabulary |= {token: first + i for i, token in enumerate(tokens) if token not in vocabulary}
    if None in chosen:
        raise InputError(f"{folder} has {len(tokens)} languages: give --source_language and --target_language")
    source, target = _language_ids({token.strip("_"): vocabulary[token] for token in tokens}, chosen)
    return Pieces((folder / M2M100_FILE).read_bytes(), vocabulary, source, target)


def fairseq(folder: Path, settings: dict[str, Any], config: ModelConfig) -> Tokenizer | TokenizerPair:
    """fairseq's dictionaries, with the byte-pair codes if there are any beside them."""
    if settings.get("bpe") not in (None, "subword_nmt", "fastbpe"):
        raise InputError(f"bpe={settings['bpe']!r} is not supported: only subword_nmt and fastbpe are")
    codes_files = [folder / name for name in ("bpecodes", "code") if (folder / name).exists()]
    codes = _text(codes_files[0]) if codes_files else None
    uses_moses = codes is not None and settings.get("tokenizer") in (None, "moses")
    if not config.encoder_layers:
        words = dictionary(folder / "dict.txt", config.vocab_size)
        # A language model does not name its language; Moses' rules differ little between languages, mostly in
        # abbreviations.
        return FairseqSubwords(words, codes, "en" if uses_moses else None) if codes else FairseqWords(words)
    if codes is None:
        say(f"no bpecodes in {folder}: sources must already be the model's subwords, separated by spaces")
    sides = []
    for side, size in (("source", config.source_vocab_size), ("target", config.vocab_size)):
        language = settings.get(f"{side}_lang")
        if not language:
            raise InputError(f"the checkpoint has no {side}_lang, which names its dictionary: it cannot be imported")
        words = dictionary(folder / f"dict.{language}.txt", size)
        sides.append(FairseqSubwords(words, codes, language if uses_moses else None))
    return TokenizerPair(*sides)


def dictionary(path: Path, size: int) -> list[str]:
    """The words of a fairseq dictionary, one `word count` per line, after the four special ones that all have."""
    words, problems = ["<s>", "<pad>", "</s>", "<unk>"], []
    unique = set(words)
    for number, line in enumerate(_text(path).removesuffix("\n").split("\n"), 1):
        # A word marked as overwrite may repeat an earlier one, which keeps its id.
        overwrites = line.rstrip().endswith(" #fairseq:overwrite")
        word, _, count = line.rstrip().removesuffix(" #fairseq:overwrite").rpartition(" ")
        if not count.isdigit():
            problems.append(f"line {number} is {line!r}, not a word and its count")
        elif word in unique and not overwrites:
            problems.append(f"line {number}: {word!r} is a duplicate")
        words.append(word)
        unique.add(word)
    raise_all(f"{path} is not a fairseq dictionary:", problems[:10])
    if len(words) != size:
        raise InputError(
            f"{path} has {len(words):,} words, the four special ones included, and the model's embedding {size:,}: "
            "it is the vocabulary of another model"
        )
    return words


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except FileNotFoundError:
        raise InputError(f"{path} is missing: put it beside the checkpoint") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text: byte {error.start}") from None


def _json(path: Path) -> dict[str, Any]:
    return read_json(path, "copy it again") if path.exists() else {}

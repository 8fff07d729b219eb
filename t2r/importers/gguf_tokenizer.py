"""The tokenizer of a GGUF file, as a `tokenizer.json`."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from t2r.data.tokenizer import Hub
from t2r.errors import InputError, raise_all
from t2r.extras import require

PREFIX = "tokenizer.ggml."
NORMAL, CONTROL, USER_DEFINED, BYTE = 1, 3, 4, 6  # types of tokens; control and user-defined ones are never split
STOPS = ("eos_token_id", "eot_token_id", "eom_token_id")  # ends of a text, a turn, and a message
ALWAYS_READ = {"model", "bos_token_id", "unknown_token_id", "add_bos_token", *STOPS}
# Keys that change nothing here: token ids for other uses, and whether an end token follows a text, which t2r decides.
HARMLESS = {
    "padding_token_id", "seperator_token_id", "mask_token_id", "prefix_token_id", "suffix_token_id", "middle_token_id",
    "fim_pre_token_id", "fim_suf_token_id", "fim_mid_token_id", "fim_pad_token_id", "fim_rep_token_id",
    "fim_sep_token_id", "cls_token_id", "add_eos_token", "add_sep_token",
}  # fmt: skip
WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


class Splitting(NamedTuple):
    """How a byte-level tokenizer cuts a text before its merges: `pattern`, or GPT-2's (empty)."""

    pattern: str = ""
    single_digits: bool = False  # every digit is split off first
    composed: bool = False  # characters are composed first (Unicode's NFC)
    whole_words: bool = False  # a word in the vocabulary is one token, even if no merges lead to it
    adds_bos: bool = False  # where the file does not say


LLAMA3 = Splitting(rf"{WORDS}|\p{{N}}{{1,3}}|{REST}", whole_words=True, adds_bos=True)
SPLITTINGS = {
    "gpt-2": Splitting(),
    "smollm": Splitting(single_digits=True),
    "llama-bpe": LLAMA3, "llama3": LLAMA3, "llama-v3": LLAMA3,
    "qwen2": Splitting(rf"{WORDS}|\p{{N}}|{REST}", composed=True),
}  # fmt: skip


def read(metadata: dict[str, Any], vocab_size: int, path: Path) -> Hub:
    """The tokenizer in a file's metadata, for a model with `vocab_size` embeddings."""
    given = {key.removeprefix(PREFIX): value for key, value in metadata.items() if key.startswith(PREFIX)}
    kind = given.get("model")
    if kind not in KINDS:
        raise InputError(f"{path}: {PREFIX}model={kind!r} is not supported: only {', '.join(KINDS)}")
    build, lists, others = KINDS[kind]
    unknown = sorted(given.keys() - ALWAYS_READ - HARMLESS - {*lists, *others})
    raise_all(f"{path}:", [f"{PREFIX}{key}={str(given[key])[:80]} is unknown" for key in unknown])
    raise_all(f"{path} has no valid tokenizer:", _problems(given, lists, vocab_size))
    library = require("tokenizers", "hub")
    try:
        tokens, adds_bos = build(library, given)
        begin = given.get("bos_token_id") if given.get("add_bos_token", adds_bos) else None
        if begin is not None:
            bos = given["tokens"][begin]
            template = library.processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, begin)])
            tokens.post_processor = template
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    except Exception as error:  # tokenizers raises plain exceptions, such as for a merge of unknown tokens
        raise InputError(f"{path} has no valid tokenizer ({error}): convert the model again") from None
    stops = list(dict.fromkeys(given[key] for key in STOPS if key in given)) or [-1]
    template = metadata.get("tokenizer.chat_template")
    template = template if isinstance(template, str) else None
    return Hub(tokens.to_str(), begin, stops[0], None, stops[1:], chat_template=template)


def _problems(given: dict[str, Any], lists: tuple[str, ...], vocab_size: int) -> list[str]:
    problems = [f"{PREFIX}{key} is missing" for key in lists if not isinstance(given.get(key), list)]
    if problems:
        return problems
    tokens = given["tokens"]
    if len(tokens) > vocab_size:
        problems.append(f"{len(tokens):,} tokens, and the model has {vocab_size:,} embeddings")
    if len(set(tokens)) < len(tokens):
        problems.append(f"{len(tokens) - len(set(tokens)):,} tokens appear twice")
    for key in lists:
        if key != "merges" and len(given[key]) != len(tokens):
            problems.append(f"{PREFIX}{key} has {len(given[key]):,} entries for {len(tokens):,} tokens")
    ids = {key: given[key] for key in ("bos_token_id", "unknown_token_id", *STOPS) if key in given}
    return problems + [f"{PREFIX}{key}={i!r} is no token" for key, i in ids.items() if i not in range(len(tokens))]


def byte_level(library: ModuleType, given: dict[str, Any]) -> tuple[Any, bool]:
    """Byte pairs over bytes, as GPT-2 has them, and whether a text begins with BOS by default."""
    name = given.get("pre")
    if name not in SPLITTINGS:
        raise InputError(f"{PREFIX}pre={name!r} is not supported: only {', '.join(SPLITTINGS)}")
    splitting, cut = SPLITTINGS[name], library.pre_tokenizers
    # A merge is written as two tokens with a space between; the first character is never that space.
    merges = [(merge[:space], merge[space + 1 :]) for merge in given["merges"] for space in [merge.find(" ", 1)]]
    vocabulary = {token: i for i, token in enumerate(given["tokens"])}
    model = library.models.BPE(vocabulary, merges, ignore_merges=splitting.whole_words)
    tokens = library.Tokenizer(model)
    steps = [cut.Digits(individual_digits=True)] if splitting.single_digits else []
    if splitting.pattern:
        steps.append(cut.Split(library.Regex(splitting.pattern), "isolated"))
    steps.append(cut.ByteLevel(add_prefix_space=False, use_regex=not splitting.pattern))
    tokens.pre_tokenizer = cut.Sequence(steps)
    tokens.normalizer = library.normalizers.NFC() if splitting.composed else None
    tokens.decoder = library.decoders.ByteLevel()
    return _with_special(library, tokens, given), splitting.adds_bos


def sentencepiece(library: ModuleType, given: dict[str, Any]) -> tuple[Any, bool]:
    """Sentencepiece's byte pairs, whose merges follow from the scores of the tokens; a text begins with BOS."""
    names, types = given["tokens"], given["token_type"]
    vocabulary = {token: i for i, token in enumerate(names)}
    unknown = given.get("unknown_token_id")
    model = library.models.BPE(
        vocabulary,
        merges_by_score(names, given["scores"], types),
        unk_token=None if unknown is None else names[unknown],
        fuse_unk=True,
        byte_fallback=BYTE in types,
    )
    tokens = library.Tokenizer(model)
    space, prefixed = "▁", given.get("add_space_prefix", True)
    replaced = library.normalizers.Replace(" ", space)
    before = [library.normalizers.Prepend(space)] if prefixed else []
    tokens.normalizer = library.normalizers.Sequence([*before, replaced])
    decoders = library.decoders
    after = [decoders.Strip(" ", 1, 0)] if prefixed else []
    tokens.decoder = decoders.Sequence([decoders.Replace(space, " "), decoders.ByteFallback(), decoders.Fuse(), *after])
    return _with_special(library, tokens, given), True


def merges_by_score(names: list[str], scores: list[float], types: list[int]) -> list[tuple[str, str]]:
    """Every way to make a normal token of two others; tokens with higher scores come first."""
    ids = {token: i for i, token in enumerate(names)}
    merges = []
    for i in sorted(range(len(names)), key=lambda i: -scores[i]):
        if types[i] == NORMAL:
            halves = [(names[i][:end], names[i][end:]) for end in range(1, len(names[i]))]
            known = [pair for pair in halves if pair[0] in ids and pair[1] in ids]
            merges += sorted(known, key=lambda pair: (ids[pair[0]], ids[pair[1]]))
    return merges


def _with_special(library: ModuleType, tokens: Any, given: dict[str, Any]) -> Any:
    """Adds the tokens that are never split."""
    tokens.add_tokens([
        library.AddedToken(token, special=kind == CONTROL, normalized=False)
        for token, kind in zip(given["tokens"], given["token_type"])
        if kind in (CONTROL, USER_DEFINED)
    ])  # fmt: skip
    return tokens


# For each tokenizer.ggml.model its reader, the lists that it needs, and other keys that it may have, some without
# effect.
KINDS: dict[str, tuple[Callable, tuple[str, ...], tuple[str, ...]]] = {
    "gpt2": (byte_level, ("tokens", "token_type", "merges"), ("pre", "scores", "add_space_prefix")),
    "llama": (sentencepiece, ("tokens", "token_type", "scores"), ("pre", "merges", "add_space_prefix")),
}

"""The tokenizers that lie beside imported weights."""

import json
from pathlib import Path
from typing import Any

from t2r.data.tokenizer import Hub, Pieces, SentencePiece, Tokenizer, TokenizerPair
from t2r.errors import InputError


def read(folder: Path, config: dict[str, Any], *, translates: bool) -> Tokenizer | TokenizerPair:
    """A directory's tokenizer, of whichever kind; for a translation model, both."""
    if (folder / "source.spm").exists():
        return marian(folder)
    if not (folder / "tokenizer.json").exists() and (folder / "tokenizer.model").exists() and not translates:
        return SentencePiece.load_file(folder / "tokenizer.model")
    tokenizer = hub(folder, config)
    return TokenizerPair(tokenizer, tokenizer) if translates else tokenizer


def hub(folder: Path, config: dict[str, Any]) -> Hub:
    """tokenizer.json, or the two files that GPT-2 had before there was one."""
    if (folder / "tokenizer.json").exists():
        content = (folder / "tokenizer.json").read_text("utf-8")
    elif (folder / "vocab.json").exists() and (folder / "merges.txt").exists():
        from tokenizers.implementations import ByteLevelBPETokenizer

        content = ByteLevelBPETokenizer(str(folder / "vocab.json"), str(folder / "merges.txt")).to_str()
    else:
        files = "tokenizer.json, tokenizer.model, or vocab.json and merges.txt"
        raise InputError(f"no tokenizer in {folder}: expected {files}")
    ids = {**config, **_json(folder / "generation_config.json")}
    stop = _first(ids.get("eos_token_id"))
    # Some put a beginning before every text, which others know of and never use.
    begins = _begins(content, ids.get("bos_token_id"))
    start = ids.get("decoder_start_token_id", config.get("decoder_start_token_id"))
    return Hub(content, ids["bos_token_id"] if begins else None, -1 if stop is None else stop, start)


def marian(folder: Path) -> TokenizerPair:
    """Two sentencepiece models and a vocabulary, of both languages or of each."""
    found = _json(folder / "vocab.json")
    missing = [name for name in ("</s>", "<pad>", "<unk>") if name not in found]
    if missing:
        raise InputError(f"{folder / 'vocab.json'} has no {', '.join(missing)}")
    target = _json(folder / "target_vocab.json") or found
    sides = Pieces((folder / "source.spm").read_bytes(), found), Pieces((folder / "target.spm").read_bytes(), target)
    return TokenizerPair(*sides)


def _begins(content: str, begin: int | None) -> bool:
    """Whether a text with special tokens begins with this one."""
    from tokenizers import Tokenizer as Tokens

    ids = Tokens.from_str(content).encode("a").ids
    return begin is not None and bool(ids) and ids[0] == begin


def _first(value: int | list[int] | None) -> int | None:
    return value[0] if isinstance(value, list) else value


def _json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text("utf-8")) if path.exists() else {}

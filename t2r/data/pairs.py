"""Sentence pairs from data specs: `pairs:SRC,TGT`, `tsv:PATH`, `builtin:numbers-en-de` and `tfds:NAME,SRC,TGT`.

` + ` between specs joins their data. Pairs are assigned to splits by their source; TFDS data has its own splits.
"""

import functools
import random
import zlib
from collections.abc import Sequence
from pathlib import Path

from t2r.data.sources import check_split, read_text, split_spec, table_columns
from t2r.errors import InputError
from t2r.extras import require

Pair = tuple[str, str]
USAGE = (
    "builtin:numbers-en-de, pairs:SOURCE_FILE,TARGET_FILE, tsv:FILE[,SOURCE_COLUMN,TARGET_COLUMN] (.gz too), or "
    "tfds:NAME,SOURCE_LANGUAGE,TARGET_LANGUAGE"
)


def is_pairs(spec: str) -> bool:
    """Whether a data spec names sentence pairs; otherwise it names text."""
    if len(split_spec(spec)) > 1:
        return any(is_pairs(part) for part in split_spec(spec))
    kind, _, name = spec.partition(":")
    return kind in ("pairs", "tsv") or spec == "builtin:numbers-en-de" or (kind == "tfds" and "," in name)


def load_pairs(spec: str, split: str) -> Sequence[Pair]:
    """The (source, target) pairs of a split; `all` is all three splits.

    Files are loaded at once; pairs with an empty side are left out. TFDS data is read pair by pair, unfiltered.
    """
    check_split(split)
    if len(split_spec(spec)) > 1:
        return [pair for part in split_spec(spec) for pair in load_pairs(part, split)]
    kind, _, name = spec.partition(":")
    if kind == "tfds" and name.count(",") == 2:
        from t2r.data.tfds_source import open_split

        name, *languages = name.split(",")
        return open_split(name, split, languages, lambda example: tuple(example[side].strip() for side in languages))
    if spec == "builtin:numbers-en-de":
        pairs = number_pairs()
    elif kind == "pairs" and name.count(",") == 1:
        pairs = read_two_files(*map(Path, name.split(",")))
    elif kind == "tsv" and name:
        pairs = read_table(name)
    else:
        raise InputError(f"unknown data {spec!r}: use {USAGE}")
    chosen = [(source, target) for source, target in pairs if source and target]
    if split != "all":
        chosen = [pair for pair in chosen if split_of(pair[0]) == split]
    if not chosen:
        raise InputError(
            f"{spec} has no {split} pairs: none of its {len(pairs):,} lines has both sides and falls into that split"
        )
    return chosen


def split_of(source: str) -> str:
    """A pair's split, from a hash of its source: valid and test get 1 in 50 sources each.

    Sources that differ only in case, spaces or punctuation get the same split: no test source is also in training.
    """
    letters = "".join(filter(str.isalnum, source.casefold())) or source
    return {0: "valid", 1: "test"}.get(zlib.crc32(letters.encode()) % 50, "train")


def read_two_files(source: Path, target: Path) -> list[Pair]:
    """Pairs from two files, one sentence per line, where line i of one is the translation of line i of the other."""
    sides = [[line.strip() for line in _lines(path)] for path in (source, target)]
    if len(sides[0]) != len(sides[1]):
        raise InputError(
            f"{source} has {len(sides[0]):,} lines and {target} {len(sides[1]):,}: line i of one must translate "
            "line i of the other"
        )
    return list(zip(*sides))


def read_table(name: str) -> list[Pair]:
    """Pairs from a tab-separated file, PATH[,SOURCE_COLUMN,TARGET_COLUMN]; columns count from 1, by default 1 and 2."""
    path, *columns = table_columns(name)
    if not all(column.isdigit() and int(column) for column in columns):
        raise InputError(f"tsv:{name}: give two columns, counted from 1, as in tsv:{path},2,1")
    columns = [int(column) - 1 for column in columns] or [0, 1]
    pairs, too_short = [], []
    for number, line in enumerate(_lines(Path(path)), 1):
        cells = line.split("\t")
        if len(cells) > max(columns):
            pairs.append((cells[columns[0]].strip(), cells[columns[1]].strip()))
        elif line.strip():
            too_short.append(number)
    if too_short:
        raise InputError(
            f"{path} has lines with fewer than {max(columns) + 1} tab-separated columns: {len(too_short):,} of them, "
            f"the first is line {too_short[0]:,}"
        )
    return pairs


def _lines(path: Path) -> list[str]:
    # Not splitlines: it also splits at characters that other tools treat as spaces, and the two files would misalign.
    return read_text(path).removesuffix("\n").split("\n")


@functools.cache
def number_pairs(count: int = 30_000, digits: int = 6, seed: int = 0) -> list[Pair]:
    """`count` numbers spelled out in English and German, such as 'forty-two' and 'zweiundvierzig'.

    All numbers below 1000, then random ones without repetition, their lengths uniform from 4 to `digits` digits.
    """
    num2words = require("num2words", "translation").num2words

    rng = random.Random(seed)
    numbers = dict.fromkeys(range(1000))
    while len(numbers) < count:
        size = rng.randint(4, digits)
        numbers[rng.randrange(10 ** (size - 1), 10**size)] = None
    return [(num2words(number, lang="en"), num2words(number, lang="de")) for number in numbers]

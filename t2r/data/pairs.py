"""Where sentence pairs come from: `pairs:SRC,TGT`, `tsv:PATH`, `builtin:numbers-en-de`, split by source; `tfds:`.

Several are one if ` + ` stands between them.
"""

import functools
import random
import zlib
from collections.abc import Sequence
from pathlib import Path

from t2r.data.sources import SPLITS, read_text, split_spec
from t2r.errors import InputError

Pair = tuple[str, str]
USAGE = (
    "builtin:numbers-en-de, pairs:SOURCE_FILE,TARGET_FILE, tsv:FILE[,SOURCE_COLUMN,TARGET_COLUMN] (.gz too), or "
    "tfds:NAME,SOURCE_LANGUAGE,TARGET_LANGUAGE"
)


def is_pairs(spec: str) -> bool:
    """Whether a data spec names sentence pairs, and not text."""
    if len(split_spec(spec)) > 1:
        return any(is_pairs(part) for part in split_spec(spec))
    kind, _, name = spec.partition(":")
    return kind in ("pairs", "tsv") or spec == "builtin:numbers-en-de" or (kind == "tfds" and "," in name)


def load_pairs(spec: str, split: str) -> Sequence[Pair]:
    """The (source, target) pairs of a split; `all` is the three together. Of files, pairs with an empty side are left
    out; prepared data sets are read pair by pair, as they are."""
    if split not in (*SPLITS, "all"):
        raise InputError(f"unknown split {split!r}: choose one of {', '.join(SPLITS)}, all")
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
        raise InputError(f"{spec} has no {split} pairs: of {len(pairs):,} lines none has both sides and falls there")
    return chosen


def split_of(source: str) -> str:
    """A pair's split from its source alone: valid and test get 1 of 50 sources each.

    Sources that differ in case, spaces or punctuation only fall together: the test set holds nothing trained on.
    """
    letters = "".join(filter(str.isalnum, source.casefold())) or source
    return {0: "valid", 1: "test"}.get(zlib.crc32(letters.encode()) % 50, "train")


def read_two_files(source: Path, target: Path) -> list[Pair]:
    """Two files whose lines translate each other."""
    sides = [[line.strip() for line in _lines(path)] for path in (source, target)]
    if len(sides[0]) != len(sides[1]):
        raise InputError(
            f"{source} has {len(sides[0]):,} lines and {target} {len(sides[1]):,}: line by line they must translate "
            "each other"
        )
    return list(zip(*sides))


def read_table(name: str) -> list[Pair]:
    """A tab-separated file; columns are counted from 1, the first two unless others are named."""
    path, *columns = name.rsplit(",", 2) if name.count(",") >= 2 else [name]
    if not all(column.isdigit() and int(column) for column in columns):
        raise InputError(f"tsv:{name}: name two columns, counted from 1, as in tsv:{path},2,1")
    columns = [int(column) - 1 for column in columns] or [0, 1]
    pairs, short = [], []
    for number, line in enumerate(_lines(Path(path)), 1):
        cells = line.split("\t")
        if len(cells) > max(columns):
            pairs.append((cells[columns[0]].strip(), cells[columns[1]].strip()))
        elif line.strip():
            short.append(number)
    if short:
        raise InputError(
            f"{path} has lines with fewer than {max(columns) + 1} tab-separated columns: {len(short):,} of them, the "
            f"first is line {short[0]:,}"
        )
    return pairs


def _lines(path: Path) -> list[str]:
    # Not splitlines, which cuts at characters that other tools take for spaces: pairs would slip.
    return read_text(path).removesuffix("\n").split("\n")


@functools.cache
def number_pairs(count: int = 30_000, digits: int = 6, seed: int = 0) -> list[Pair]:
    """Numbers spelled out in English and German: 'forty-two' and 'zweiundvierzig', the digits in another order.

    All below a thousand, then as many of four digits as of five and of six; no number twice.
    """
    from num2words import num2words

    chance = random.Random(seed)
    numbers = dict.fromkeys(range(1000))
    while len(numbers) < count:
        size = chance.randint(4, digits)
        numbers[chance.randrange(10 ** (size - 1), 10**size)] = None
    return [(num2words(number, lang="en"), num2words(number, lang="de")) for number in numbers]

"""Where text comes from: `builtin:pydoc`, `text:PATH` and `tfds:NAME`, each in three splits that do not overlap.

Several are one if ` + ` stands between them.
"""

import ast
import functools
import gzip
import re
import sysconfig
import zlib
from pathlib import Path

from t2r.errors import InputError

SPLITS = ("train", "valid", "test")
# Parts of the standard library that are tests, demonstrations or vendored packages, and other people's packages.
_NOT_PROSE = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "ensurepip", "turtledemo"}


def load_documents(spec: str, split: str) -> list[str]:
    """The documents of a split; `all` is the three together. A file is one document, unless it says where they end."""
    if split not in (*SPLITS, "all"):
        raise InputError(f"unknown split {split!r}: choose one of {', '.join(SPLITS)}, all")
    if len(split_spec(spec)) > 1:
        return [document for part in split_spec(spec) for document in load_documents(part, split)]
    kind, _, name = spec.partition(":")
    if kind == "builtin" and name == "pydoc":
        return [text for name, text in pydoc_documents().items() if split in ("all", split_of(name))]
    if kind == "text" and name:
        return split_documents(split_text(read_text(Path(name)), split))
    if kind == "tfds" and name:
        from t2r.data.tfds_source import open_split

        return list(open_split(name, split, ["text"], lambda example: example["text"]))
    raise InputError(f"unknown data {spec!r}: use builtin:pydoc, text:PATH (.gz too) or tfds:NAME")


def split_spec(spec: str) -> list[str]:
    """The data that a spec adds up: `text:A + text:B`."""
    return [part.strip() for part in spec.split(" + ")]


def read_text(path: Path) -> str:
    """A UTF-8 text file, decompressed if its name ends in .gz. Empty, binary and broken files are errors."""
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except FileNotFoundError:
        raise InputError(f"no text file {path}: check the path") from None
    except IsADirectoryError:
        raise InputError(f"{path} is a folder: name one text file") from None
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"cannot read {path}: {error}; if it is a .gz, it may be cut short") from None
    if not data.strip():
        raise InputError(f"{path} is empty: it holds {len(data)} bytes and no text")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text: byte {error.start} is 0x{data[error.start]:02x}") from None
    if "\0" in text:
        raise InputError(f"{path} is binary: it has a NUL byte at {text.index(chr(0))}; give plain text")
    return text


def split_text(text: str, split: str) -> str:
    """The first 90% of a text's lines to train on, the next 5% to validate, the last 5% to test."""
    if split == "all":
        return text
    lines = text.splitlines(keepends=True)
    bounds = {"train": (0, 0.9), "valid": (0.9, 0.95), "test": (0.95, 1)}
    low, high = (round(bound * len(lines)) for bound in bounds[split])
    part = "".join(lines[low:high])
    if not part.strip():
        raise InputError(f"the text has {len(lines)} lines, too few for a {split} split: give a longer file")
    return part


def split_documents(text: str) -> list[str]:
    """A text that has lines `<|endoftext|>`, as many corpora do, is the documents between them, else one document."""
    parts = re.split(r"^<\|endoftext\|>[ \t\r]*$", text, flags=re.MULTILINE)
    if len(parts) == 1:
        return parts
    documents = [part.strip() for part in parts if part.strip()]
    if not documents:
        raise InputError("the text has lines <|endoftext|> and nothing between them: give a file with documents")
    return documents


def split_of(name: str) -> str:
    """A document's split, from its name alone, so that all Python versions agree: 14, 1 and 1 of 16."""
    bucket = zlib.crc32(f"pydoc:{name}".encode()) % 16
    return {0: "valid", 1: "test"}.get(bucket, "train")


@functools.cache
def pydoc_documents() -> dict[str, str]:
    """English prose that every CPython has: its documentation topics, and the standard library's docstrings.

    name → text, a document for each topic and each module, without paragraphs that occur in an earlier split.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError:
        topics = {}  # some distributions pack it apart; the docstrings remain
    documents = {f"topic/{name}": text.strip() for name, text in topics.items()}
    library = Path(sysconfig.get_path("stdlib"))
    for path in library.rglob("*.py"):
        relative = path.relative_to(library)
        if not _NOT_PROSE.intersection(relative.parts):
            documents[f"module/{relative.as_posix()}"] = "\n\n".join(_docstrings(path))
    if sum(map(len, documents.values())) < 200_000:
        raise InputError(
            f"this Python has almost no documentation in {library}: use a full CPython (on Debian, the packages "
            "python3 and libpython3-stdlib), or text:PATH"
        )
    return _without_repetitions(documents)


def _without_repetitions(documents: dict[str, str]) -> dict[str, str]:
    """Drops from each split the paragraphs, short ones apart, that a split before it has, and then empty documents."""
    seen, kept = set(), {}
    for split in SPLITS:
        members = {name: text.split("\n\n") for name, text in documents.items() if split_of(name) == split}
        for name, paragraphs in members.items():
            kept[name] = "\n\n".join(p for p in paragraphs if len(p.split()) < 10 or _key(p) not in seen)
        seen.update(_key(paragraph) for paragraphs in members.values() for paragraph in paragraphs)
    return {name: kept[name] for name in sorted(kept) if kept[name].strip()}


def _key(paragraph: str) -> str:
    return " ".join(paragraph.split())  # the same words may be indented or wrapped otherwise


def _docstrings(path: Path) -> list[str]:
    """A file's docstrings in order, read without importing it; nothing from files this Python cannot parse."""
    try:
        tree = ast.parse(path.read_text("utf-8"))
    except (SyntaxError, UnicodeDecodeError, ValueError):
        return []
    places = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    texts = (ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, places))
    return [text for text in texts if text and "\0" not in text]

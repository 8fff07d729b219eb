"""Text from data specs: `builtin:NAME`, `text:PATH` and `tfds:NAME`, each with three splits that do not overlap.

` + ` between specs joins their data.
"""

import ast
import functools
import gzip
import re
import sysconfig
import zlib
from pathlib import Path

from t2r.errors import InputError, unknown

SPLITS = ("train", "valid", "test")
# What the model builtin:stories wrote; stories.json, beside it, has the command.
STORIES = Path(__file__).with_name("stories.txt.gz")
# Directories of the standard library with tests, demonstrations or vendored and third-party packages.
_NOT_PROSE = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "ensurepip", "turtledemo"}

_LEAST_PROSE = 200_000  # characters; a full CPython has millions, a stripped one nearly none


def load_documents(spec: str, split: str) -> list[str]:
    """The documents of a split; `all` is all three. A file is one document unless it has `<|endoftext|>` lines."""
    check_split(split)
    if len(split_spec(spec)) > 1:
        return [document for part in split_spec(spec) for document in load_documents(part, split)]
    kind, _, name = spec.partition(":")
    if kind == "builtin" and name == "pydoc":
        return [text for name, text in pydoc_documents().items() if split in ("all", split_of(name))]
    if kind == "builtin" and name == "stories":
        stories = split_documents(read_text(STORIES))
        return [story for number, story in enumerate(stories) if split in ("all", _split_of_bucket(number % 16))]
    if kind == "text" and name:
        return split_documents(split_text(read_text(Path(name)), split))
    if kind == "tfds" and name:
        from t2r.data.tfds_source import open_split

        return list(open_split(name, split, ["text"], lambda example: example["text"]))
    raise InputError(f"unknown data {spec!r}: use builtin:stories, builtin:pydoc, text:PATH (.gz too) or tfds:NAME")


def check_split(split: str) -> None:
    """Refuses a name that is not that of a split."""
    if split not in (*SPLITS, "all"):
        raise InputError(unknown("split", split, [*SPLITS, "all"]))


def split_spec(spec: str) -> list[str]:
    """The specs that ` + ` joins: `text:A + text:B` → [`text:A`, `text:B`]."""
    return [part.strip() for part in spec.split(" + ")]


def files_of(spec: str) -> list[Path]:
    """The files that a spec names, whether or not they exist."""
    files = []
    for kind, _, names in (part.partition(":") for part in split_spec(spec)):
        if kind == "text":
            files.append(Path(names))
        elif kind == "tsv":
            files.append(Path(table_columns(names)[0]))
        elif kind == "pairs":
            files += map(Path, names.split(","))
    return files


def table_columns(name: str) -> list[str]:
    """The parts of PATH[,SOURCE_COLUMN,TARGET_COLUMN]; a path may have commas."""
    return name.rsplit(",", 2) if name.count(",") >= 2 else [name]


def read_text(path: Path) -> str:
    """A UTF-8 text file, decompressed if its name ends in .gz. Empty, binary and broken files are errors."""
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except FileNotFoundError:
        raise InputError(f"no text file {path}: check the path") from None
    except IsADirectoryError:
        raise InputError(f"{path} is a folder: give one text file") from None
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"cannot read {path}: {error}; if it is a .gz file, it may be truncated") from None
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
    """A split of a text: the first 90% of its lines are train, the next 5% valid, the last 5% test."""
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
    """Splits a text at lines `<|endoftext|>`, the separator of many corpora; without such lines it is one document."""
    parts = re.split(r"^<\|endoftext\|>[ \t\r]*$", text, flags=re.MULTILINE)
    if len(parts) == 1:
        return parts
    documents = [part.strip() for part in parts if part.strip()]
    if not documents:
        raise InputError("the text has lines <|endoftext|> and nothing between them: give a file with documents")
    return documents


def split_of(name: str) -> str:
    """A document's split, from a hash of its name: valid and test get 1 in 16 each, in every Python version."""
    return _split_of_bucket(zlib.crc32(f"pydoc:{name}".encode()) % 16)


def _split_of_bucket(bucket: int) -> str:
    return {0: "valid", 1: "test"}.get(bucket, "train")


@functools.cache
def pydoc_documents() -> dict[str, str]:
    """English prose that comes with every CPython: its documentation topics and the standard library's docstrings.

    Maps name to text, one document per topic and per module; paragraphs that occur in an earlier split are removed.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError:
        topics = {}  # some distributions package the topics separately; the docstrings remain
    documents = {f"topic/{name}": text.strip() for name, text in topics.items()}
    library = Path(sysconfig.get_path("stdlib"))
    for path in library.rglob("*.py"):
        relative = path.relative_to(library)
        if not _NOT_PROSE.intersection(relative.parts):
            documents[f"module/{relative.as_posix()}"] = "\n\n".join(_docstrings(path))
    if sum(map(len, documents.values())) < _LEAST_PROSE:
        raise InputError(
            f"this Python has almost no documentation in {library}: use a full CPython (on Debian, the packages "
            "python3 and libpython3-stdlib), or text:PATH"
        )
    return _without_repetitions(documents)


def _without_repetitions(documents: dict[str, str]) -> dict[str, str]:
    """Removes paragraphs of 10 words or more that an earlier split has too, then documents that are empty."""
    earlier, result = set(), {}
    for split in SPLITS:
        members = {name: text.split("\n\n") for name, text in documents.items() if split_of(name) == split}
        for name, paragraphs in members.items():
            result[name] = "\n\n".join(p for p in paragraphs if len(p.split()) < 10 or _key(p) not in earlier)
        earlier.update(_key(paragraph) for paragraphs in members.values() for paragraph in paragraphs)
    return {name: result[name] for name in sorted(result) if result[name].strip()}


def _key(paragraph: str) -> str:
    return " ".join(paragraph.split())  # copies may differ in indentation and line breaks


def _docstrings(path: Path) -> list[str]:
    """A Python file's docstrings, read without importing it; an empty list if this Python cannot parse the file."""
    try:
        tree = ast.parse(path.read_text("utf-8"))
    except (SyntaxError, UnicodeDecodeError, ValueError):
        return []
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    texts = (ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, documented))
    return [text for text in texts if text and "\0" not in text]

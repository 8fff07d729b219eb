"""Reads GGUF, the file format of llama.cpp: metadata, then tensors, many of them quantized."""

import math
import mmap
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from t2r.errors import InputError
from t2r.extras import require

MAGIC = b"GGUF"
VERSIONS = (2, 3)  # version 1 has lengths of 32 bits, and was written for three weeks in 2023
STRING, ARRAY = 8, 9
NUMBERS = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip


def is_gguf(path: Path) -> bool:
    """Whether a file ends in .gguf or begins as GGUF does."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return path.suffix == ".gguf" or file.read(4) == MAGIC


class _Entry(NamedTuple):
    """Where a tensor is, in bytes from the start of the file, and how its numbers are stored."""

    shape: tuple[int, ...]
    kind: Any  # gguf.GGMLQuantizationType
    start: int
    bytes_per_row: int


class GGUFFile(Mapping):
    """The `metadata` of a file, and a mapping from name to tensor: each is dequantized to float32 when it is read."""

    def __init__(self, path: Path):
        gguf = require("gguf", "gguf")
        self._dequantize = gguf.quants.dequantize
        self.metadata: dict[str, Any] = {}
        self._entries: dict[str, _Entry] = {}
        try:
            with path.open("rb") as file:
                self._content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            self._read(_Header(self._content), gguf)
        except OSError as error:
            raise InputError(f"cannot read {path}: {error.strerror}") from None
        except Exception as error:  # arbitrary bytes can raise anything
            raise InputError(f"{path} is not GGUF, or damaged or cut short ({error}): copy it again") from None

    def _read(self, header: "_Header", gguf: Any) -> None:
        if header.take(4) != MAGIC:
            raise ValueError("it does not begin with GGUF")
        version = header.number("<u4")
        if version not in VERSIONS:
            raise ValueError(f"version {version} is unknown, or its bytes are in big-endian order")
        tensors, keys = header.number("<u8"), header.number("<u8")
        for _ in range(keys):
            key = header.string()
            if key in self.metadata:
                raise ValueError(f"{key} appears twice")
            self.metadata[key] = header.value(header.number("<u4"))
        entries = [header.tensor() for _ in range(tensors)]
        alignment = self.metadata.get("general.alignment", 32)
        first = math.ceil(header.position / alignment) * alignment
        for name, shape, kind, offset in entries:
            kind = gguf.GGMLQuantizationType(kind)
            numbers, size = gguf.GGML_QUANT_SIZES[kind]  # of a block
            if shape[-1] % numbers:
                raise ValueError(f"{name} has rows of {shape[-1]} numbers, and {kind.name} blocks of {numbers}")
            entry = _Entry(shape, kind, first + offset, shape[-1] // numbers * size)
            end = entry.start + math.prod(shape[:-1]) * entry.bytes_per_row
            if end > len(self._content):
                raise ValueError(f"{name} ends at byte {end:,}, and the file has {len(self._content):,}")
            if name in self._entries:
                raise ValueError(f"{name} appears twice")
            self._entries[name] = entry

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, without reading it."""
        return self._entries[name].shape

    def __getitem__(self, name: str) -> np.ndarray:
        entry = self._entries[name]
        shape = (*entry.shape[:-1], entry.bytes_per_row)
        stored = np.frombuffer(self._content, np.uint8, math.prod(shape), entry.start).reshape(shape)
        try:
            return self._dequantize(stored, entry.kind)
        except NotImplementedError:
            raise InputError(f"{name} has type {entry.kind.name}, which is not supported") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


class _Header:
    """Reads numbers, strings, arrays and descriptions of tensors one after the other."""

    def __init__(self, content: mmap.mmap):
        self._content, self.position = content, 0

    def take(self, count: int) -> bytes:
        end = self.position + count
        if end > len(self._content):
            raise ValueError(f"the header goes to byte {end:,}, and the file has {len(self._content):,}")
        taken, self.position = self._content[self.position : end], end
        return taken

    def numbers(self, kind: str, count: int) -> list[Any]:
        dtype = np.dtype(kind)
        return np.frombuffer(self.take(dtype.itemsize * count), dtype).tolist()

    def number(self, kind: str) -> Any:
        if kind == "<f4":  # as it was meant: 1e-05, not 9.999999747378752e-06
            return float(str(np.float32(self.numbers(kind, 1)[0])))
        return self.numbers(kind, 1)[0]

    def string(self) -> str:
        (length,) = struct.unpack("<Q", self.take(8))
        return self.take(length).decode("utf-8")

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.string()
        if kind != ARRAY:
            return self.number(NUMBERS[kind])
        kind, count = self.number("<u4"), self.number("<u8")
        if kind in NUMBERS:
            return self.numbers(NUMBERS[kind], count)
        return [self.value(kind) for _ in range(count)]

    def tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        """Name, shape (in the file, the last dimension comes first), number of the type, offset in the data."""
        name = self.string()
        shape = tuple(reversed(self.numbers("<u8", self.number("<u4"))))
        if not shape or 0 in shape:
            raise ValueError(f"{name} has shape {shape}")
        return name, shape, self.number("<u4"), self.number("<u8")

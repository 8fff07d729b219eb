"""Safetensors files, read and written array by array, so that a model is never in memory twice."""

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from t2r.errors import InputError, raise_all

TYPES = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16, "F64": np.float64}


class Tensors(Mapping):
    """A mapping from name to memory-mapped array, from one safetensors file or several with an index."""

    def __init__(self, folder: Path):
        self._entries: dict[str, tuple[Path, dict, int]] = {}
        problems = []
        for path in _files(folder):
            try:
                self._read_header(path, problems)
            except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
                problems.append(f"{path.name} is damaged or cut short ({error}): copy it again")
        raise_all(f"weights in {folder}:", problems)

    def _read_header(self, path: Path, problems: list[str]) -> None:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= size - 8:
                raise ValueError(f"the file has {size:,} bytes, its header claims {length:,}")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        for name, entry in header.items():
            if entry["dtype"] not in TYPES:
                problems.append(f"{name} has type {entry['dtype']}, which is not supported: use {', '.join(TYPES)}")
                continue
            begin, end = entry["data_offsets"]
            if not (0 <= begin == end - _bytes(entry) and 8 + length + end <= size):
                raise ValueError(f"{name} does not fit into the file's {size:,} bytes")
            self._entries[name] = path, entry, 8 + length

    def __getitem__(self, name: str) -> np.ndarray:
        path, entry, start = self._entries[name]
        kind, offset = np.dtype(TYPES[entry["dtype"]]), start + entry["data_offsets"][0]
        shape = tuple(entry["shape"])
        if not _bytes(entry):
            return np.zeros(shape, kind)
        return np.memmap(path, kind, "r", offset, shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


def write(path: Path, arrays: Mapping[str, Any], dtype: str, metadata: Mapping[str, str] | None = None) -> None:
    """Writes arrays as `dtype`; each is converted just before it is written. `metadata` is for other libraries."""
    kind = np.dtype(dtype)
    code = next(code for code, numpy_type in TYPES.items() if kind == numpy_type)
    header, end = {"__metadata__": dict(metadata)} if metadata else {}, 0
    for name, array in arrays.items():
        begin, end = end, end + array.size * kind.itemsize
        header[name] = {"dtype": code, "shape": array.shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # safetensors aligns the data to 8 bytes
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, array in arrays.items():
            with np.errstate(over="ignore"):
                stored = np.ascontiguousarray(array, kind).reshape(-1)
            if kind == np.float16 and np.isinf(stored).any():
                raise InputError(f"{name} has values beyond 65,504, the largest of float16: write float32 instead")
            file.write(stored.view(np.uint8))


def _bytes(entry: dict[str, Any]) -> int:
    return math.prod(entry["shape"]) * np.dtype(TYPES[entry["dtype"]]).itemsize


def _files(folder: Path) -> list[Path]:
    """model.safetensors, or the files of an index. Where there are both, the single file counts, as in transformers."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.exists():
        return [single]
    if not index.exists():
        others = sorted(p.name for p in folder.glob("*.bin"))
        pickle = "{} is a pickle, which may run code: save the model as safetensors"
        hint = pickle.format(others[0]) if others else "copy it there"
        raise InputError(f"no model.safetensors and no model.safetensors.index.json in {folder}: {hint}")
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (json.JSONDecodeError, KeyError, AttributeError) as error:
        raise InputError(f"{index} is not a valid index of weights: {error}") from None
    missing = [name for name in names if not (folder / name).exists()]
    raise_all(f"{folder} lacks some of its weight files (copy them too):", missing)
    return [folder / name for name in names]

"""Weights in safetensors files, one or many with an index, each read when it is asked for."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import ml_dtypes
import numpy as np

from t2r.errors import InputError, raise_all

TYPES = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16, "F64": np.float64}


class Tensors(Mapping):
    """name → array, mapped from disk: a model is never in memory twice."""

    def __init__(self, folder: Path):
        self._entries: dict[str, tuple[Path, dict, int]] = {}
        problems = []
        for path in _files(folder):
            try:
                self._read_header(path, problems)
            except (OSError, ValueError, KeyError) as error:
                problems.append(f"{path.name} is damaged or cut short ({error}): copy it again")
        raise_all(f"weights in {folder}:", problems)

    def _read_header(self, path: Path, problems: list[str]) -> None:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= size - 8:
                raise ValueError(f"{size:,} bytes, of which the header claims {length:,}")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        for name, entry in header.items():
            if entry["dtype"] not in TYPES:
                problems.append(f"{name} is of type {entry['dtype']}: {', '.join(TYPES)} can be read")
            elif 8 + length + entry["data_offsets"][1] > size:
                problems.append(f"{path.name} is cut short: {name} lies beyond its end; copy it again")
            else:
                self._entries[name] = path, entry, 8 + length

    def __getitem__(self, name: str) -> np.ndarray:
        path, entry, start = self._entries[name]
        kind, offset = np.dtype(TYPES[entry["dtype"]]), start + entry["data_offsets"][0]
        shape = tuple(entry["shape"])
        if not int(np.prod(shape)):
            return np.zeros(shape, kind)
        return np.memmap(path, kind, "r", offset, shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


def _files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        path = folder / "model.safetensors"
        if not path.exists():
            others = sorted(p.name for p in folder.glob("*.bin"))
            hint = f"; {others[0]} is a pickle, which may run code: save the model as safetensors" if others else ""
            raise InputError(f"no model.safetensors, and no index of several, in {folder}{hint}")
        return [path]
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (json.JSONDecodeError, KeyError, AttributeError) as error:
        raise InputError(f"{index} is no index of weights: {error}") from None
    missing = [name for name in names if not (folder / name).exists()]
    raise_all(f"{folder} lacks parts of its weights (copy them too):", missing)
    return [folder / name for name in names]

"""Reads checkpoints of torch.save without torch, and without running code that they contain.

Such a file is a pickle, which can name any function and have it called. Here only the few functions that build tensors
are resolved. Classes that hold data become a `Shell`, and every other name is refused.
"""

import math
import pickle
import re
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import ml_dtypes
import numpy as np

from t2r.errors import InputError

MAGIC = 0x1950A86A20F9469CFC6C  # the first object of the format before torch 1.6, which is not a zip archive
TYPES = {
    "Float": np.float32, "Half": np.float16, "BFloat16": ml_dtypes.bfloat16, "Double": np.float64, "Long": np.int64,
    "Int": np.int32, "Short": np.int16, "Char": np.int8, "Byte": np.uint8, "Bool": np.bool_,
}  # fmt: skip
# What a checkpoint holds beside tensors: settings, counts, times. Each becomes a Shell; none is ever called.
DATA = re.compile(
    r"argparse\.Namespace|(fairseq|omegaconf|numpy|typing|pathlib|datetime)\..+|_codecs\.encode"
    r"|collections\.(defaultdict|Counter|deque)|torch\.(Size|device|dtype|bool|b?float\d+|u?int\d+)"
    r"|(builtins|__builtin__)\.(bool|int|long|float|complex|str|unicode|bytes|bytearray|list|tuple|dict|set|frozenset)"
)


class Shell:
    """Replaces an object of an unresolved class: stores its arguments, items and state, and does nothing."""

    def __new__(cls, *values: Any, **named: Any):
        shell = super().__new__(cls)
        shell.values, shell.items, shell.state = list(values), dict(named), None
        return shell

    def __init__(self, *values: Any, **named: Any):
        pass

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        self.items[key] = value

    def append(self, value: Any) -> None:
        self.values.append(value)

    def extend(self, values: Any) -> None:
        self.values.extend(values)


class Storage:
    """The flat memory of one or several tensors; it is mapped to the file once the pickle is read."""

    def __init__(self, dtype: np.dtype, size: int):
        self.dtype, self.size = dtype, size
        self.values: np.ndarray | None = None

    def attach(self, content: np.ndarray, offset: int) -> None:
        """Makes the values a view of the file's bytes from `offset`."""
        end = offset + self.size * self.dtype.itemsize
        if not 0 <= offset <= end <= len(content):
            raise ValueError(f"the file has {len(content):,} bytes and a tensor would end at byte {end:,}")
        self.values = content[offset:end].view(self.dtype)


class Tensor(NamedTuple):
    """An array as a strided view of a storage."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def array(self) -> np.ndarray:
        """The tensor as a read-only view of the file: nothing is read until it is used."""
        values, shape, stride = self.storage.values, self.shape, self.stride
        if len(shape) != len(stride) or min((*shape, *stride, self.offset), default=0) < 0:
            raise ValueError(f"shape {shape} and stride {stride} at offset {self.offset} are not a valid tensor")
        if not math.prod(shape):
            return np.zeros(shape, self.storage.dtype)
        last = self.offset + sum((size - 1) * step for size, step in zip(shape, stride))
        if last >= len(values) or math.prod(shape) > len(values):
            raise ValueError(f"shape {shape} and stride {stride} at offset {self.offset} exceed {len(values)} values")
        steps = [step * values.itemsize for step in stride]
        return np.lib.stride_tricks.as_strided(values[self.offset :], shape, steps, writeable=False)


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: Any):
        super().__init__(file, encoding="utf-8")
        self.storages: dict[str, Storage] = {}

    def find_class(self, module: str, name: str) -> Any:
        resolved: dict[str, Callable] = {
            "collections.OrderedDict": OrderedDict,
            "torch._utils._rebuild_tensor": self._tensor,
            "torch._utils._rebuild_tensor_v2": self._tensor,
            "torch._utils._rebuild_parameter": self._parameter,
        }
        full = f"{module}.{name}"
        if full in resolved:
            return resolved[full]
        storage = re.fullmatch(r"torch\.(?:cuda\.)?(\w+)Storage", full)
        if storage and storage[1] in TYPES:
            return type(name, (Shell,), {"dtype": np.dtype(TYPES[storage[1]])})
        if DATA.fullmatch(full):
            return type(name, (Shell,), {})
        raise InputError(f"it names {full}, which no tensor or setting needs and which might run code")

    def persistent_load(self, identity: Any) -> Storage:
        kind, storage_type, key, _, size, *view = identity
        if kind != "storage" or any(view) or size < 0:
            raise ValueError(f"unknown storage {identity}")
        return self.storages.setdefault(key, Storage(storage_type.dtype, size))

    def _tensor(self, storage: Storage, offset: int, shape: tuple, stride: tuple, *_: Any) -> Tensor:
        if not isinstance(storage, Storage):
            raise ValueError("a tensor has no storage")
        return Tensor(storage, int(offset), tuple(map(int, shape)), tuple(map(int, stride)))

    def _parameter(self, tensor: Tensor, *_: Any) -> Tensor:
        return tensor


def read(path: Path) -> Any:
    """The content of a checkpoint, with every tensor as a `Tensor` and every other object as a `Shell`."""
    try:
        with path.open("rb") as file:
            is_zip = file.read(4) == b"PK\x03\x04"
            content = np.memmap(path, np.uint8, "r")
            return _read_zip(file, content) if is_zip else _read_legacy(file, content)
    except FileNotFoundError:
        raise InputError(f"{path} does not exist: give a checkpoint") from None
    except InputError as error:
        raise InputError(f"{path} is refused: {error}") from None
    except Exception as error:  # unpickling arbitrary bytes can raise anything
        raise InputError(
            f"{path} is no checkpoint of fairseq and no GGUF file, or damaged or cut short ({error}): copy it again"
        ) from None


def _read_zip(file: BinaryIO, content: np.ndarray) -> Any:
    """The format since torch 1.6: a zip archive with a pickle and one uncompressed entry for each storage."""
    with zipfile.ZipFile(file) as archive:
        name = next((name for name in archive.namelist() if name.endswith("/data.pkl")), None)
        if name is None:
            raise ValueError("the archive has no data.pkl")
        unpickler = _Unpickler(archive.open(name))
        checkpoint = unpickler.load()
        for key, storage in unpickler.storages.items():
            entry = archive.getinfo(f"{name.removesuffix('data.pkl')}data/{key}")
            if entry.compress_type != zipfile.ZIP_STORED or entry.file_size < storage.size * storage.dtype.itemsize:
                raise ValueError(f"{entry.filename} is compressed or too short")
            # A local zip header: 30 bytes, whose last four are the lengths of the name and the extra field after it.
            header = content[entry.header_offset : entry.header_offset + 30].tobytes()
            lengths = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
            storage.attach(content, entry.header_offset + 30 + lengths)
    return checkpoint


def _read_legacy(file: BinaryIO, content: np.ndarray) -> Any:
    """The format before torch 1.6: five pickles (MAGIC, version, system, content, storage keys), then the storages."""
    file.seek(0)
    if _Unpickler(file).load() != MAGIC:
        raise ValueError("it does not begin with torch's magic number")
    for _ in ("version", "system"):
        _Unpickler(file).load()
    unpickler = _Unpickler(file)
    checkpoint = unpickler.load()
    keys, offset = _Unpickler(file).load(), file.tell()
    for key in keys:
        size, storage = int.from_bytes(content[offset : offset + 8].tobytes(), "little"), unpickler.storages[key]
        if size != storage.size:
            raise ValueError(f"storage {key} has {size:,} values, not {storage.size:,}")
        storage.attach(content, offset + 8)
        offset += 8 + size * storage.dtype.itemsize
    missing = [key for key, storage in unpickler.storages.items() if storage.values is None]
    if missing:
        raise ValueError(f"storages {', '.join(map(str, missing))} are missing")
    return checkpoint

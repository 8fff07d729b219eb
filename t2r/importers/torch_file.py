"""Checkpoints that torch.save has written, read without torch and without running anything that is in them.

Such a file is a pickle, which may name any function and have it called. Here only the few names that make tensors mean
what they say. Classes that merely hold data become shells, and every other name is refused.
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

MAGIC = 0x1950A86A20F9469CFC6C  # what files begin with that are no zip archives
TYPES = {
    "Float": np.float32, "Half": np.float16, "BFloat16": ml_dtypes.bfloat16, "Double": np.float64, "Long": np.int64,
    "Int": np.int32, "Short": np.int16, "Char": np.int8, "Byte": np.uint8, "Bool": np.bool_,
}  # fmt: skip
# What training leaves in a checkpoint beside tensors: settings, counts, times. None of it is ever called.
DATA = re.compile(
    r"argparse\.Namespace|(fairseq|omegaconf|numpy|typing|pathlib|datetime)\..+|_codecs\.encode"
    r"|collections\.(defaultdict|Counter|deque)|torch\.(Size|device|dtype|bool|b?float\d+|u?int\d+)"
    r"|(builtins|__builtin__)\.(bool|int|long|float|complex|str|unicode|bytes|bytearray|list|tuple|dict|set|frozenset)"
)


class Shell:
    """Stands for an object of a class that is not known here: keeps what it was made of, and does nothing."""

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
    """Numbers that one or several tensors look at; found in the file once the pickle is read."""

    def __init__(self, dtype: np.dtype, size: int):
        self.dtype, self.size = dtype, size
        self.numbers: np.ndarray | None = None

    def find(self, content: np.ndarray, offset: int) -> None:
        """Looks at the file's bytes from an offset on."""
        end = offset + self.size * self.dtype.itemsize
        if not 0 <= offset <= end <= len(content):
            raise ValueError(f"it has {len(content):,} bytes and a tensor's numbers would end at {end:,}")
        self.numbers = content[offset:end].view(self.dtype)


class Tensor(NamedTuple):
    """Which numbers of a storage make up an array."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def array(self) -> np.ndarray:
        """A view of the file: nothing is read until it is used."""
        numbers, shape, stride = self.storage.numbers, self.shape, self.stride
        if len(shape) != len(stride) or min((*shape, *stride, self.offset), default=0) < 0:
            raise ValueError(f"shape {shape} and stride {stride} from {self.offset} on make no tensor")
        if not math.prod(shape):
            return np.zeros(shape, self.storage.dtype)
        last = self.offset + sum((size - 1) * step for size, step in zip(shape, stride))
        if last >= len(numbers) or math.prod(shape) > len(numbers):
            raise ValueError(f"shape {shape} and stride {stride} from {self.offset} on exceed {len(numbers)} numbers")
        steps = [step * numbers.itemsize for step in stride]
        return np.lib.stride_tricks.as_strided(numbers[self.offset :], shape, steps, writeable=False)


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: BinaryIO):
        super().__init__(file, encoding="utf-8")
        self.storages: dict[str, Storage] = {}

    def find_class(self, module: str, name: str) -> Any:
        known: dict[str, Callable] = {
            "collections.OrderedDict": OrderedDict,
            "torch._utils._rebuild_tensor": self._tensor,
            "torch._utils._rebuild_tensor_v2": self._tensor,
            "torch._utils._rebuild_parameter": self._parameter,
        }
        full = f"{module}.{name}"
        if full in known:
            return known[full]
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
            raise ValueError("a tensor without a storage")
        return Tensor(storage, int(offset), tuple(map(int, shape)), tuple(map(int, stride)))

    def _parameter(self, tensor: Tensor, *_: Any) -> Tensor:
        return tensor


def read(path: Path) -> Any:
    """What a checkpoint holds, with every tensor as a `Tensor` and every other object as a `Shell`."""
    try:
        with path.open("rb") as file:
            is_zip = file.read(4) == b"PK\x03\x04"
            content = np.memmap(path, np.uint8, "r")
            return _read_zip(file, content) if is_zip else _read_legacy(file, content)
    except FileNotFoundError:
        raise InputError(f"no {path}: give a checkpoint") from None
    except InputError as error:
        raise InputError(f"{path} is refused: {error}") from None
    except Exception as error:  # a pickle of anything may fail in any way
        raise InputError(f"{path} is no torch checkpoint, or damaged or cut short ({error}): copy it again") from None


def _read_zip(file: BinaryIO, content: np.ndarray) -> Any:
    """Since torch 1.6: an archive of a pickle and of each storage, uncompressed."""
    with zipfile.ZipFile(file) as archive:
        name = next((name for name in archive.namelist() if name.endswith("/data.pkl")), None)
        if name is None:
            raise ValueError("an archive without data.pkl")
        unpickler = _Unpickler(archive.open(name))
        found = unpickler.load()
        for key, storage in unpickler.storages.items():
            entry = archive.getinfo(f"{name.removesuffix('data.pkl')}data/{key}")
            if entry.compress_type != zipfile.ZIP_STORED or entry.file_size < storage.size * storage.dtype.itemsize:
                raise ValueError(f"{entry.filename} is compressed or too short")
            # Before the bytes stands a header of 30, with the lengths of a name and of something more at its end.
            header = content[entry.header_offset : entry.header_offset + 30].tobytes()
            lengths = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
            storage.find(content, entry.header_offset + 30 + lengths)
    return found


def _read_legacy(file: BinaryIO, content: np.ndarray) -> Any:
    """Before: five pickles (a number, a version, the system, the object, the storages' keys), then the storages."""
    file.seek(0)
    if _Unpickler(file).load() != MAGIC:
        raise ValueError("its first number is another")
    for _ in ("version", "system"):
        _Unpickler(file).load()
    unpickler = _Unpickler(file)
    found = unpickler.load()
    keys, offset = _Unpickler(file).load(), file.tell()
    for key in keys:
        size, storage = int.from_bytes(content[offset : offset + 8].tobytes(), "little"), unpickler.storages[key]
        if size != storage.size:
            raise ValueError(f"storage {key} has {size:,} numbers, not {storage.size:,}")
        storage.find(content, offset + 8)
        offset += 8 + size * storage.dtype.itemsize
    missing = [key for key, storage in unpickler.storages.items() if storage.numbers is None]
    if missing:
        raise ValueError(f"storages {', '.join(map(str, missing))} are missing")
    return found

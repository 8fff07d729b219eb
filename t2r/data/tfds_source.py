"""Data sets that `launch/prepare_data` has written, read record by record, without TensorFlow."""

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from t2r.errors import InputError

NAMES = {"train": "train", "valid": "validation", "test": "test", "all": "train+validation+test"}


def data_dir() -> Path:
    """Where data sets lie: TFDS_DATA_DIR, or data/tfds."""
    return Path(os.environ.get("TFDS_DATA_DIR", "data/tfds"))


class Records(Sequence):
    """The examples of a split, each read when it is asked for, and made into what is wanted."""

    def __init__(self, source: Sequence[dict[str, Any]], make: Callable[[dict[str, str]], Any]):
        self._source, self._make = source, make

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int) -> Any:
        example = self._source[index]
        return self._make({name: value.decode() for name, value in example.items() if isinstance(value, bytes)})

    def __iter__(self) -> Iterator[Any]:
        return (self[index] for index in range(len(self)))


def open_split(name: str, split: str, fields: Sequence[str], make: Callable[[dict[str, str]], Any]) -> Records:
    """A split of a prepared data set that has these fields."""
    import tensorflow_datasets as tfds  # a second to import, for those who need it

    folder = data_dir()
    try:
        builder = tfds.builder_from_directory(_newest_version(folder, name))
        missing = [field for field in fields if field not in builder.info.features]
        if missing:
            raise InputError(f"tfds:{name} has no {', '.join(missing)}: it has {', '.join(builder.info.features)}")
        return Records(builder.as_data_source(split=NAMES[split]), make)
    except (NotImplementedError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise InputError(f"tfds:{name} in {folder} cannot be read ({reason}): prepare it again") from None


def _newest_version(folder: Path, name: str) -> Path:
    versions = sorted(path for path in (folder / name).glob("*.*.*") if (path / "dataset_info.json").exists())
    if not versions:
        raise InputError(
            f"no prepared data set in {folder / name}: run launch/prepare_data --name={name}, or set TFDS_DATA_DIR to "
            "where it is"
        )
    return versions[-1]

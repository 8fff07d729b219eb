"""Reads data sets that `launch/prepare_data` wrote, record by record, without TensorFlow."""

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from t2r.errors import InputError
from t2r.extras import require

NAMES = {"train": "train", "valid": "validation", "test": "test", "all": "train+validation+test"}


def data_dir() -> Path:
    """The folder of prepared data sets: $TFDS_DATA_DIR, or data/tfds."""
    return Path(os.environ.get("TFDS_DATA_DIR", "data/tfds"))


class Records(Sequence):
    """The examples of a split; each is read when it is indexed, decoded to strings, and passed through `convert`."""

    def __init__(self, source: Sequence[dict[str, Any]], convert: Callable[[dict[str, str]], Any]):
        self._source, self._convert = source, convert

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int) -> Any:
        example = self._source[index]
        return self._convert({name: value.decode() for name, value in example.items() if isinstance(value, bytes)})

    def __iter__(self) -> Iterator[Any]:
        return (self[index] for index in range(len(self)))


def open_split(name: str, split: str, fields: Sequence[str], convert: Callable[[dict[str, str]], Any]) -> Records:
    """The examples of a prepared data set's split; an error if the data set lacks one of `fields`."""
    tfds = require("tensorflow_datasets", "data")  # slow to import, so only where it is used

    folder = data_dir()
    try:
        builder = tfds.builder_from_directory(_newest_version(folder, name))
        missing = [field for field in fields if field not in builder.info.features]
        if missing:
            raise InputError(
                f"tfds:{name} has no fields {', '.join(missing)}: choose from {', '.join(builder.info.features)}"
            )
        return Records(builder.as_data_source(split=NAMES[split]), convert)
    except (NotImplementedError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise InputError(f"tfds:{name} in {folder} cannot be read ({reason}): prepare it again") from None


def _newest_version(folder: Path, name: str) -> Path:
    prepared = (path for path in (folder / name).glob("*.*.*") if (path / "dataset_info.json").exists())
    versions = sorted(prepared, key=lambda path: [int(part) if part.isdigit() else 0 for part in path.name.split(".")])
    if not versions:
        raise InputError(
            f"no prepared data set in {folder / name}: run launch/prepare_data --name={name}, or set TFDS_DATA_DIR to "
            "the folder that has it"
        )
    return versions[-1]

"""Writes a TFDS data set as ArrayRecord files, which training reads as tfds:NAME, without TensorFlow."""

import time
from pathlib import Path
from typing import Any

from t2r.data.tfds_source import data_dir
from t2r.errors import InputError
from t2r.extras import require


def prepare_dataset(
    name: str, *, files: str | Path | None = None, folder: str | Path | None = None
) -> tuple[dict[str, int], dict[str, Any]]:
    """Downloads a data set, or reads local copies from the folder `files`, and writes it to `folder`.

    The default folder is `data_dir()`. Returns the number of examples of each split, and a summary with the path.
    """
    tfds = require("tensorflow_datasets", "data")
    from t2r.data.tfds_builders import make_builder

    began = time.time()
    if files and not Path(files).is_dir():
        raise InputError(f"--files={files} is not a folder: give the folder that holds the files")
    builder = make_builder(name, Path(folder) if folder else data_dir())
    options = tfds.download.DownloadConfig(manual_dir=files)
    try:
        builder.download_and_prepare(download_config=options)
    except (OSError, tfds.core.download.DownloadError) as error:
        raise InputError(
            f"{name} could not be downloaded or written ({str(error).splitlines()[0][:300]}): run this again, "
            "or give local copies of the files with --files"
        ) from None
    splits = {split: info.num_examples for split, info in builder.info.splits.items()}
    return splits, {"data": f"tfds:{name}", "path": str(builder.data_path), "seconds": time.time() - began}

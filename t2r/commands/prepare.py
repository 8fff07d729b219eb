"""Write a data set as ArrayRecord files, once; training then reads it as tfds:NAME, without TensorFlow.

python -m t2r prepare --name=wikitext103
python -m t2r prepare --name=wmt14_translate/de-en        (also wmt14_translate/fr-en, wmt17_translate/zh-en)
python -m t2r prepare --name=wikitext103 --files=DIR              wiki.train.tokens and so on, as distributed
python -m t2r prepare --name=sentence_pairs/en-de --files=DIR     train*.en, train*.de, valid.en, ... (.gz too)

With --files nothing is downloaded. Started again after an interruption, it keeps what was downloaded; what is complete
is not made again. --data_dir is data/tfds, or TFDS_DATA_DIR.
"""

import time
from pathlib import Path
from typing import Any

from absl import flags

_NAME = flags.DEFINE_string("name", None, "Data set: wikitext103, sentence_pairs/en-de, or one of TFDS.", required=True)
_FILES = flags.DEFINE_string("files", None, "Folder with local copies of the original files.")
_DATA_DIR = flags.DEFINE_string("data_dir", None, "Where data sets lie; default: TFDS_DATA_DIR, or data/tfds.")


def main() -> dict[str, Any]:
    import tensorflow_datasets as tfds

    from t2r.console import table
    from t2r.data.tfds_builders import make_builder
    from t2r.data.tfds_source import data_dir
    from t2r.errors import InputError

    began = time.time()
    if _FILES.value and not Path(_FILES.value).is_dir():
        raise InputError(f"--files={_FILES.value} is no folder: name the one that holds the files")
    builder = make_builder(_NAME.value, Path(_DATA_DIR.value) if _DATA_DIR.value else data_dir())
    options = tfds.download.DownloadConfig(manual_dir=_FILES.value)
    try:
        builder.download_and_prepare(download_config=options)
    except (OSError, tfds.core.download.DownloadError) as error:
        raise InputError(
            f"{_NAME.value} could not be downloaded or written ({str(error).splitlines()[0][:300]}): run this again, "
            "or give local copies of the files with --files"
        ) from None
    splits = {name: split.num_examples for name, split in builder.info.splits.items()}
    print(table(["split", "examples"], splits.items()))
    return {"data": f"tfds:{_NAME.value}", "path": str(builder.data_path), **splits, "seconds": time.time() - began}

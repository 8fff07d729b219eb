"""Download a dataset, or read local files, and write it as ArrayRecord files, which training reads as tfds:NAME.

t2r prepare --name=wikitext103
t2r prepare --name=wmt14_translate/de-en        (also wmt14_translate/fr-en, wmt17_translate/zh-en)
t2r prepare --name=wikitext103 --files=DIR              (wiki.train.tokens etc., as distributed)
t2r prepare --name=sentence_pairs/en-de --files=DIR     (train*.en, train*.de, valid.en, ...; also .gz)

With --files nothing is downloaded. After an interruption, run the same command: finished downloads and splits are
reused.
"""

from typing import Any

from absl import flags

RESUMES = True  # after an interruption

_NAME = flags.DEFINE_string("name", None, "Dataset: wikitext103, sentence_pairs/en-de, or one of TFDS.", required=True)
_FILES = flags.DEFINE_string("files", None, "Folder with local copies of the original files.")
_DATA_DIR = flags.DEFINE_string("data_dir", None, "Directory of datasets; default: $TFDS_DATA_DIR, or data/tfds.")


def main() -> dict[str, Any]:
    from t2r.console import table
    from t2r.data.prepare import prepare_dataset

    splits, result = prepare_dataset(_NAME.value, files=_FILES.value, folder=_DATA_DIR.value)
    print(table(["split", "examples"], splits.items()))
    seconds = result.pop("seconds")
    return {**result, **splits, "seconds": seconds}

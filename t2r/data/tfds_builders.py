"""TFDS builders for data sets that TFDS does not have: the paper's WikiText-103, and sentence pairs from files.

Imports TensorFlow, so only data preparation imports this module. WMT14 and WMT17 have builders in TFDS itself.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tensorflow_datasets as tfds

from t2r.data.pairs import read_two_files
from t2r.data.sources import read_text
from t2r.errors import InputError

SPLITS = {"train": "train", "valid": "validation", "test": "test"}
WIKITEXT_103 = "https://s3.amazonaws.com/research.metamind.io/wikitext/wikitext-103-v1.zip"


class Wikitext103(tfds.core.GeneratorBasedBuilder):
    """WikiText-103 (Merity et al., 2017): Wikipedia articles, tokenised into words. One example is one article."""

    name = "wikitext103"
    VERSION = tfds.core.Version("1.0.0")
    MANUAL_DOWNLOAD_INSTRUCTIONS = (
        "Put wiki.train.tokens, wiki.valid.tokens and wiki.test.tokens (.gz too) into the folder."
    )

    def _info(self) -> tfds.core.DatasetInfo:
        text = tfds.features.FeaturesDict({"text": tfds.features.Text()})
        return self.dataset_info_from_configs(features=text, disable_shuffling=True)  # keep the articles' order

    def _split_generators(self, dl_manager: tfds.download.DownloadManager) -> dict[str, Any]:
        folder = _manual_folder(dl_manager)
        if folder is None:
            folder = Path(dl_manager.download_and_extract(WIKITEXT_103)) / "wikitext-103"
        paths = {split: _find(folder, f"wiki.{split}.tokens") for split in SPLITS}
        return {SPLITS[split]: self._generate_examples(path) for split, path in paths.items()}

    def _generate_examples(self, path: Path) -> Iterator[tuple[int, dict[str, str]]]:
        for number, article in enumerate(articles(read_text(path))):
            yield number, {"text": article}


def articles(text: str) -> Iterator[str]:
    """Splits a WikiText file before each title, a line ` = Title = ` after an empty line; joined, they are the file."""
    lines = text.splitlines(keepends=True)
    start = 0
    for number, line in enumerate(lines):
        words = line.split()
        # Section titles have more equals signs: ` = = Section = = `.
        is_title = len(words) > 2 and words[0] == words[-1] == "=" and words[1] != "=" and words[-2] != "="
        follows_empty = number > 0 and not lines[number - 1].strip()
        if is_title and follows_empty and number > start + 1:
            yield "".join(lines[start:number])
            start = number
    yield "".join(lines[start:])


class PairConfig(tfds.core.BuilderConfig):
    """A language pair, such as en-de."""


class SentencePairs(tfds.core.GeneratorBasedBuilder):
    """Line-aligned files: train*.en and train*.de (any number of corpora), and so for valid and test."""

    name = "sentence_pairs"
    VERSION = tfds.core.Version("1.0.0")
    MANUAL_DOWNLOAD_INSTRUCTIONS = (
        "Put train*.LANGUAGE, valid.LANGUAGE and test.LANGUAGE (.gz too) of both languages into the folder."
    )

    def _info(self) -> tfds.core.DatasetInfo:
        text = {language: tfds.features.Text() for language in self._languages}
        return self.dataset_info_from_configs(features=tfds.features.FeaturesDict(text), disable_shuffling=True)

    @property
    def _languages(self) -> list[str]:
        return self.builder_config.name.split("-")

    def _split_generators(self, dl_manager: tfds.download.DownloadManager) -> dict[str, Any]:
        folder = _manual_folder(dl_manager)
        if folder is None:
            raise InputError(
                f"sentence_pairs reads local files, give their folder with --files. {self.MANUAL_DOWNLOAD_INSTRUCTIONS}"
            )
        first, second = self._languages
        corpora = {}
        for split in SPLITS:
            stems = sorted({_stem(path, first) for path in folder.glob(f"{split}*.{first}*")})
            corpora[SPLITS[split]] = [(_find(folder, f"{s}.{first}"), _find(folder, f"{s}.{second}")) for s in stems]
        missing = [split for split in SPLITS if not corpora[SPLITS[split]]]
        if missing:
            names = ", ".join(f"{split}*.{first}" for split in missing)
            raise InputError(f"{folder} has no {names}: {self.MANUAL_DOWNLOAD_INSTRUCTIONS}")
        return {split: self._generate_examples(files) for split, files in corpora.items()}

    def _generate_examples(self, corpora: list[tuple[Path, Path]]) -> Iterator[tuple[int, dict[str, str]]]:
        number = 0
        for corpus in corpora:
            for pair in read_two_files(*corpus):
                if all(pair):
                    yield number, dict(zip(self._languages, pair))
                    number += 1


def make_builder(name: str, data_dir: Path) -> tfds.core.DatasetBuilder:
    """The builder of a data set, one of this module or of TFDS, set to write ArrayRecord files."""
    kind, _, config = name.partition("/")
    options = dict(data_dir=data_dir, file_format=tfds.core.FileFormat.ARRAY_RECORD)
    if kind == SentencePairs.name:
        if len(config.split("-")) != 2:
            raise InputError(f"--name={name}: name the two languages, as in {kind}/en-de")
        return SentencePairs(config=PairConfig(name=config), **options)
    try:
        return tfds.builder(name, **options)
    except (tfds.core.DatasetNotFoundError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(
            f"--name={name}: {reason} Use wikitext103, sentence_pairs/en-de, wmt14_translate/de-en, "
            "wmt14_translate/fr-en, wmt17_translate/zh-en, or another data set of tensorflow-datasets"
        ) from None


def _manual_folder(dl_manager: tfds.download.DownloadManager) -> Path | None:
    try:
        return Path(dl_manager.manual_dir)
    except AssertionError:  # no folder was given, or it is empty
        return None


def _stem(path: Path, language: str) -> str:
    """The name without language and .gz: train.news.en.gz → train.news."""
    return path.name.removesuffix(".gz").removesuffix(f".{language}")


def _find(folder: Path, name: str) -> Path:
    for path in (folder / name, folder / f"{name}.gz"):
        if path.exists():
            return path
    raise InputError(f"{folder} has neither {name} nor {name}.gz: add the file")

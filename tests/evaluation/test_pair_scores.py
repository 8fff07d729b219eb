"""Scores of translations: what is refused before anything is translated."""

import os

import pytest

from t2r.errors import InputError
from t2r.evaluation.score import evaluate_pairs
from t2r.store.model_dir import LoadedModel


@pytest.mark.parametrize("name", ["source", "target", "../pairs/target"])
def test_a_file_of_the_data_is_not_replaced_by_translations(tmp_path, name):
    folder = tmp_path / "pairs"
    folder.mkdir()
    for side in ("source", "target"):
        (folder / side).write_text("one\n")
    data = f"pairs:{folder}/source,{folder}/target"
    with pytest.raises(InputError, match="choose another file"):
        evaluate_pairs(LoadedModel(None, None, {}), data, "all", output=folder / name)
    assert (folder / "target").read_text() == "one\n"


@pytest.mark.parametrize("columns", ["", ",2,1"])
def test_a_table_is_not_replaced_by_its_translations(tmp_path, columns):
    table = tmp_path / "pairs.tsv"
    table.write_text("one\teins\n")
    os.link(table, tmp_path / "other_name.tsv")
    for output in (table, tmp_path / "other_name.tsv"):
        with pytest.raises(InputError, match="choose another file"):
            evaluate_pairs(LoadedModel(None, None, {}), f"tsv:{table}{columns}", "all", output=output)

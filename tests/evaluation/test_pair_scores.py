"""Scores of translations: what is refused before anything is translated."""

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

"""The small run that whole-run tests share."""

import pytest

from tests.train.runs import CONFIG


@pytest.fixture
def config_file(tmp_path, text_file):
    path = tmp_path / "config.py"
    path.write_text(CONFIG.format(text=text_file))
    return path

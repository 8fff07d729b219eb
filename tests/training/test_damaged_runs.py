"""Each file of a run's work directory damaged in many ways: a clear error, or the result of a run that was not."""

import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from t2r.data.prepared import read_ids, write_ids
from t2r.errors import InputError
from t2r.training.checkpoint import Checkpoints
from t2r.training.config import default_config, load_config
from t2r.training.interruptions import shortages_explained
from t2r.training.metrics import read_metrics
from t2r.training.trainer import check_same_run, train, write_config
from tests.conftest import PROSE
from tests.damages import DAMAGES, snapshot
from tests.training.runs import CONFIG, losses

FILES = {
    "config.json": "config.json",
    "metrics.jsonl": "metrics.jsonl",
    "tokenizer": "tokenizer-*/tokenizer.model",
    "tokens": "tokens-*/tokens.ids",
    "ends of documents": "tokens-*/tokens.ends.npy",
    "checkpoint": "checkpoints/4/state/_METADATA",
    "position in the data": "checkpoints/4/data/*",
    "model": "model/config.json",
}


def config_of(folder: Path, steps: int):
    """The config of a small run, for the eight devices of this process."""
    config = load_config(str(folder / "config.py"))
    config.steps, config.data.batch, config.accumulate = steps, 8, 1
    config.eval_every, config.checkpoint_every = 0, 2
    config.optimizer.period = 10  # a number, so that more steps do not change the schedule
    return config


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A config and the work directory of its run of four steps, with checkpoints of steps 2 and 4."""
    folder = tmp_path_factory.mktemp("finished")
    (folder / "prose.txt").write_text(PROSE + "\n")
    (folder / "config.py").write_text(CONFIG.format(text=folder / "prose.txt"))
    train(config_of(folder, 4), folder / "run")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("file, damage", [(file, damage) for file in FILES for damage in DAMAGES])
def test_a_damaged_run_resumes_rightly_or_not_at_all(finished, tmp_path, file, damage):
    workdir = shutil.copytree(finished / "run", tmp_path / "run", symlinks=True)
    path = sorted(workdir.glob(FILES[file]))[0]
    DAMAGES[damage](path)
    before = snapshot(workdir)
    try:
        result = train(config_of(finished, 5), workdir)
    except InputError as error:
        assert str(workdir) in str(error)
        assert snapshot(workdir) == before
        return
    assert result["steps"] == 5
    known, new = losses(finished / "run"), losses(workdir)
    assert new.keys() >= {5} and all(new[step] == known[step] for step in new.keys() & known.keys())


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("file", ["texts.ids", "texts.ends.npy"])
def test_damaged_tokens_are_refused(tmp_path, file, damage):
    write_ids(tmp_path / "texts", ([[1, 2, 3]], [[4]]))
    DAMAGES[damage](tmp_path / file)
    with pytest.raises(InputError, match=r"prepared data in .* is damaged: remove this folder"):
        read_ids(tmp_path / "texts")


@pytest.mark.parametrize("damage", [damage for damage in DAMAGES if damage not in ("missing", "emptied", "negative")])
def test_damaged_metrics_are_refused(tmp_path, damage):
    """Numbers may be of any size, but steps are whole; the last line may be cut off."""
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 2.5}\n{"step": 2, "loss": 2.25}\n{"step": 3, "lo')
    assert [line["step"] for line in read_metrics(path)] == [1, 2]
    path.write_text('{"step": 1, "name": "x"}\n' * 4)
    DAMAGES[damage](path)
    try:
        assert all(line["step"] in (1, 10**30) for line in read_metrics(path))
    except InputError as error:
        assert "metrics.jsonl" in str(error) and "move it away" in str(error)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_config_of_a_run_is_refused(tmp_path, damage):
    config = default_config()
    write_config(config, tmp_path)
    check_same_run(config, tmp_path, 4)
    DAMAGES[damage](tmp_path / "config.json")
    with pytest.raises(InputError, match=str(tmp_path)):
        check_same_run(config, tmp_path, 4)


@pytest.mark.parametrize("name", ["config.json", "model/mine.py"])
def test_files_of_something_else_are_not_replaced(finished, tmp_path, name):
    path = tmp_path / "run" / name
    path.parent.mkdir(parents=True)
    path.write_text('{"model_type": "llama"}')
    with pytest.raises(InputError, match="would be replaced"):
        train(config_of(finished, 4), tmp_path / "run")
    assert [found for found in (tmp_path / "run").rglob("*") if found.is_file()] == [path]
    assert path.read_text() == '{"model_type": "llama"}'


def test_too_little_memory_is_one_error(tmp_path):
    checkpoints, message = Checkpoints(tmp_path, 1), r"does not fit in memory .*: lower config.data.batch"
    with pytest.raises(InputError, match=message) as raised, shortages_explained(tmp_path, checkpoints):
        jax.jit(lambda: jnp.ones(2**44))().block_until_ready()
    assert "\n" not in str(raised.value)

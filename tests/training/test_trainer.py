"""Whole runs in subprocesses: a run that is killed at any moment and resumed ends exactly like an uninterrupted one."""

import json
import os
import random
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from t2r.errors import InputError
from t2r.files import exclusive
from t2r.training import trainer
from t2r.training.build import build
from t2r.training.checkpoint import Checkpoints
from t2r.training.config import load_config
from t2r.training.interruptions import quiet_libraries
from t2r.training.metrics import read_metrics
from t2r.training.optimizer import make_schedule
from t2r.training.stages import make_stages
from tests.conftest import make_model, micro
from tests.training.runs import ROOT, command, environment, losses, train

PAIRS = """
from t2r.training.config import architecture, default_config

def get_config():
    config = default_config()
    config.steps = 9
    config.model = architecture("micro_mt", layers=1, dropout=0.1)
    config.convert.update(feature_map="rfa", features=4, cross_features=8)
    config.data.update(source="tsv:{table}", vocab_size=320, length=40, batch_tokens=96, buckets=2, {data})
    config.accumulate = 2
    config.label_smoothing = 0.1
    config.optimizer.update(schedule="inverse_sqrt", warmup_steps=4)
    config.log_every = 1
    config.checkpoint_every = 2
    config.average_checkpoints = 3
    return config
"""


def pairs_config(tmp_path, data=""):
    from t2r.data.pairs import number_pairs

    table = tmp_path / "pairs.tsv"
    table.write_text("".join(f"{s}\t{t}\n" for s, t in number_pairs(1000)[:600]))
    path = tmp_path / "pairs.py"
    path.write_text(PAIRS.format(table=table, data=data))
    return path


def kill_when(process, condition):
    """kill -9 as soon as the condition holds; True if the process was still alive then."""
    while process.poll() is None:
        if condition():
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
            return True
        time.sleep(0.001)
    return False


@pytest.mark.slow
def test_killed_runs_resume_exactly(config_file, tmp_path):
    """kill -9 several times: between steps, while a checkpoint is being written, and right after one."""
    whole = train(config_file, tmp_path / "whole")
    assert whole.returncode == 0, whole.stderr
    expected = losses(tmp_path / "whole")
    assert len(expected) == 24

    workdir = tmp_path / "killed"
    folder = workdir / "checkpoints"
    rng = random.Random(0)

    def logged():
        return len(losses(workdir))

    def writing():  # orbax writes under a temporary name
        return folder.exists() and any("tmp" in p.name for p in folder.iterdir())

    moments = [
        lambda: logged() >= 2,  # before the first checkpoint
        writing,
        lambda: logged() >= 8 + rng.randrange(3),
        lambda: writing() and logged() >= 12,
    ]
    kills = 0
    for moment in moments:
        process = subprocess.Popen(
            command(config_file, workdir),
            env=environment(),
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        kills += kill_when(process, moment)
    assert kills == 4
    final = train(config_file, workdir)
    assert final.returncode == 0, final.stderr
    assert losses(workdir) == expected
    result, reference = (json.loads(run.stdout.splitlines()[-1]) for run in (final, whole))
    assert result["valid_perplexity"] == reference["valid_perplexity"]
    steps = [line["step"] for line in read_metrics(workdir / "metrics.jsonl") if "loss" in line]
    assert steps == sorted(set(steps)), "each step is logged once"


@pytest.mark.slow
def test_killed_runs_on_pairs_resume_exactly_and_average_their_checkpoints(tmp_path):
    """The final model is the mean of the parameters of the last checkpoints."""
    config_file = pairs_config(tmp_path)
    whole = train(config_file, tmp_path / "whole")
    assert whole.returncode == 0, whole.stderr
    assert "of which is padding" in whole.stderr and "steps 6, 8, 9" in whole.stderr
    workdir = tmp_path / "killed"
    process = subprocess.Popen(
        command(config_file, workdir), env=environment(), cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    assert kill_when(process, lambda: len(losses(workdir)) >= 5)
    final = train(config_file, workdir)
    assert final.returncode == 0, final.stderr
    assert losses(workdir) == losses(tmp_path / "whole") and len(losses(workdir)) == 9
    exported, reference = (
        load_file(folder / "model" / "model.safetensors") for folder in (workdir, tmp_path / "whole")
    )
    restored = [checkpoint_arrays(workdir / "checkpoints" / step) for step in ("6", "8", "9")]
    for name, array in exported.items():
        np.testing.assert_array_equal(array, reference[name])
        np.testing.assert_allclose(array, np.mean([arrays[name] for arrays in restored], 0), rtol=1e-5, atol=1e-7)


def checkpoint_arrays(folder):
    """Parameters read with orbax, without t2r."""
    import orbax.checkpoint as ocp

    state = ocp.StandardCheckpointer().restore(folder / "state")
    return {name: np.asarray(array) for name, array in {**state["trained"], **state["frozen"]}.items()}


def test_data_and_model_must_agree(tmp_path, text_file):
    """Also: two tokenizers mean two embeddings."""
    name = str(pairs_config(tmp_path, "joint_tokenizer=False, source_vocab_size=310"))
    for field, value, message in [
        ("source", f"text:{text_file}", "is text, but the model is a translation model: it needs pairs"),
        ("length", 2, "data.length=2: of 575 pairs none is that short"),
    ]:
        config = load_config(name)
        config.data[field] = value
        with pytest.raises(InputError, match=message):
            trainer.train(config, tmp_path / "run")
    model, tokenizer, *_ = build(load_config(name), tmp_path / "built")
    assert (model.config.source_vocab_size, model.config.vocab_size) == (310, 320) and not tokenizer.joint
    assert not model.config.shared_embedding


@pytest.mark.slow
def test_a_run_survives_sigterm_a_damaged_checkpoint_and_another_mesh(config_file, tmp_path):
    """Stopped on four devices, its newest checkpoint truncated, resumed on two: the losses of one device."""
    workdir, constant = tmp_path / "run", "--config.optimizer.schedule=constant"

    def devices(count):
        flags = environment()["XLA_FLAGS"] + f" --xla_force_host_platform_device_count={count}"
        return {**environment(), "XLA_FLAGS": flags}

    mesh = ["--config.mesh.data=1", "--config.mesh.fsdp=2", "--config.mesh.tensor=2", "--config.steps=5000"]
    process = subprocess.Popen(
        command(config_file, workdir, constant, *mesh), env=devices(4), cwd=ROOT, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    while len(losses(workdir)) < 7 and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGTERM and "stopped by SIGTERM after step" in errors, errors
    stopped = max(losses(workdir))
    assert str(stopped) in [path.name for path in (workdir / "checkpoints").iterdir()]

    truncate(workdir / "checkpoints" / str(stopped))
    steps = f"--config.steps={stopped + 3}"
    final = subprocess.run(
        command(config_file, workdir, constant, "--config.mesh.fsdp=2", steps), env=devices(2), cwd=ROOT,
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert final.returncode == 0, final.stderr
    assert f"the checkpoint of step {stopped} is damaged" in final.stderr and "continuing at step" in final.stderr
    assert list((workdir / "checkpoints.damaged").iterdir()), "damaged checkpoints are not deleted"
    whole = train(config_file, tmp_path / "whole", constant, steps)
    assert whole.returncode == 0, whole.stderr
    actual, expected = losses(workdir), losses(tmp_path / "whole")
    assert actual.keys() == expected.keys()
    np.testing.assert_allclose(list(actual.values()), list(expected.values()), rtol=1e-4)

    truncate(workdir / "checkpoints")
    before = sorted(path.name for path in (workdir / "checkpoints").iterdir())
    lost = train(config_file, workdir, constant, steps)
    assert lost.returncode == 2 and "no checkpoint in" in lost.stderr, lost.stderr
    assert f"step {stopped + 3}:" in lost.stderr
    assert sorted(path.name for path in (workdir / "checkpoints").iterdir()) == before


@pytest.mark.slow
def test_a_damaged_checkpoint_is_reported_in_one_line(config_file, tmp_path):
    """Its arrays are read at the same time; what the others report after the first error is of no use."""
    workdir, steps = tmp_path / "run", ["--config.steps=6", "--config.eval_every=0"]
    assert train(config_file, workdir, *steps).returncode == 0
    truncate(workdir / "checkpoints" / "6" / "state" / "ocdbt.process_0" / "d")
    again = train(config_file, workdir, *steps)
    assert again.returncode == 0 and "the checkpoint of step 6 is damaged" in again.stderr
    assert "Event loop" not in again.stderr and len(again.stderr.splitlines()) < 8, again.stderr


def test_other_errors_of_threads_are_reported(capsys):
    def raise_elsewhere():
        raise RuntimeError("Event loop is closed")

    with quiet_libraries():
        try:
            raise_elsewhere()
        except RuntimeError as error:
            sys.excepthook(RuntimeError, error, error.__traceback__)
    assert "RuntimeError: Event loop is closed" in capsys.readouterr().err


@pytest.mark.parametrize("module, reported", [("orbax.checkpoint.reads", 0), ("elsewhere", 1)])
def test_of_reads_that_python_ends_only_those_of_orbax_are_silent(module, reported, monkeypatch):
    failures, names = [], {"__name__": module}
    monkeypatch.setattr(sys, "unraisablehook", lambda failure: failures.append(str(failure.exc_value)))
    exec(READ, names)
    with quiet_libraries():
        read = names["read"]()
        read.send(None)
        del read
    assert failures == ["cannot read"] * reported


READ = """
import types

@types.coroutine
def wait():
    yield

async def read():
    try:
        await wait()
    except BaseException as error:
        raise Exception("cannot read") from error
"""


def truncate(folder):
    """Cuts every file in half."""
    for path in folder.rglob("*"):
        if path.is_file():
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def test_a_run_resumes_with_more_steps_but_not_with_another_config(config_file, tmp_path, capsys):
    workdir = tmp_path / "run"

    def run(**fields):
        config = load_config(str(config_file))
        config.optimizer.schedule = "constant"
        config.update(fields)
        config.mesh.data = 1
        return trainer.train(config, workdir)

    with pytest.raises(InputError, match="fewer than"):
        run(data=dict(batch=4000))
    run(steps=4)  # a config that failed before its first step does not count as the config of the run
    assert run(steps=6)["steps"] == 6 and "continuing at step 4 of 6" in capsys.readouterr().err
    with pytest.raises(InputError, match=r"config.seed was 0, is 7(.|\n)*config.accumulate was 2, is 1") as raised:
        run(seed=7, accumulate=1, data=dict(length=16))
    assert "config.data.length was 32, is 16" in str(raised.value) and str(raised.value).count(" was ") == 3
    metrics = (workdir / "metrics.jsonl").read_text()
    with pytest.raises(InputError, match=r"is at step 6, beyond config\.steps=5"):
        run(steps=5)
    assert (workdir / "metrics.jsonl").read_text() == metrics
    with exclusive(workdir), pytest.raises(InputError, match="another run is using"):
        run(steps=7)
    provenance = json.loads((workdir / "model" / "provenance.json").read_text())
    assert [entry["action"] for entry in provenance["history"]] == ["swap", "train"]
    assert list((workdir / "tensorboard").glob("events*"))


def cosine_config(config_file, steps, period):
    config = load_config(str(config_file))
    config.steps, config.mesh.data = steps, 1
    config.optimizer.update(warmup_steps=2, period=period)
    return config


def test_more_steps_do_not_stretch_a_schedule_in_silence(config_file, tmp_path):
    """A cosine over all steps depends on their number: the error names the two values of config.optimizer.period."""
    trainer.write_config(cosine_config(config_file, 5, 0), tmp_path)
    with pytest.raises(InputError, match=r"steps was 5, is 8(.|\n)*period=3 to keep(.|\n)*period=6 to span") as raised:
        trainer.check_same_run(cosine_config(config_file, 8, 0), tmp_path, 5)
    assert "after step 5 would be 0.000505 instead of 1e-05" in str(raised.value)
    for steps, period in [(5, 0), (8, 3), (8, 6)]:
        trainer.check_same_run(cosine_config(config_file, steps, period), tmp_path, 5)
    trainer.write_config(cosine_config(config_file, 8, 3), tmp_path)
    with pytest.raises(InputError, match=r"config.optimizer.period was 3, is 6"):
        trainer.check_same_run(cosine_config(config_file, 8, 6), tmp_path, 5)


@pytest.mark.slow
def test_more_steps_keep_the_schedule_with_the_period_that_the_error_names(config_file, tmp_path):
    workdir = tmp_path / "run"

    def run(steps, period):
        trainer.train(cosine_config(config_file, steps, period), workdir)
        return [line["learning_rate"] for line in read_metrics(workdir / "metrics.jsonl") if "loss" in line]

    first = run(5, 0)
    with pytest.raises(InputError, match="period=3 to keep"):
        run(8, 0)
    assert run(5, 0) == first
    rates = run(8, 3)
    schedule = make_schedule(cosine_config(config_file, 8, 3).optimizer, 8)
    assert rates[:5] == first and rates == pytest.approx([float(schedule(step)) for step in range(8)])
    assert run(8, 3) == rates


@jax.jit
def slow_to_trace(x):
    time.sleep(0.5)
    return x + 1


def test_tokens_per_second_counts_neither_validation_nor_saving_nor_compilation(config_file, tmp_path):
    config = load_config(str(config_file))
    log = trainer.Log(config, tmp_path, make_stages(config, make_model(micro()), None), 0)
    log.add(1, {"loss": jnp.ones(()), "tokens": jnp.array(1000)})
    time.sleep(0.05)
    with log.not_timed():
        time.sleep(0.5)
    slow_to_trace(np.ones(3)).block_until_ready()
    log.check_finite(Checkpoints(tmp_path / "checkpoints", 1))
    shown = log.write(1)
    log.metrics.close()
    (line,) = read_metrics(tmp_path / "metrics.jsonl")
    assert 1000 / 0.5 < line["tokens_per_second"] <= 1000 / 0.05
    assert line["steps_per_second"] == pytest.approx(line["tokens_per_second"] / 1000, rel=1e-3)
    assert shown == {
        "loss": 1.0,
        "learning_rate": line["learning_rate"],
        "tokens_per_s": line["tokens_per_second"],
    }


def test_a_run_is_at_most_two_steps_ahead_of_its_device(config_file, tmp_path, monkeypatch):
    """Otherwise SIGTERM, on a slow device, would have to wait for all steps that were begun: up to a log interval."""
    begun, done = 0, 0
    make_step, wait = trainer.make_step, jax.block_until_ready

    def counting(*arguments):
        one_step = make_step(*arguments)

        def step(*inputs):
            nonlocal begun
            begun += 1
            assert begun - done <= 1 + trainer.STEPS_AHEAD
            return one_step(*inputs)

        return step

    def count(result):
        nonlocal done
        done += 1
        return wait(result)

    monkeypatch.setattr(trainer, "make_step", counting)
    monkeypatch.setattr(trainer.jax, "block_until_ready", count)
    config = load_config(str(config_file))
    config.update(steps=8, log_every=8, eval_every=0, checkpoint_every=8)
    config.data.batch = 16  # on the eight devices of this process
    trainer.train(config, tmp_path / "run")
    assert begun == 8 and done >= 6


def test_a_loss_that_is_not_finite_stops_the_run(config_file, tmp_path):
    """Step 1 makes parameters so large that step 2 overflows; the checkpoint of step 1 stays, no model is written."""
    workdir = tmp_path / "run"
    bad = dict(learning_rate=1e30, warmup_steps=0, clip_norm=0.0)
    run = train(
        config_file, workdir, "--config.checkpoint_every=1", *(f"--config.optimizer.{k}={v}" for k, v in bad.items())
    )
    assert run.returncode == 2 and "Traceback" not in run.stderr, run.stderr
    assert "step 2" in run.stderr and "config.optimizer.learning_rate (now 1e+30)" in run.stderr
    assert f"the checkpoint of step 1 in {workdir}" in run.stderr
    assert [path.name for path in (workdir / "checkpoints").iterdir()] == ["1"]
    assert not (workdir / "model").exists()


@pytest.mark.parametrize(
    ("flags", "messages"),
    [
        (["--config.stpes=3", "--config.data.bacth=1"], ["'stpes': did you mean 'steps'", "'data.bacth'"]),
        (["--config.model.dropuot=0.1"], ["'model.dropuot': did you mean 'model.dropout'"]),
        (["--config.steps=soon"], ["--config.steps=soon"]),
        (["--config.convert.feature_map=t2rr"], ["'t2rr'", "performer"]),
        (["--config.convert.features=-1", "--config.log_every=0"], ["convert.features=-1", "config.log_every=0"]),
        (["--config.data.length=1"], ["config.data.length=1 must be at least 2"]),
        (["--config.optimizer.b1=2.0"], ["config.optimizer.b1=2.0 must be at least 0 and below 1"]),
        (
            ["--config.optimizer.learning_rate=-1.0", "--config.optimizer.min_learning_rate=-0.5"],
            ["optimizer.learning_rate=-1.0 must be above 0", "optimizer.min_learning_rate=-0.5 must be at least 0"],
        ),
        (["--config.optimizer.weight_decay=-0.1"], ["config.optimizer.weight_decay=-0.1 must be at least 0"]),
        (["--config.optimizer.weight_decay=nan"], ["config.optimizer.weight_decay=nan must be at least 0"]),
        (["--config.optimizer.period_growth=0.0"], ["config.optimizer.period_growth=0.0 must be above 0"]),
        (["--config.seed=-1"], ["config.seed=-1 must be at least 0 and at most 4294967295"]),
        (["--config.seed=18446744073709551616"], ["config.seed=18446744073709551616 must be at least 0"]),
        (["--config.model.heads=3"], ["width=32 is not a multiple of heads=3: set head_dim"]),
        (["--config.accumulate=3"], ["config.data.batch=4", "config.accumulate=3"]),
        (["--config.data.source=text:/no/such/file"], ["no text file /no/such/file"]),
        (["--config.data.batch=4000"], ["fewer than data.batch=4000"]),
        (["--config.init_from=/nowhere"], ["config.init_from"]),
    ],
)
def test_bad_configs_get_one_clear_error(config_file, tmp_path, call, flags, messages):
    status, printed = call("train", f"--config={config_file}", f"--workdir={tmp_path}/run", *flags)
    assert status == 2 and printed.startswith("error: ")
    for message in messages:
        assert message in printed
    assert not list(tmp_path.glob("run/checkpoints/*"))


def test_a_work_directory_that_is_a_file_is_refused(config_file, tmp_path, call):
    (tmp_path / "file").write_text("kept")
    for workdir in ("file", "file/run"):
        status, printed = call("train", f"--config={config_file}", f"--workdir={tmp_path}/{workdir}")
        assert status == 2 and len(printed.splitlines()) == 1
        assert printed.startswith(f"error: cannot write {tmp_path}/{workdir}: ")
    assert (tmp_path / "file").read_text() == "kept"


def test_a_config_that_is_not_a_python_file_is_refused(text_file, tmp_path, call):
    status, printed = call("train", f"--config={text_file}", f"--workdir={tmp_path}/run")
    assert status == 2 and f"{text_file} is not a config" in printed


def test_an_error_in_a_config_file_names_the_file(tmp_path, call):
    path = tmp_path / "config.py"
    path.write_text(
        "from t2r.training.config import default_config\n\n"
        "def get_config():\n    c = default_config()\n    c.stpes = 3\n"
    )
    status, printed = call("train", f"--config={path}", f"--workdir={tmp_path}/run")
    assert status == 2 and "config.py" in printed and "stpes" in printed
    status, printed = call("train", f"--config={tmp_path}/none.py", f"--workdir={tmp_path}/run")
    assert status == 2 and "no config file" in printed


@pytest.mark.slow
def test_a_full_disk_stops_the_run_and_loses_nothing(config_file, tmp_path, small_disk):
    """With more space it resumes, and its losses equal those of a run with enough space."""
    workdir, keep, steps = small_disk / "run", "--config.keep_checkpoints=100", "--config.steps=60"
    stopped = train(config_file, workdir, keep, steps)
    assert stopped.returncode == 2, stopped.stderr
    assert f"error: the disk of {workdir} is full" in stopped.stderr
    saved = sorted(int(path.name) for path in (workdir / "checkpoints").iterdir())
    assert saved and f"Intact: the checkpoints of steps {', '.join(map(str, saved))}." in stopped.stderr
    subprocess.run(["mount", "-o", "remount,size=40m", small_disk], check=True)
    final, whole = train(config_file, workdir, keep, steps), train(config_file, tmp_path / "whole", keep, steps)
    assert final.returncode == whole.returncode == 0, final.stderr
    assert f"continuing at step {saved[-1]} of 60" in final.stderr
    assert losses(workdir) == losses(tmp_path / "whole")

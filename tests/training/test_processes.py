"""Two real processes that train one model: they equal one process, and a killed one ends the other with a message."""

import json
import os
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.training.runs import ROOT, command, environment, losses, train

MESH = ["--config.mesh.data=1", "--config.mesh.fsdp=2", "--config.mesh.tensor=2", "--config.optimizer.eps=1e-3"]


def unused_port():
    with socket.socket() as unused:
        unused.bind(("localhost", 0))
        return unused.getsockname()[1]


def start(config_file, workdir, *more, count=2):
    """Starts one run in several processes with two devices each."""
    env = environment()
    env["XLA_FLAGS"] += " --xla_force_host_platform_device_count=2"
    distributed = [f"--coordinator=localhost:{unused_port()}", f"--processes={count}"]
    return [
        subprocess.Popen(
            command(config_file, workdir, *MESH, *more, *distributed, f"--process={number}"), env=env, cwd=ROOT,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for number in range(count)
    ]  # fmt: skip


def finish(processes):
    """(status, output lines, errors) of each process."""
    results = []
    for process in list(processes):
        out, errors = process.communicate(timeout=200)
        results.append((process.returncode, out.splitlines(), errors))
    return results


def wait_for_steps(processes, workdir, count):
    while len(losses(workdir)) < count and all(process.poll() is None for process in processes):
        time.sleep(0.01)


@pytest.mark.slow
def test_two_processes_equal_one(config_file, tmp_path):
    """Stopped by SIGTERM to one process, resumed by two, then by one: losses and model are those of one process."""
    workdir, constant = tmp_path / "two", "--config.optimizer.schedule=constant"
    processes = start(config_file, workdir, constant, "--config.steps=5000")
    wait_for_steps(processes, workdir, 11)
    processes[1].send_signal(signal.SIGTERM)
    for status, out, errors in finish(processes):
        assert status == 128 + signal.SIGTERM and not out, errors
    stopped = max(losses(workdir))
    assert str(stopped) in [path.name for path in (workdir / "checkpoints").iterdir()]

    steps = f"--config.steps={stopped + 2}"
    first, second = finish(start(config_file, workdir, constant, steps))
    assert first[0] == second[0] == 0, first[2] + second[2]
    assert f"continuing at step {stopped} of" in first[2] and "validation" not in second[2]
    assert json.loads(first[1][-1])["steps"] == stopped + 2 and not second[1]

    again = train(config_file, workdir, constant, "--config.optimizer.eps=1e-3", f"--config.steps={stopped + 4}")
    assert again.returncode == 0, again.stderr
    reference = tmp_path / "one"
    one = train(config_file, reference, constant, "--config.optimizer.eps=1e-3", f"--config.steps={stopped + 4}")
    assert one.returncode == 0, one.stderr
    actual, expected = losses(workdir), losses(reference)
    assert actual.keys() == expected.keys()
    np.testing.assert_allclose(list(actual.values()), list(expected.values()), rtol=1e-5)
    arrays, expected_arrays = (load_file(path / "model" / "model.safetensors") for path in (workdir, reference))
    for name in expected_arrays:
        np.testing.assert_allclose(arrays[name], expected_arrays[name], atol=1e-5)


@pytest.mark.slow
def test_two_processes_keep_the_layers_that_one_keeps(config_file, tmp_path):
    """The first process measures the damage; all need its result. A second run in the same folder does not measure."""
    plan = ["--config.convert.keep=auto:1", "--config.convert.window=3", "--config.convert.sinks=1", "--config.steps=2"]
    for status, _, errors in finish(start(config_file, tmp_path / "two", *plan)):
        assert status == 0, errors
    one = train(config_file, tmp_path / "one", *plan, *MESH[-1:])
    assert one.returncode == 0, one.stderr
    swaps = [
        json.loads((tmp_path / name / "model" / "provenance.json").read_text())["history"][0] for name in ("one", "two")
    ]
    assert swaps[0]["keep"] == swaps[1]["keep"] and swaps[0]["asked"] == {"keep": "auto:1"}
    (folder,) = (tmp_path / "one").glob("damage-*")
    measured = (folder / "damage.json").stat().st_mtime_ns
    again = train(config_file, tmp_path / "one", *plan[:-1], *MESH[-1:], "--config.steps=3")
    assert again.returncode == 0 and (folder / "damage.json").stat().st_mtime_ns == measured, again.stderr


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_process_that_is_killed_ends_the_other_with_a_message(config_file, tmp_path, victim):
    processes = start(config_file, tmp_path / "run", "--config.steps=5000")
    wait_for_steps(processes, tmp_path / "run", 4)
    os.kill(processes[victim].pid, signal.SIGKILL)
    survivor = finish(processes)[1 - victim]
    assert survivor[0] != 0
    assert "has lost another one" in survivor[2] or "another task died" in survivor[2], survivor[2]
    assert max(losses(tmp_path / "run")) >= 4


FAILS = """
import sys

import jax

from t2r import processes

processes.join(sys.argv[1], 2, int(sys.argv[2]))
with processes.exit_together():
    processes.barrier("both are here")
    if sys.argv[2] == "1":
        raise {error}
    processes.barrier("only one gets here")
"""


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        ("ValueError('no connection of ideas')", 1, "has failed (ValueError: no connection of ideas)"),
        ("jax.errors.JaxRuntimeError('RESOURCE_EXHAUSTED: Gloo: out of memory')", 1, "RESOURCE_EXHAUSTED"),
        ("MemoryError()", 1, "has failed (MemoryError: MemoryError)"),
        ("processes.InputError('bad input')", 2, "process 1 of 2: error: bad input"),
    ],
)
def test_only_a_lost_connection_has_the_status_of_one(tmp_path, error, status, message):
    """A process that fails by itself ends with its own status and message; its partner with 75."""
    script = tmp_path / "fails.py"
    script.write_text(FAILS.format(error=error))
    address = f"localhost:{unused_port()}"
    first, second = finish(
        subprocess.Popen([sys.executable, script, address, str(number)], env=environment(), cwd=ROOT,
                         stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for number in range(2)
    )  # fmt: skip
    assert second[0] == status and message in second[2] and "has lost another" not in second[2], second[2]
    assert first[0] == 75 and "process 0 of 2 has lost another one" in first[2], first[2]


def test_an_error_in_one_process_ends_both(config_file, tmp_path):
    for status, _, errors in finish(start(config_file, tmp_path / "run", "--config.data.batch=4000")):
        messages = {2: "fewer than data.batch=4000", 75: "has lost another one"}
        assert messages[status] in errors, errors

"""The launch scripts, against fake gcloud, sbatch and kubectl commands that record their arguments."""

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import jax
import pytest
import yaml

ROOT = Path(__file__).parents[2]
SCRIPTS = ["setup", "local", "slurm", "gke", "tpu", "quickstart", "test", "prepare_data", "enwik8", "tatoeba", "h200"]
RUN = ["--", "train", "--config=configs/tiny_lm.py:t2r", "--workdir=/data/my runs/o'clock"]

FAKE_COMMAND = """#!/usr/bin/env bash
printf '%s' "$(basename "$0")" >>"$CALLS"; [ $# = 0 ] || printf ' %q' "$@" >>"$CALLS"; echo >>"$CALLS"
case "$*" in
  *describe*) head -1 "$STATES"; sed -i 1d "$STATES" ;;  # prints the next state of the list
esac
if [ "$(basename "$0")" = sbatch ] || [[ "$*" == *"-f -"* ]]; then cat >"$CALLS.input"; fi
"""


@pytest.fixture
def cloud(tmp_path):
    """A copy of the launch scripts with fake commands on the path: (function that runs a script, tmp_path)."""
    tree, tools = tmp_path / "tree", tmp_path / "tools"
    shutil.copytree(ROOT / "launch", tree / "launch")
    tools.mkdir()
    for name in ("gcloud", "sbatch", "kubectl", "git", "scontrol"):
        (tools / name).write_text(FAKE_COMMAND)
        (tools / name).chmod(0o755)
    calls, states = tmp_path / "calls", tmp_path / "states"
    calls.touch()
    env = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}", "CALLS": str(calls), "STATES": str(states)}
    env["T2R_POLL_SECONDS"] = "0"

    def launch(*arguments, reported=()):
        states.write_text("".join(f"{state}\n" for state in reported))
        calls.write_text("")
        done = subprocess.run(
            [f"launch/{arguments[0]}", *arguments[1:]], cwd=tree, env=env, capture_output=True, text=True
        )
        return done, calls.read_text().splitlines()

    return launch, tmp_path


@pytest.mark.skipif(not shutil.which("shellcheck"), reason="shellcheck is not installed")
def test_shellcheck_passes():
    scripts = [f"launch/{name}" for name in SCRIPTS] + [".ci/run"]
    check = subprocess.run(["shellcheck", "-x", *scripts], cwd=ROOT, capture_output=True, text=True)
    assert check.returncode == 0, check.stdout


def test_a_tpu_slice_is_created_set_up_run_resumed_and_deleted(cloud):
    launch, _ = cloud
    slice_ = ["--name=n", "--zone=z", "--project=p"]
    done, calls = launch("tpu", "create", *slice_, "--type=v5litepod-16", "--spot")
    assert done.returncode == 0, done.stderr
    runtime = "--version=v2-alpha-tpuv5-lite"
    assert calls == [f"gcloud compute tpus tpu-vm create n --accelerator-type=v5litepod-16 {runtime} --spot --zone=z "
                     "--project=p"]  # fmt: skip
    _, calls = launch("tpu", "setup", *slice_, "--bucket=b")
    assert calls[0].startswith("git archive") and "scp runs/launch/tree.tar.gz n:t2r.tar.gz --worker=all" in calls[1]
    assert "gcsfuse" in calls[2] and "launch/setup\\ tpu" in calls[2] and "--worker=all" in calls[2]
    done, calls = launch("tpu", "start", *slice_, *RUN)
    assert (
        done.returncode == 0 and len(calls) == 1 and "--coordinator=auto" in calls[0] and "tiny_lm.py:t2r" in calls[0]
    )
    _, calls = launch("tpu", "log", *slice_)
    assert "--worker=0" in calls[0] and "run.log" in calls[0]

    done, calls = launch("tpu", "resume", *slice_, reported=["READY"])
    assert len(calls) == 1 and "describe" in calls[0] and "n: READY" in done.stdout
    done, calls = launch("tpu", "resume", *slice_, reported=["PREEMPTED", "CREATING", "READY"])
    assert done.returncode == 0, done.stderr
    actions = ["describe", "delete", "create", "describe", "describe", "archive", "scp", "ssh", "ssh"]
    assert len(calls) == len(actions) and all(action in call for action, call in zip(actions, calls)), calls
    assert "--spot" in calls[2] and "gcsfuse" in calls[7] and "my" in calls[8] and "tiny_lm.py:t2r" in calls[8]
    _, calls = launch("tpu", "delete", *slice_)
    assert calls == ["gcloud compute tpus tpu-vm delete n --quiet --zone=z --project=p"]


def test_queued_resources(cloud):
    launch, _ = cloud
    _, calls = launch("tpu", "create", "--name=n", "--zone=z", "--type=v3-32", "--queued")
    assert calls == ["gcloud compute tpus queued-resources create n --node-id=n --accelerator-type=v3-32 "
                     "--runtime-version=tpu-ubuntu2204-base --zone=z"]  # fmt: skip
    _, calls = launch("tpu", "delete", "--name=n", "--zone=z")
    assert "queued-resources delete n --force" in calls[0]


@pytest.fixture
def worker(cloud, tmp_path):
    """Runs locally what ssh would run on a worker: (function of the body of a fake python, flags and run; its folder).

    The body runs with `tries` set to the number of this try. The function returns (status, the arguments of each try).
    """
    launch, _ = cloud
    home = tmp_path / "home" / "t2r"
    shutil.copytree(ROOT / "launch", home / "launch")

    def run(body, *flags, run=RUN):
        _, calls = launch("tpu", "start", "--name=n", "--zone=z", *flags, *run)
        quoted = calls[0].split("--command=")[1].split(" --zone=")[0]
        script = subprocess.run(["bash", "-c", f"printf %s {quoted}"], capture_output=True, text=True).stdout
        fake_python(home, body)
        done = subprocess.run(["bash", "-c", f"{script}\nwait $!"], cwd=home.parent, timeout=20,
                              env={**os.environ, "T2R_RETRY_SECONDS": "0"})  # fmt: skip
        return done.returncode, (home / "words").read_text().splitlines()

    return run, home


def fake_python(tree, body):
    """Writes tree/.venv/bin/python: it appends its arguments as a line to `words`, then runs `body`."""
    python = tree / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True, exist_ok=True)
    count = 'printf "%s|" "$@" >>words; echo >>words; tries=$(wc -l <words)'
    python.write_text(f"#!/usr/bin/env bash\n{count}\n{body}\n")
    python.chmod(0o755)


GAINS = ["--", "train", "--workdir=runs/my run"]
GAIN = 'mkdir -p "runs/my run/checkpoints/$((tries * 100))"; '


def test_the_command_of_the_workers_is_quoted_correctly(worker):
    """A path with a space stays one argument, and exit status 75 restarts the run."""
    run, _ = worker
    status, words = run("[ $tries = 2 ] || exit 75")
    assert status == 0 and words == ["-m|t2r|" + "|".join(RUN[1:]) + "|--coordinator=auto|"] * 2


@pytest.mark.parametrize(
    ("body", "flags", "status", "tries", "message"),
    [
        (GAIN + "exit 75", ["--retries=3"], 75, 4, "it was already, 3 times (--retries=3)"),
        (GAIN + "exit 75", [], 75, 11, "(--retries=10); the newest checkpoint is of step 1100"),
        ("[ $tries -gt 3 ] || " + GAIN + "exit 75", [], 75, 4, "still that of step 300"),
        ("exit 75", [], 75, 2, "still that of step 0"),
        ("exit 1", [], 1, 1, ""),
        ("exit 143", [], 143, 1, ""),
    ],
)
def test_a_worker_tries_again_while_it_gains_steps(worker, body, flags, status, tries, message):
    run, home = worker
    ended, words = run(body, *flags, run=GAINS)
    assert (ended, len(words)) == (status, tries) and message in (home / "run.log").read_text()


@pytest.mark.parametrize(
    ("body", "flags", "requeues"),
    [
        (GAIN + "exit 75", ["--retries=2"], 2),
        (GAIN + "[ $tries = 6 ] || exit 143", ["--retries=2"], 5),  # time limits do not count
        ("exit 143", [], 1),
        ("exit 1", [], 0),
    ],
)
def test_a_slurm_job_is_requeued_while_it_gains_steps(cloud, body, flags, requeues):
    """Runs the job's script as SLURM would, until it is not requeued any more."""
    launch, tmp_path = cloud
    tree, tools = tmp_path / "tree", tmp_path / "tools"
    launch("slurm", "--nodes=2", *flags, *GAINS)
    script = (tmp_path / "calls.input").read_text()
    fake_python(tree, body)
    (tools / "srun").write_text('#!/usr/bin/env bash\n"$@"\n')
    (tools / "srun").chmod(0o755)
    calls = tmp_path / "calls"
    env = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}", "CALLS": str(calls), "SLURM_JOB_ID": "7"}
    for count in range(requeues + 1):
        assert not count or calls.read_text() == "scontrol requeue 7\n"
        calls.write_text("")
        subprocess.run(["bash"], input=script, text=True, cwd=tree, env=env, timeout=20)
    assert calls.read_text() == "" and len((tree / "words").read_text().splitlines()) == requeues + 1


def test_slurm_submits_a_job_that_requeues_itself(cloud):
    launch, tmp_path = cloud
    done, calls = launch("slurm", "--nodes=2", "--gpus=4", "--partition=gpu", "--time=1:00:00", *RUN)
    assert done.returncode == 0 and calls == ["sbatch"]
    script = (tmp_path / "calls.input").read_text()
    assert "--nodes=2 --ntasks-per-node=4 --gpus-per-node=4 --time=1:00:00" in script and "--partition=gpu" in script
    assert "--signal=TERM@120" in script and "scontrol requeue" in script and "--coordinator=auto" in script
    printed, calls = launch("slurm", "--nodes=2", "--gpus=4", "--partition=gpu", "--time=1:00:00", "--dry_run", *RUN)
    assert not calls and script.strip() in printed.stdout
    assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0


def test_gke_applies_a_job_set(cloud):
    launch, tmp_path = cloud
    flags = [
        "--name=n",
        "--image=i",
        "--type=tpu-v5-lite-podslice",
        "--topology=4x4",
        "--hosts=4",
        "--claim=c",
        "--spot",
    ]
    done, calls = launch("gke", "start", *flags, *RUN)
    assert done.returncode == 0 and calls == ["kubectl apply -f -"], done.stderr
    job_set = yaml.safe_load((tmp_path / "calls.input").read_text())
    job = job_set["spec"]["replicatedJobs"][0]["template"]["spec"]
    pod = job["template"]["spec"]
    assert job["parallelism"] == job["completions"] == 4 and job_set["spec"]["failurePolicy"]["maxRestarts"] == 100
    assert pod["containers"][0]["command"] == [".venv/bin/python", "-m", "t2r", *RUN[1:], "--coordinator=auto"]
    assert pod["nodeSelector"]["cloud.google.com/gke-spot"] == "true"
    assert pod["volumes"][0]["persistentVolumeClaim"]["claimName"] == "c"
    for action, verb in (("log", "logs"), ("status", "get"), ("delete", "delete")):
        _, calls = launch("gke", action, "--name=n")
        assert len(calls) == 1 and verb in calls[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tpu", "crate", "--name=n"], "choose one of create"),
        (["tpu", "create", "--name=n", "--zone=z"], "--type=... is missing"),
        (["tpu", "create", "--name=n", "--zone=z", "--typ=v3-8", "more"], "unknown: --typ=v3-8 more"),
        (["tpu", "start", "--name=n", "--zone=z"], "what to run is missing"),
        (["tpu", "resume", "--name=new", "--zone=z"], "has not done 'create'"),
        (["slurm", "--gpus=8", *RUN], "--nodes=... is missing"),
        (["slurm", "--nodes=2", "--retries=many", *RUN], "--retries=many is not a whole number"),
        (["tpu", "start", "--name=n", "--zone=z", "--retries=-1", *RUN], "--retries=-1 is not a whole number"),
        (["gke", "start", "--name=n", *RUN], "--image=... is missing"),
        (["setup", "abacus"], "choose cpu, tpu or cuda"),
    ],
)
def test_errors_name_the_mistake_and_nothing_runs(cloud, arguments, message):
    launch, _ = cloud
    done, calls = launch(*arguments, reported=["PREEMPTED"] * 2)
    assert done.returncode == 2 and message in done.stderr, done.stderr
    assert not [call for call in calls if "create" in call or "apply" in call or "sbatch" in call]


@pytest.mark.parametrize("script", ["tpu", "gke", "slurm", "local"])
def test_help_calls_no_command(cloud, script):
    launch, _ = cloud
    done, calls = launch(script, "--help")
    assert done.returncode == 0 and f"launch/{script}" in done.stdout and not calls


def test_dry_runs_print_what_would_run(cloud):
    launch, _ = cloud
    for action, more in (("create", ["--type=v6e-8"]), ("setup", []), ("start", RUN), ("resume", []), ("delete", [])):
        done, calls = launch("tpu", action, "--name=n", "--zone=z", "--dry_run", *more)
        assert done.returncode == 0 and not calls and done.stdout, action
    done, _ = launch("local", "--processes=2", "--port=7777", "--dry_run", *RUN)
    lines = done.stdout.splitlines()
    assert len(lines) == 2 and all("--coordinator=localhost:7777" in line and "my\\ runs" in line for line in lines)


def test_local_processes_stop_together(cloud):
    """SIGTERM to the script reaches all processes; the script exits with their status after the last one."""
    _, tmp_path = cloud
    tree = tmp_path / "tree"
    (tree / ".venv" / "bin").mkdir(parents=True)
    python = tree / ".venv" / "bin" / "python"
    python.write_text('#!/usr/bin/env bash\ntrap "sleep 0.3; touch stopped.$$; exit 143" TERM\ntouch up.$$\n'
                      'while :; do sleep 0.05; done\n')  # fmt: skip
    python.chmod(0o755)
    # Skips the creation of the Python environment: this test is about processes.
    (tree / "launch" / "environment.sh").write_text("make_environment() { :; }\n")
    process = subprocess.Popen(["launch/local", "--processes=3", *RUN], cwd=tree)
    deadline = time.monotonic() + 20
    while len(list(tree.glob("up.*"))) < 3 and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=20) == 143
    assert len(list(tree.glob("stopped.*"))) == 3


@pytest.mark.slow
def test_the_speed_tables_are_made_by_commands_that_exist(tmp_path, call):
    """Each is asked for a length or row that does not exist, so that it reads all flags and measures nothing."""
    calls, fake = tmp_path / "calls", tmp_path / "python"
    fake.write_text(f'#!/usr/bin/env bash\nprintf "%s\\t" "$@" >>{calls}; echo >>{calls}\n')
    fake.chmod(0o755)
    tables = ["kernel", "smollm2_135m", "smollm2_w64", "llama_1b", "paper", "prefill", "long"]
    command = [ROOT / "launch" / "h200", tmp_path / "out", *tables]
    subprocess.run(command, check=True, env=os.environ | {"PYTHON": str(fake)})
    is_there_a_gpu, kernel, *commands = [line.strip("\t").split("\t") for line in calls.read_text().splitlines()]
    assert is_there_a_gpu[0] == "-c" and Path(kernel[0]).is_file() and len(commands) == 10
    for command in commands:
        assert command[:2] == ["-m", "t2r"]
        status, printed = call(*command[2:], "--row=none" if command[3] == "long" else "--lengths=none")
        assert status == 2 and "none" in printed, printed


def test_speed_tables_that_do_not_exist_are_refused(tmp_path):
    command = [ROOT / "launch" / "h200", tmp_path / "out", "paper", "lama", "alpaca"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and "no table lama alpaca; choose from: kernel" in done.stderr


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="there is a GPU or TPU")
def test_speed_tables_need_a_gpu(tmp_path):
    done = subprocess.run([ROOT / "launch" / "h200", tmp_path / "out", "paper"], capture_output=True, text=True)
    assert done.returncode == 2 and "JAX finds none" in done.stderr and not (tmp_path / "out").exists()

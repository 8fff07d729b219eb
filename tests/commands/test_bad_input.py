"""Bad arguments and disks that cannot be written: one clear error, no traceback, and nothing half-written."""

import contextlib
import os
import subprocess
import sys

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.commands.test_commands import ROOT, t2r
from tests.conftest import slow_but
from tests.damages import DAMAGES, snapshot


@pytest.fixture
def inputs(tmp_path):
    """A folder with inputs for all commands."""
    folder = tmp_path / "inputs"
    folder.mkdir()
    np.savez(folder / "ids.npz", input_ids=np.arange(8).reshape(1, 8), decoder_input_ids=np.arange(8).reshape(1, 8))
    (folder / "lines.txt").write_text("six\n")
    (folder / "pairs.tsv").write_text("six\tsechs\n")
    return folder


def writers(lm, translator, inputs, output) -> dict[str, list[str]]:
    """A command line for each output that a command can write."""
    compiled = ["--config=tiny_lm", "--topology=v2:2x2"]
    trained = ["--config=tiny_lm", "--config.data.batch=1", "--config.data.length=8", "--steps=1"]
    return {
        "convert": ["convert", f"--model={lm}", f"--output={output}"],
        "finetune": ["convert", f"--model={lm}", f"--output={output}", "--finetune"],
        "export": ["export", f"--model={translator}", f"--output={output}", "--capacity=8"],
        "generate": ["generate", f"--model={lm}", "--length=1", f"--save_state={output}"],
        "translate": ["translate", f"--model={translator}", f"--input={inputs}/lines.txt", f"--output={output}"],
        "evaluate": ["evaluate", f"--model={translator}", f"--data=tsv:{inputs}/pairs.tsv", f"--output={output}"],
        "logits": ["evaluate", f"--model={translator}", f"--logits={inputs}/ids.npz:{output}"],
        "memory": ["benchmark", "memory", "--preset=micro_lm", "--lengths=4", "--batch=1", f"--output={output}"],
        "compile": ["benchmark", "compile", *compiled, f"--output={output}"],
        "train speed": ["benchmark", "train", *trained, f"--output={output}"],
        "train": ["train", "--config=tiny_lm", f"--workdir={output}"],
        "quickstart": ["quickstart", f"--workdir={output}"],
    }


OUTPUTS = list(writers("", "", "", ""))


@pytest.mark.parametrize("name", slow_but(OUTPUTS, "convert", "generate", "translate", "logits", "train"))
def test_an_output_that_cannot_be_written_is_refused(saved_lm, saved_translator, inputs, call, name):
    """A path below a file, as on a read-only disk: no user, not even root, can write there."""
    before = snapshot(inputs)
    command = writers(saved_lm, saved_translator, inputs, inputs / "lines.txt" / "out")[name]
    status, printed = call(*command)
    assert status == 2 and "cannot write" in printed and "lines.txt" in printed, printed
    assert snapshot(inputs) == before


@pytest.mark.parametrize(
    "name",
    slow_but(["convert", "export", "memory", "generate", "translate", "evaluate", "logits"], "convert", "logits"),
)
def test_nothing_is_left_on_a_full_disk(saved_lm, saved_translator, inputs, call, small_disk, name):
    (small_disk / "large").write_bytes(b"x")
    with contextlib.suppress(OSError), (small_disk / "large").open("ab", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    before = os.listdir(small_disk)
    status, printed = call(*writers(saved_lm, saved_translator, inputs, small_disk / "out")[name])
    assert status == 2 and "cannot write" in printed and "No space left" in printed, printed
    assert name == "memory" or os.listdir(small_disk) == before


def test_devices_stay_devices_and_links_stay_links(saved_lm, inputs, call, tmp_path):
    """A pipe stands for a device such as /dev/stdout."""
    (tmp_path / "target").touch()
    (tmp_path / "link").symlink_to("target")
    assert call(*writers(saved_lm, "", inputs, tmp_path / "link")["generate"])[0] == 0
    assert (tmp_path / "link").is_symlink() and (tmp_path / "target").stat().st_size > 100
    os.mkfifo(tmp_path / "pipe")
    reader = subprocess.Popen(["cat", tmp_path / "pipe"], stdout=subprocess.PIPE)
    assert call(*writers(saved_lm, "", inputs, tmp_path / "pipe")["generate"])[0] == 0
    assert reader.communicate(timeout=60)[0] == (tmp_path / "target").read_bytes()
    assert (tmp_path / "pipe").is_fifo()


@pytest.mark.parametrize(
    "arguments, messages",
    [
        (["generate", "--prompt=\udcff"], [r"'--prompt=\udcff' is not UTF-8 text"]),
        (["generate", f"--seed={2**70}"], [f"seed={2**70}", "4294967295"]),
        (["generate", "--seed=-1"], ["seed=-1"]),
        (["generate", "--length=x"], ["--length=x"]),
        (["generate", "stray"], ["unexpected arguments stray"]),
        (["generate", "--length=abc"], ["--length=abc: write a whole number"]),
        (["generate", "--no_such_flag"], ["no_such_flag"]),
        (
            ["generate", "--model=x", "--length=abc", "--temprature", "0.5"],
            ["--length=abc", "temprature", "temperature"],
        ),
        (["translate", "--beam=0", "--top_k=-1"], ["--beam=0", "--top_k=-1"]),
        (["translate", "--beam=0", "--n_best=2"], ["--beam=0"]),
        (["translate", "--model=absent", "--beam=2", "--n_best=3", "--input=absent.txt"], ["--n_best=3", "absent.txt"]),
        (["translate", "--top_k=5"], ["--top_k=5: nothing is sampled", "--temperature"]),
        (["translate", "--beam=3", "--temperature=1"], ["--beam=3: for beam search only"]),
        (["translate", "--temperature=1", "--n_best=7"], ["cannot translate:\n  - --n_best: for beam search only"]),
        (["translate", "--input={inputs}", "--output={inputs}/out"], ["is a folder: name a file"]),
        (
            ["convert", "--output={inputs}/out", "--attention=causal", "--cross_features=8", "--cross_keep=0"],
            ["--attention=causal: leave out --cross_features, --cross_keep"],
        ),
        (
            ["convert", "--output={inputs}/out", "--attention=cross", "--cross_features=8", "--features=4"],
            ["--attention=cross: leave out --features"],
        ),
        (["evaluate", "--data=tsv:{inputs}/pairs.tsv", "--split_compounds"], ["add --moses=LANGUAGE"]),
        (["generate", "--load_state={inputs}/lines.txt", "--seed=4"], ["--seed=4", "--load_state"]),
        (["generate", "--top_k=5", "--top_p=0.9"], ["--top_k=5 and --top_p=0.9: nothing is sampled"]),
        (["generate", "--seed=5"], ["--seed=5: nothing is sampled"]),
        (["translate", "--input={inputs}/lines.txt", "--output={inputs}/lines.txt"], ["is the input"]),
        (["translate", "--input={inputs}/lines.txt", "--output={inputs}/../inputs/lines.txt"], ["is the input"]),
        (["translate", "--input={inputs}/loop"], ["loop", "symbolic links"]),
        (["translate", "--input={inputs}/dangling"], ["dangling"]),
        (["evaluate", "--logits={inputs}/lines.txt:{inputs}/out.npz"], ["lines.txt", "numpy.savez"]),
        (["evaluate", "--logits={inputs}/objects.npz:{inputs}/out.npz"], ["objects.npz", "numpy.savez"]),
        (["evaluate", "--logits={inputs}/none.npz:{inputs}/out.npz"], ["none.npz", "No such file"]),
        (["evaluate", "--data=tsv:{inputs}/pairs.tsv", "--beam=0"], ["beam=0"]),
        (
            ["evaluate", "--data=tsv:{inputs}/pairs.tsv", "--documents", "--window=8"],
            ["--window=8 and --documents: for language models; this is a translation model"],
        ),
        (
            ["evaluate", "--logits={inputs}/ids.npz:{inputs}/out.npz", "--beam=2", "--first=1"],
            ["--first=1 and --beam=2"],
        ),
    ],
)
def test_bad_arguments(saved_lm, saved_translator, inputs, call, arguments, messages):
    (inputs / "loop").symlink_to("loop")
    (inputs / "dangling").symlink_to("nowhere")
    np.savez(inputs / "objects.npz", input_ids=np.array([{}], object))
    before = snapshot(inputs)
    model = saved_lm if arguments[0] == "generate" else saved_translator
    status, printed = call(arguments[0], f"--model={model}", *(text.format(inputs=inputs) for text in arguments[1:]))
    assert status == 2 and printed.startswith("error: "), printed
    assert all(message in printed for message in messages), printed
    assert "pickle" not in printed and snapshot(inputs) == before


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["genrate"], "did you mean 'generate'?"),
        (["benchmark"], "name a benchmark"),
        (["benchmark", "--preset=paper_lm"], "name a benchmark"),
        (["benchmrk", "decode"], "did you mean 'benchmark decode'?"),
        (["convert", "--model=builtin:tiny_lm", "--output="], "the output is the current folder, or empty"),
        (["benchmark", "decod"], "did you mean 'benchmark decode'?"),
        (["train", "--config=tiny_lm", f"--config.seed={2**70}", "--workdir={folder}/run"], "config.seed="),
        (["train", "--config=tiny_lm", f"--config.steps={2**70}", "--workdir={folder}/run"], "config.steps="),
        (["train", "--config={folder}/config.txt", "--workdir={folder}/run"], "config.txt is not a config"),
        (["train", "--config", "{folder}/none.py", "--workdir={folder}/run"], "no config file"),
        (["generate", "--model=" + "x" * 5000], "File name too long"),
        (["chat", "--model=builtin:tiny_lm", "--temperature=0", "--top_k=5"], "--top_k=5: nothing is sampled"),
        (["benchmark", "decode", "--preset=micro_lm", "--peer_names=llama_cpp"], "--peer_names needs --peers"),
        (["benchmark", "long", "--preset=micro_lm", "--row=t2rr"], "measure:\n  - unknown model 't2rr'"),
    ],
)
def test_bad_commands_and_configs(tmp_path, call, arguments, message):
    (tmp_path / "config.txt").write_text("")
    status, printed = call(*(text.format(folder=tmp_path) for text in arguments))
    assert status == 2 and message in printed, printed
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_a_config_may_be_given_after_a_space(tmp_path, call):
    options = ["--config.data.batch=-1", f"--workdir={tmp_path}/run"]
    spaced, joined = call("train", "--config", "tiny_lm", *options), call("train", "--config=tiny_lm", *options)
    assert spaced == joined and "config.data.batch=-1" in joined[1]


@pytest.mark.parametrize("arguments", [["--help"], ["generate", "--help"], []])
def test_the_reader_of_a_pipe_may_end(arguments):
    """`t2r ... | head -1` neither fails loudly nor prints a traceback."""
    command = f"'{sys.executable}' -c 'import time; time.sleep(0.2)' && '{sys.executable}' -m t2r {' '.join(arguments)}"
    run = subprocess.run(["bash", "-c", f"({command}) | true"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert "Traceback" not in run.stderr and "Exception ignored" not in run.stderr, run.stderr


@pytest.mark.slow
@pytest.mark.parametrize("shell", ["| head -c 1", "> /dev/full"])
def test_a_result_that_cannot_be_printed(saved_lm, shell):
    command = f"'{sys.executable}' -m t2r generate --model={saved_lm} --prompt=The --length=40 {shell}"
    run = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert "Traceback" not in run.stderr and "Exception ignored" not in run.stderr, run.stderr
    assert ("No space left on device" in run.stderr) == ("full" in shell)


def test_bytes_that_are_not_text_in_a_real_process(saved_lm):
    run = t2r("generate", f"--model={saved_lm}", b"--prompt=\xff\xfe".decode("utf-8", "surrogateescape"))
    assert run.returncode == 2 and "is not UTF-8 text" in run.stderr and "Traceback" not in run.stderr


def test_a_state_replaces_no_other_file(saved_lm, text_file, call):
    status, printed = call("generate", f"--model={saved_lm}", "--length=1", f"--save_state={text_file}")
    assert status == 2 and f"{text_file} exists and is not a saved state" in printed


@pytest.mark.slow
def test_a_damaged_state_is_refused(saved_lm, tmp_path, call):
    state = tmp_path / "state"
    assert call("generate", f"--model={saved_lm}", "--length=1", f"--save_state={state}")[0] == 0
    wrong = [{"last": np.zeros((), np.int32)}, {"last": np.zeros(2, np.int32), "x.valid": np.zeros(2)}]
    whole = state.read_bytes()

    def refused() -> None:
        before = snapshot(tmp_path)
        status, printed = call("generate", f"--model={saved_lm}", "--length=1", f"--load_state={state}")
        assert status == 2 and printed.startswith("error: ") and str(state) in printed, printed
        assert snapshot(tmp_path) == before

    for damage in DAMAGES.values():
        state.write_bytes(whole)
        damage(state)
        refused()
        state.rmdir() if state.is_dir() else state.unlink(missing_ok=True)
    for arrays in wrong:
        save_file(arrays, state)
        refused()


@pytest.mark.slow
def test_damaged_measurements_are_refused_or_made_again(tmp_path, call):
    command = ["benchmark", "memory", "--preset=micro_lm", "--rows=t2r", "--lengths=4", f"--output={tmp_path}"]
    status, right = call(*command)
    assert status == 0
    path = tmp_path / "memory.jsonl"
    whole = path.read_bytes()
    for damage in DAMAGES.values():
        path.write_bytes(whole)
        damage(path)
        before = snapshot(tmp_path)
        status, result = call(*command)
        if status == 0:
            assert result == right
        else:
            assert status == 2 and str(path) in result and snapshot(tmp_path) == before
        path.rmdir() if path.is_dir() else path.unlink(missing_ok=True)

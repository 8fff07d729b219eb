"""Reading prompts: what is read, what memory it needs, and what is reported instead of a failure; not its speed."""

import json

import pytest

from t2r.benchmark import shared
from t2r.benchmark.models import converted, random_model
from t2r.benchmark.prefill import PrefillOptions, PromptReader
from t2r.model.config import preset

FLAGS = ["--preset=micro_llama", "--dtype=float32", "--seconds=0", "--rows=transformer,t2r"]


def test_prompts_are_read_in_constant_memory(call, tmp_path):
    flags = [*FLAGS, "--lengths=32,72", "--chunk=16", f"--output={tmp_path}"]
    status, result = call("benchmark", "prefill", *flags, "--device_report")
    assert status == 0 and result["first_token_seconds"]["transformer"]["72"] > 0 and not result["does_not_fit"]
    for figure in ("state_bytes", "program_bytes"):
        assert result[figure]["t2r"]["32"] == result[figure]["t2r"]["72"], figure
        assert result[figure]["transformer"]["32"] < result[figure]["transformer"]["72"], figure
    assert len(result["plots"]) == 4 and (tmp_path / "prefill_memory.png").exists()
    status, again = call("benchmark", "prefill", *flags)
    assert status == 0 and again["first_token_seconds"] == result["first_token_seconds"]
    assert json.loads((tmp_path / "prefill.json").read_text())["chunk"] == 16


def test_a_recurrent_model_needs_one_program_for_all_lengths():
    model = random_model(converted(preset("micro_llama"), "t2r"), "float32")
    reader = PromptReader(model, 2, 8)
    for length in (16, 24, 20):
        reader.measure(length, PrefillOptions(8, 0.0))
    assert len(reader._programs) == 3, "eight tokens, the last four of twenty, the first decoding step"


def test_what_does_not_fit_is_reported(call, monkeypatch):
    status, result = call("benchmark", "prefill", *FLAGS, "--lengths=32", "--most_seconds=0", "--chunk=16")
    assert status == 0 and result["does_not_fit"]["t2r"]["32"] == "it takes more than 0 seconds (--most_seconds)"
    monkeypatch.setattr(shared, "available_memory", lambda: 100)
    status, result = call("benchmark", "prefill", *FLAGS, "--lengths=32", "--chunk=16")
    assert status == 0 and "GiB are free" in result["does_not_fit"]["transformer"]["32"]
    assert result["first_token_seconds"] == {} and result["plots"] == []


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--preset=micro_mt"], "for language models"),
        (["--preset=micro_llama", "--lengths=0"], "whole numbers above 0"),
        (["--preset=micro_llama", "--chunk=0"], "chunk"),
        (["--preset=micro_llama", "--weights=int4"], "choose from bfloat16"),
    ],
)
def test_bad_flags_get_a_clear_error(call, flags, message):
    status, printed = call("benchmark", "prefill", *flags)
    assert status == 2 and message in printed, printed

"""The server under load: nothing is lost or mixed up, and its memory does not grow."""

import asyncio
import json
import subprocess
import sys

import pytest

from t2r.serve.load import Result, prompt, resident, run_streams
from tests.serve.servers import save_pair, server
from tests.training.runs import ROOT, environment


def test_prompts_differ():
    assert len({prompt(number, 8) for number in range(5000)}) == 5000


@pytest.mark.slow
def test_hundreds_of_requests_leave_nothing_behind(tmp_path):
    """Answers alone and among forty others are the same; clients that hang up are among them."""
    rnn, _ = save_pair(tmp_path)
    with server(f"--model={rnn}", "--slots=8", "--cache_mib=1") as running:
        host, port = running.url.removeprefix("http://").split(":")
        body = lambda i: {"prompt": prompt(i, 4), "max_tokens": 12, "temperature": 0}  # noqa: E731

        def ask(numbers, streams):
            return asyncio.run(run_streams((host, int(port)), [body(i) for i in numbers], streams))

        async def hang_up():
            reader, writer = await asyncio.open_connection(host, int(port))
            content = b'{"prompt": "The", "max_tokens": 5000, "stream": true}'
            writer.write(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(content) + content
            )
            await reader.read(100)
            writer.close()

        alone = [result.text for result in ask(range(40), 1)]
        assert len(set(alone)) > 30
        ask(range(200), 40)
        before = resident(running.process.pid)
        for _ in range(3):
            asyncio.run(hang_up())
            results = ask([number % 40 for number in range(200)], 40)
            assert all(isinstance(result, Result) for result in results)
            assert [result.text for result in results] == alone * 5
        status = running.get("/health")[1]["models"]["rnn"]
        assert (status["running"], status["waiting"], status["failures"]) == (0, 0, 0)
        assert resident(running.process.pid) - before < 20, "MiB after 600 more requests"


@pytest.mark.slow
def test_more_streams_than_files_are_allowed_at_first(tmp_path):
    """Three hundred clients under a soft limit of 128 files: the limit is raised. Both models are measured in turn."""
    rnn, transformer = save_pair(tmp_path)
    flags = [f"--model={rnn}", f"--transformer={transformer}", "--streams=300", "--length=6", "--words=2", "--nocheck"]
    command = [sys.executable, "-m", "t2r", "benchmark", "serve", *flags, "--ramp_up=1", "--weights=int8"]
    limited = lambda limit: subprocess.run(  # noqa: E731
        ["bash", "-c", f'ulimit {limit} && exec "$@"', "bash", *command],
        env=environment(), cwd=ROOT, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    done = limited("-Sn 128")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout.splitlines()[-1])["rows"]
    assert [row["model"] for row in rows] == ["rnn", "transformer"]
    for row in rows:
        assert (row["streams"], row["requests"], row["lost"]) == (300, 300, 0)
        assert 0 < row["tokens"] <= 1800 and row["tokens_per_second"] > 0
        assert 0 < row["first_token_50"] <= row["first_token_99"] <= row["latency_99"]
        assert 0 < row["between_tokens_50"] <= row["between_tokens_99"] <= row["latency_99"]
        assert row["seconds"] > 0.9, "they begin within a second"
    done = limited("-n 128")
    assert done.returncode == 2 and done.stderr == (
        "error: --streams=300 needs 364 open files, and this process may have 128: use fewer streams, or raise the "
        "limit, as an administrator: ulimit -Hn 364\n"
    )

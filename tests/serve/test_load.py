"""The server under load: nothing is lost or mixed up, and its memory does not grow."""

import asyncio

import pytest

from t2r.serve.load import Result, prompt, resident, run_streams
from tests.serve.servers import save_pair, server


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

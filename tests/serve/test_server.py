"""The server as a process, over real HTTP: OpenAI's client, bad requests, clients that hang up, signals."""

import concurrent.futures
import json
import signal
import socket
import threading
import time

import openai
import pytest

import t2r
from t2r.serve.served import Limits, ServedModel
from t2r.serve.server import source_of
from t2r.store import model_dir
from tests.serve.servers import save_pair, server


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    return save_pair(tmp_path_factory.mktemp("chat_models"))


@pytest.fixture(scope="module")
def running(paths):
    rnn, transformer = paths
    limits = ["--slots=4", "--queue=8", "--capacity=300", "--body_kib=8"]
    with server(f"--model={rnn}", f"--transformer={transformer}", *limits) as process:
        yield process


@pytest.fixture(scope="module")
def client(running):
    return openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0)


def test_completions_are_what_generate_writes(client, paths):
    for path in paths:
        expected = t2r.generate(t2r.load(path), "The old clerk", 12)
        options = dict(model=path.name, prompt="The old clerk", max_tokens=12, temperature=0)
        answer = client.completions.create(**options)
        assert answer.choices[0].text == expected and answer.choices[0].finish_reason == "length"
        assert answer.usage.completion_tokens == 12
        *parts, last = client.completions.create(**options, stream=True, stream_options={"include_usage": True})
        assert "".join(part.choices[0].text for part in parts) == expected
        assert parts[-1].choices[0].finish_reason == "length" and last.usage == answer.usage.model_copy(
            update={"prompt_tokens_details": last.usage.prompt_tokens_details}
        )
    seeds = dict(model="rnn", prompt="The old", max_tokens=8, temperature=1.0, seed=5, extra_body={"top_k": 20})
    sampled = t2r.generate(t2r.load(paths[0]), "The old", 8, temperature=1.0, top_k=20, seed=5)
    assert client.completions.create(**seeds).choices[0].text == sampled


@pytest.mark.slow
def test_weights_of_8_bits_give_what_generate_writes_with_them(paths):
    """Also of the transformer beside it; requests of other sizes share a batch with it."""
    flags = [f"--model={paths[0]}", f"--transformer={paths[1]}", "--slots=4", "--weights=int8"]
    with server(*flags) as running, concurrent.futures.ThreadPoolExecutor(4) as pool:
        for path in paths:
            model = t2r.for_decoding(t2r.load(path), "int8")
            prompts = ["The old clerk", "The", "The lamp", "Nobody asked why the"]
            body = {"model": path.name, "max_tokens": 12, "temperature": 0}
            answers = pool.map(running.post, [body | {"prompt": prompt} for prompt in prompts])
            texts = [answer["choices"][0]["text"] for _, answer in answers]
            assert texts == [t2r.generate(model, prompt, 12) for prompt in prompts]
            assert t2r.generate(t2r.load(path), prompts, 12) != texts, "rounding makes a difference"


def test_choices_echo_stop_and_log_probabilities(client, paths):
    whole = t2r.generate(t2r.load(paths[0]), "The lamp", 20)
    answer = client.completions.create(
        model="rnn", prompt=["The lamp", "The old"], n=2, max_tokens=20, temperature=0, echo=True, stop=whole[5:9]
    )
    texts = [choice.text for choice in answer.choices]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert texts[0] == texts[1] == "The lamp" + whole[: whole.index(whole[5:9])]
    assert answer.choices[0].finish_reason == "stop" and texts[2].startswith("The old")
    answer = client.completions.create(model="rnn", prompt="The lamp", max_tokens=3, temperature=0, logprobs=2)
    shown = answer.choices[0].logprobs
    assert len(shown.tokens) == len(shown.token_logprobs) == 3 and all(len(top) == 2 for top in shown.top_logprobs)
    assert shown.token_logprobs == pytest.approx([max(top.values()) for top in shown.top_logprobs])


def test_a_chat_is_the_completion_of_its_template(client, paths):
    messages = [{"role": "user", "content": "Count the lamps."}]
    prompt = "<|im_start|>user\nCount the lamps.<|im_end|>\n<|im_start|>assistant\n"
    expected = t2r.generate(t2r.load(paths[0]), prompt, 10)
    options = dict(model="rnn", messages=messages, max_completion_tokens=10, temperature=0)
    answer = client.chat.completions.create(**options, logprobs=True, top_logprobs=1)
    assert answer.choices[0].message.content == expected and len(answer.choices[0].logprobs.content) == 10
    parts = list(client.chat.completions.create(**options, stream=True))
    assert parts[0].choices[0].delta.role == "assistant"
    assert "".join(part.choices[0].delta.content for part in parts) == expected
    again = [*messages, {"role": "assistant", "content": expected}, {"role": "user", "content": "More."}]
    next_turn = client.chat.completions.create(model="rnn", messages=again, max_tokens=2, temperature=0)
    assert next_turn.usage.prompt_tokens_details.cached_tokens >= answer.usage.prompt_tokens - 1


BAD = [
    (b"", 400, "the body is not JSON"),
    (b"[1]", 400, "the body is a JSON list: send an object"),
    (b'{"prompt": "\xff"}', 400, "the body is not JSON"),
    (b"x" * 9000, 413, "the body has 9,000 bytes: at most 8,192 are allowed"),
    ({}, 400, "prompt is missing"),
    ({"prompt": 5}, 400, "prompt=5 is neither a string nor a list"),
    ({"prompt": []}, 400, "prompt=[] is neither"),
    ({"prompt": [1, 5000]}, 400, "prompt has the token 5000: this model's are 0 to 299"),
    ({"prompt": "\ud800"}, 400, "prompt has half of a surrogate pair"),
    ({"prompt": "a " * 600}, 400, "the prompt has 601 tokens: at most 299 fit, with one of answer"),
    ({"prompt": "a", "max_tokens": 300}, 400, "max_tokens=300 after 1 tokens of prompt are more than the 300 tokens"),
    ({"prompt": "a", "max_tokens": 0}, 400, "max_tokens=0 must be at least 1"),
    ({"prompt": "a", "max_tokens": "9"}, 400, "max_tokens='9' is not a whole number"),
    ({"prompt": "a", "max_tokens": 1.5}, 400, "max_tokens=1.5 is not a whole number"),
    ({"prompt": "a", "temperature": -1}, 400, "temperature=-1 must be at least 0 and at most 100"),
    (b'{"prompt": "a", "temperature": NaN}', 400, "temperature=nan is not a number"),
    (b'{"prompt": "a", "seed": 1e999}', 400, "seed=inf is not a whole number"),
    ({"prompt": "a", "top_p": 0, "n": 0, "top_k": -2}, 400, "top_k=-2 must be at least 0"),
    ({"prompt": "a", "n": 129}, 400, "n=129 must be at least 1 and at most 128"),
    ({"prompt": ["a"] * 65, "n": 2}, 400, "65 prompts with n=2 are more than 128 answers"),
    ({"prompt": "a", "n": 13}, 429, "with a queue of 8 have no place for 13 more"),
    ({"prompt": "a", "stream": "yes"}, 400, "stream='yes' is neither true nor false"),
    ({"prompt": "a", "stop": [""]}, 400, "stop=[''] is neither a string"),
    ({"prompt": "a", "stop": list("abcde")}, 400, "stop has 5 strings of up to 1 characters: at most 4 of 256"),
    ({"prompt": "a", "logprobs": 6}, 400, "logprobs=6 must be at least 0 and at most 5"),
    ({"prompt": "a", "logprobs": True}, 400, "logprobs=True is not a whole number"),
    ({"prompt": "a", "logprobs": 1, "echo": True}, 400, "logprobs with echo are not supported"),
    ({"prompt": "a", "presence_penalty": 1}, 400, "presence_penalty is not supported here"),
    ({"prompt": "a", "temprature": 1}, 400, "temprature is not a parameter of this endpoint"),
    ({"prompt": "a", "model": "gpt"}, 404, "there is no model 'gpt': choose rnn or transformer"),
    ({"prompt": "a", "model": ["x"]}, 404, "there is no model"),
]


@pytest.mark.parametrize("body, status, message", BAD, ids=range(len(BAD)))
def test_a_bad_request_gets_one_clear_answer(body, status, message, running):
    answer = running.post(body)
    assert answer[0] == status and message in answer[1]["error"]["message"], answer
    assert "\n" not in answer[1]["error"]["message"] and answer[1]["error"]["type"]


def test_a_body_that_is_nested_too_deeply_gets_one_clear_answer(running):
    """Python's parser gives up at some depth, or reads on (3.13) until the body ends too early."""
    status, answer = running.post(b"[" * 8000)
    assert status == 400, answer
    assert answer["error"]["message"].startswith(("the body is nested too deeply", "the body is not JSON")), answer


def test_bad_chats_and_addresses_get_one_clear_answer(running):
    chat = "/v1/chat/completions"
    assert "messages=None is not a list" in running.post({}, chat)[1]["error"]["message"]
    wrong = {"messages": [{"role": "user"}, {"role": "user", "content": [{"type": "image_url"}]}, 5]}
    assert running.post(wrong, chat)[1]["error"]["message"].count("needs a role and a content") == 3
    assert running.get("/nothing")[0] == 404 and running.get("/v1/completions")[0] == 405
    assert running.get("/v1/models/rnn")[1]["id"] == "rnn" and running.get("/v1/models/x")[0] == 404


def raw(running, body: dict, *, most: int | None = None) -> socket.socket:
    host, port = running.url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), 60)
    content = json.dumps(body).encode()
    connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(content))
    connection.sendall(content[:most])
    return connection


def settled(running) -> dict:
    """The health of the first model, when nothing runs any more."""
    for _ in range(300):
        status = running.get("/health")[1]["models"]["rnn"]
        if status["running"] == status["waiting"] == 0:
            return status
        time.sleep(0.1)
    raise AssertionError(status)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_hangs_up_frees_its_slot(stream, running):
    """Also those that still wait for one, or whose request is not complete."""
    settled(running)
    body = {"prompt": "The", "max_tokens": 290, "temperature": 1, "stream": stream}
    connections = [raw(running, body) for _ in range(8)] + [raw(running, body, most=9)]
    if stream:
        assert b"200 OK" in connections[0].recv(100)
    for connection in connections:
        connection.close()
    status = settled(running)
    assert status["failures"] == 0
    assert running.post({"prompt": "The", "max_tokens": 2})[0] == 200


def test_many_streams_are_not_mixed_up(running, client):
    """More than slots and queue together hold at once: each is the same request's alone, or refused."""
    settled(running)
    prompts = [
        f"The {word} lamp"
        for word in ["old", "quick", "lazy", "bright", "silent", "heavy", "red", "blue", "green", "tall"]
    ]
    ask = lambda p: client.completions.create(model="rnn", prompt=p, max_tokens=20, temperature=0)  # noqa: E731
    alone = {prompt: ask(prompt).choices[0].text for prompt in prompts}
    assert len(set(alone.values())) > 5
    with concurrent.futures.ThreadPoolExecutor(10) as pool:
        together = list(pool.map(lambda p: ask(p).choices[0].text, prompts * 3))
    assert together == [alone[prompt] for prompt in prompts * 3]
    metrics = running.get("/metrics")[1]["text"]
    assert 't2r_running{model="rnn"} 0\n' in metrics and 't2r_slots{model="rnn"} 4\n' in metrics
    assert "t2r_first_token_seconds_count" in metrics and 't2r_responses_total{status="200"}' in metrics


@pytest.mark.slow
def test_a_request_that_takes_too_long_gets_504(paths):
    with server(f"--model={paths[0]}", "--timeout=0.001") as running:
        status, answer = running.post({"prompt": "The", "max_tokens": 200})
        assert status == 504 and "not complete after 0.001 s, the limit" in answer["error"]["message"]
        assert settled_alone(running)


def settled_alone(running) -> bool:
    name = next(iter(running.get("/health")[1]["models"]))
    for _ in range(100):
        if running.get("/health")[1]["models"][name]["running"] == 0:
            return True
        time.sleep(0.1)
    return False


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_answers_end_and_refuses_those_that_wait(number, paths):
    with server(f"--model={paths[0]}", "--slots=1", "--grace=60") as running:
        body = {"prompt": "The", "max_tokens": 3000, "temperature": 0, "stream": True}
        first = raw(running, body)
        assert b"200 OK" in first.recv(100)
        second = raw(running, body | {"stream": False})
        while running.get("/health")[1]["models"]["rnn"]["waiting"] == 0:
            time.sleep(0.05)
        running.process.send_signal(number)
        assert b"503" in second.recv(1000)
        received = b""
        while part := first.recv(2**16):
            received += part
        assert b"[DONE]" in received and b'"error"' not in received
        out, errors = running.process.communicate(timeout=60)
        status, result = running.process.returncode, json.loads(out.splitlines()[-1])
        assert status == 0 and result["requests"] == 2 and result["failures"] == 0
        assert "Traceback" not in errors and errors.count("\n") <= 3


@pytest.mark.slow
def test_the_transformer_is_found_by_provenance(paths, tmp_path):
    """Of a model that was converted, unless it is gone."""
    converted = t2r.merge(t2r.convert(t2r.load(paths[1]), features=8))
    for name, source in (("found", paths[1]), ("gone", tmp_path / "nothing")):
        converted.provenance["history"][-1]["source"] = str(source)
        model_dir.save(tmp_path / name, converted)
    served = [ServedModel(str(tmp_path / name), name, Limits(slots=1)) for name in ("found", "gone")]
    assert [source_of(model) for model in served] == [str(paths[1]), None]


# A server whose worker, the thread that decodes, SIGUSR1 kills: an exception is raised where it is, as by a step that
# finds no memory. With the argument `for good` its arrays cannot be made again.
KILLABLE = """
import ctypes, signal, sys, threading
from t2r.__main__ import main
from t2r.serve.slots import Slots

def kill(*_):
    thread = next(thread for thread in threading.enumerate() if thread.name == "scheduler")
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(MemoryError))
    if sys.argv[1] == "for good":
        Slots.clear = lambda self: bytearray(2**62)

signal.signal(signal.SIGUSR1, kill)
sys.exit(main(["serve", "--port=0", "--slots=2", *sys.argv[2:]]))
"""
LONG = {"prompt": "The", "max_tokens": 100_000, "temperature": 0}


def kill_worker(running) -> list:
    """Kills the worker while two streams run, and one stream and one whole answer wait; how each of them ends."""
    client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0)
    begun = threading.Barrier(3)

    def ask(stream: bool, waits: bool):
        try:
            answer = client.completions.create(model="rnn", **LONG, stream=stream)
            for number, _ in enumerate(answer if stream else ()):
                if number == 0 and not waits:
                    begun.wait(60)
        except openai.APIError as error:
            return error
        return None

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(ask, True, False) for _ in range(2)]
        begun.wait(60)
        asked += [pool.submit(ask, stream, True) for stream in (True, False)]
        while running.get("/health")[1]["models"]["rnn"]["waiting"] < 2:
            time.sleep(0.05)
        running.process.send_signal(signal.SIGUSR1)
        return [future.result(timeout=60) for future in asked]


@pytest.mark.slow
def test_a_killed_worker_gives_every_client_one_error_and_begins_again(paths):
    with server(f"--model={paths[0]}", program=[KILLABLE, "once"]) as running:
        for failures in (1, 2):
            errors = kill_worker(running)
            assert len(errors) == 4
            for error in errors:
                assert "the worker failed (MemoryError) and begins again: send the request again" in str(error)
            assert {error.code for error in errors} == {500} or {error.body["code"] for error in errors} == {500}
            status, health = running.get("/health")
            expected = {"running": 0, "waiting": 0, "failures": failures, "last_failure": "MemoryError"}
            assert status == 200 and health["models"]["rnn"] == {"alive": True, **expected}
            assert running.post({"prompt": "The", "max_tokens": 2})[0] == 200


@pytest.mark.slow
def test_a_worker_that_cannot_begin_again_gives_503_and_the_server_ends_when_told(paths):
    with server(f"--model={paths[0]}", program=[KILLABLE, "for good"]) as running:
        ended = "the worker failed (MemoryError) and has ended: start the server again"
        assert all(ended in str(error) for error in kill_worker(running))
        for _ in range(3):
            for body in (LONG, LONG | {"stream": True}):
                status, answer = running.post(body)
                message = answer["error"]["message"]
                assert status == 503 and message.startswith("the worker has ended (") and "start the server" in message
        status, health = running.get("/health")
        assert status == 503 and health["status"] == "a worker has ended" and not health["models"]["rnn"]["alive"]
        running.process.send_signal(signal.SIGTERM)
        out, errors = running.process.communicate(timeout=30)
        assert running.process.returncode == 0 and "Traceback" not in errors
        assert json.loads(out.splitlines()[-1])["failures"] == 1


@pytest.mark.slow
def test_a_killed_server_is_an_error_of_its_clients_and_its_port_is_free(paths):
    with server(f"--model={paths[0]}") as running:
        client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0)
        parts = client.completions.create(model="rnn", **LONG, stream=True)
        next(iter(parts))
        running.process.kill()
        with pytest.raises(Exception) as raised:  # older clients let that of their HTTP library through
            list(parts)
        assert isinstance(raised.value, openai.APIError) or type(raised.value).__name__ == "RemoteProtocolError"
        with pytest.raises(openai.APIConnectionError):
            client.completions.create(model="rnn", **LONG)
    with server(f"--model={paths[0]}", f"--port={running.url.rpartition(':')[2]}") as again:
        assert again.url == running.url
        answer = client.completions.create(model="rnn", **LONG | {"max_tokens": 2})
        assert answer.usage.completion_tokens == 2

"""Continuous batching: each answer is the one that the request gets alone, whatever happens to its neighbours."""

import ctypes
import queue
import threading

import jax.numpy as jnp
import pytest

from t2r.decode.generate import truncate_at_stop
from t2r.decode.sampling import Sampling
from t2r.decode.text import generate_text
from t2r.model.config import AttentionSpec
from t2r.model.transformer import DecodeState
from t2r.serve import prefixes
from t2r.serve.prefixes import PrefixCache, load_prefixes, save_prefixes
from t2r.serve.problem import Problem
from t2r.serve.scheduler import Request, Scheduler
from t2r.serve.slots import Slots
from t2r.store.model_dir import LoadedModel
from tests.conftest import PROSE, WINDOW, error, make_model, micro, slow_but

KINDS = {
    "softmax": (AttentionSpec(), AttentionSpec()),
    "rnn": (AttentionSpec("merged", "t2r", 8),),
    "hybrid": (AttentionSpec("merged", "t2r", 8), AttentionSpec()),
    "windowed": (AttentionSpec("windowed", "t2r", 8, **WINDOW), AttentionSpec("linear", "t2r", 8)),
}


def model_of(kind: str, tokenizer) -> LoadedModel:
    config = micro(
        vocab_size=300, layers=len(KINDS[kind]), adaptive_cutoffs=(), tied_output=False, attention=KINDS[kind]
    )
    return LoadedModel(make_model(config), tokenizer, {"history": []})


class Client:
    """A scheduler of its own, and all events that come from it."""

    def __init__(self, loaded: LoadedModel, slots: int = 4, **options):
        self.events, self.loaded = queue.Queue(), loaded
        self.stop = loaded.tokenizer.stop
        deliver = lambda events: [self.events.put(event) for event in events]  # noqa: E731
        options = {"cache_bytes": 2**20} | options
        self.scheduler = Scheduler(Slots(loaded.model, slots, 600), [self.stop], deliver, **options)
        self.scheduler.start()

    def ask(self, *requests: Request) -> list[list[str]]:
        """The texts of all choices of all requests, which are under way together."""
        for request in requests:
            self.scheduler.submit(request)
        return self.wait(*requests)

    def wait(self, *requests: Request) -> list[list[str]]:
        tokens = {(request, choice): [] for request in requests for choice in range(request.choices)}
        left = set(tokens)
        while left:
            event = self.events.get(timeout=120)
            if event.problem:
                raise event.problem
            tokens[event.request, event.choice].append(event.token)
            left -= {(event.request, event.choice)} if event.finish else set()
        decode = lambda ids: self.loaded.tokenizer.decode(truncate_at_stop(ids, self.stop))  # noqa: E731
        return [[decode(tokens[request, choice]) for choice in range(request.choices)] for request in requests]

    def request(self, text: str, most: int = 12, **options) -> Request:
        return Request(self.loaded.tokenizer.encode(text), most, **options)

    def alone(self, text: str, most: int = 12, *, sampling=Sampling(), seed: int = 0) -> str:
        return generate_text(self.loaded, [text], most, sampling=sampling, seed=seed).texts[0]


@pytest.fixture
def client(request, tokenizer):
    clients = []

    def make(kind: str = "rnn", **options) -> Client:
        clients.append(Client(model_of(kind, tokenizer), **options))
        return clients[-1]

    yield make
    for client in clients:
        client.scheduler.close(0)
        client.scheduler.join(30)
        assert not client.scheduler.status()["alive"]


LONG = PROSE[:420]  # more tokens than a chunk and than the smallest cache


@pytest.mark.parametrize("kind", slow_but(KINDS, "rnn"))
def test_answers_are_those_of_each_request_alone(kind, client):
    """Greedy and sampled, short and long, more than there are slots: what `t2r generate` writes."""
    client, sampling = client(kind), Sampling(0.9, 5, 0.8)
    texts = ["The old clerk", "The", LONG, "A silent engine counts", "x", "The lamp"]
    greedy = [client.request(text) for text in texts]
    sampled = [client.request("The lamp", sampling=sampling, seed=seed) for seed in (7, 8)]
    answers = [texts[0] for texts in client.ask(*greedy, *sampled)]
    assert len(greedy[2].ids) > 256 and len(set(answers)) > 5
    assert answers[: len(texts)] == generate_text(client.loaded, texts, 12).texts
    assert answers[len(texts) :] == [client.alone("The lamp", sampling=sampling, seed=seed) for seed in (7, 8)]
    assert client.scheduler.status()["running"] == 0


def test_one_prompt_is_read_once_for_many_choices(client):
    client = client()
    request = client.request("The old clerk moves", choices=6, sampling=Sampling(1.0), seed=3)
    (texts,) = client.ask(request)
    assert texts[0] == client.alone("The old clerk moves", sampling=Sampling(1.0), seed=3)
    assert len(set(texts)) > 1
    assert client.scheduler.counters.prompt_tokens == len(request.ids)
    greedy = client.request("The old clerk moves", choices=3)
    assert client.ask(greedy) == [[client.alone("The old clerk moves")] * 3]


@pytest.mark.parametrize("kind", slow_but(KINDS, "rnn"))
def test_a_prompt_continues_from_the_state_of_an_earlier_one(kind, client):
    """Of a prompt that it repeats or extends, and of an answer that it continues."""
    client = client(kind)
    first = client.request(LONG)
    ((text,),) = client.ask(first)
    again, longer = client.request(LONG), Request(first.ids + client.loaded.tokenizer.encode(" and the lamp"), 12)
    texts = client.ask(again, longer)
    assert (first.cached, again.cached, longer.cached) == (0, len(first.ids) - 1, len(first.ids) - 1)
    assert texts == [[text], [client.alone(LONG + " and the lamp")]]
    tokens = []
    client.scheduler.submit(request := Request(first.ids[:9], 6))
    while len(tokens) < 6:
        tokens.append(client.events.get(timeout=60).token)
    turn = Request([*request.ids, *tokens, 5, 6], 4)
    client.ask(turn)
    assert turn.cached == len(request.ids) + len(tokens)


@pytest.mark.parametrize("kind", slow_but(KINDS, "rnn"))
def test_states_may_be_kept_in_a_folder(kind, client, tmp_path, capsys):
    first, second = client(kind), client(kind)
    answer = first.ask(request := first.request(PROSE[:60]))
    save_prefixes(tmp_path / "states", first.scheduler.prefixes, first.loaded.model)
    load_prefixes(tmp_path / "states", second.scheduler.prefixes, second.loaded.model)
    assert second.ask(again := second.request(PROSE[:60])) == answer
    assert again.cached == len(request.ids) - 1
    other = model_of("softmax" if kind == "rnn" else "rnn", first.loaded.tokenizer).model
    load_prefixes(tmp_path / "states", cache := PrefixCache(2**20), other)
    assert len(cache) == 0 and "was saved by another" in capsys.readouterr().err


def test_states_are_kept_though_their_writing_is_interrupted(client, tmp_path, capsys, monkeypatch):
    """A state is never taken for that of another prompt; a damaged one is left out."""
    first, second = client("rnn"), client("rnn")
    folder, model = tmp_path / "states", first.loaded.model
    first.ask(first.request(PROSE[:60]))
    save_prefixes(folder, first.scheduler.prefixes, model)
    kept = {path.name for path in folder.iterdir()}
    second.ask(second.request(PROSE[100:160]))
    monkeypatch.setattr(prefixes, "atomic_file", lambda path: 1 / 0)  # killed before the list is written
    with pytest.raises(ZeroDivisionError):
        save_prefixes(folder, second.scheduler.prefixes, model)
    monkeypatch.undo()
    load_prefixes(folder, cache := PrefixCache(2**30), model)
    assert {prefix.ids for prefix in cache} == {prefix.ids for prefix in first.scheduler.prefixes}
    for ours, theirs in zip(cache, first.scheduler.prefixes):
        assert error(ours.state.layers, theirs.state.layers) == 0
    save_prefixes(folder, cache, model)
    assert {path.name for path in folder.iterdir()} == kept  # what the list does not name is gone
    damaged = next(folder.glob("*.state"))
    damaged.write_bytes(damaged.read_bytes()[:50])
    load_prefixes(folder, left := PrefixCache(2**30), model)
    assert len(left) == len(cache) - 1 and f"cannot read {damaged}" in capsys.readouterr().err


def test_a_long_prompt_does_not_stop_others(client):
    """One that comes later, and is short, is answered first."""
    client = client()
    long, short = Request([3] * 590, 4), client.request("The lamp", 4)
    client.scheduler.submit(long)
    client.scheduler.submit(short)
    order = []
    while len(order) < 2:
        event = client.events.get(timeout=60)
        order += [event.request] if event.finish else []
    assert order == [short, long]


def test_a_cancelled_request_frees_its_slot(client):
    client = client(slots=1)
    endless, next_one = client.request("The", 500), client.request("The lamp")
    client.scheduler.submit(endless)
    assert client.events.get(timeout=60).request is endless
    client.scheduler.submit(next_one)
    client.scheduler.cancel(endless)
    while (event := client.events.get(timeout=60)).request is endless:
        assert not event.finish
    assert event.request is next_one


def test_many_that_are_cancelled_together_free_slots_and_queue(client):
    """Running, waiting, and choices that wait for the first one's state."""
    client = client(slots=2)
    many = [client.request("The", 500, choices=1 + i % 3) for i in range(12)]
    for request in many:
        client.scheduler.submit(request)
    client.events.get(timeout=60)
    for request in many[1:]:
        client.scheduler.cancel(request)
    client.scheduler.cancel(many[0], 0)
    client.scheduler.submit(last := client.request("The lamp"))
    while (event := client.events.get(timeout=60)).request is not last:
        assert not event.finish
    assert client.scheduler.status()["waiting"] == 0


def test_a_full_queue_refuses_and_a_closed_one_ends(client):
    client = client(slots=1, queue=1)
    running, waiting = client.request("The", 400), client.request("The lamp", 2)
    client.scheduler.submit(running)
    client.events.get(timeout=60)
    client.scheduler.submit(waiting)
    with pytest.raises(Problem, match="2 answers are being written or wait, and 1 slots with a queue of 1"):
        client.scheduler.submit(client.request("The lamp", 2))
    client.scheduler.close(60)
    with pytest.raises(Problem, match="shutting down"):
        client.scheduler.submit(client.request("The lamp", 2))
    problems, ended = [], False
    while not (problems and ended):
        event = client.events.get(timeout=60)
        problems += [event.problem.status] if event.problem else []
        ended = ended or (event.request is running and bool(event.finish))
    assert problems == [503]


class Killed(BaseException):
    pass


def test_a_killed_worker_tells_everyone_and_begins_again(client):
    client = client(slots=2)
    requests = [client.request("The", 500), client.request("The lamp", 500), client.request("The clerk", choices=2)]
    for request in requests:
        client.scheduler.submit(request)
    client.events.get(timeout=60)
    thread = next(thread for thread in threading.enumerate() if thread is client.scheduler._thread)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(Killed))
    problems = []
    while len(problems) < 4:
        event = client.events.get(timeout=60)
        problems += [(event.request, event.choice, event.problem.status)] if event.problem else []
    assert {problem[:2] for problem in problems} == {(r, c) for r in requests for c in range(r.choices)}
    assert {problem[2] for problem in problems} == {500}
    assert client.ask(client.request("The lamp")) == [[client.alone("The lamp")]]
    status = client.scheduler.status()
    assert status["failures"] == 1 and status["last_failure"] == "Killed" and status["waiting"] == 0


def test_a_worker_that_cannot_begin_again_says_so(client, monkeypatch):
    """As when there is no memory left for new arrays."""
    client = client(slots=1)
    client.ask(client.request("The lamp", 2))
    monkeypatch.setattr(client.scheduler.slots, "clear", lambda: 1 / 0)
    monkeypatch.setattr(client.scheduler.slots, "begin", lambda beginnings: 1 / 0)
    with pytest.raises(Problem, match=r"the worker failed \(ZeroDivisionError"):
        client.ask(client.request("The lamp", 2))
    client.scheduler.join(30)
    assert not client.scheduler.status()["alive"]
    with pytest.raises(Problem, match=r"the worker has ended \(ZeroDivisionError"):
        client.ask(client.request("The lamp", 2))


def test_prefixes_used_least_recently_make_room():
    state = DecodeState((), jnp.zeros(10, jnp.int32))  # 40 bytes
    cache = PrefixCache(100)
    cache.add([1, 2], state)
    cache.add([1, 2, 3], state)
    assert cache.longest([1, 2, 9]).ids == (1, 2)  # now the most recent
    cache.add([4], state)
    assert [prefix.ids for prefix in cache] == [(1, 2), (4,)] and cache.bytes == 80
    assert cache.longest([1, 2, 3, 4]).ids == (1, 2) and cache.longest([5]) is None and cache.longest([]) is None
    cache.add([7], DecodeState((), jnp.zeros(100, jnp.int32)))
    assert cache.longest([7]) is None and len(cache) == 2

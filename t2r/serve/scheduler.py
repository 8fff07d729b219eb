"""Continuous batching: requests join at the next step and leave at their end, over a fixed number of slots.

A thread repeats one *turn*: put waiting sequences into free slots, read one chunk of their prompts, make one decoding
step, hand out the tokens of the step before. So a long prompt delays the others by one chunk per step, and the device
computes a step while the tokens of the last one are handed out.

Nothing here knows of HTTP or of text. Requests come by `submit` and `cancel`, from any thread. Events go to `deliver`,
in the scheduler's thread, those of a turn together.
"""

import collections
import itertools
import math
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Int

from t2r.decode.sampling import Sampling
from t2r.serve.prefixes import PrefixCache
from t2r.serve.problem import Problem
from t2r.serve.slots import CHUNKS, Beginning, LogProbs, Slots

GREEDY = Sampling()


@dataclass(eq=False)
class Request:
    """What a client asks for: `choices` continuations of the same tokens."""

    ids: list[int]
    most: int  # tokens of each continuation
    sampling: Sampling = GREEDY
    seed: int = 0
    choices: int = 1
    log_probs: bool = False
    cached: int = 0  # tokens of the prompt whose state was there already; known when its first event comes


class TokenLogProbs(NamedTuple):
    """The log-probability of a token, and the likeliest tokens with theirs."""

    chosen: float
    likeliest: list[tuple[int, float]]


class Event(NamedTuple):
    """A new token of a request's choice, its end, or both; a problem ends all choices."""

    request: Request
    choice: int
    token: int | None = None
    finish: str | None = None  # "stop": a stop token, which is not part of the text; "length"
    log_probs: TokenLogProbs | None = None
    problem: Problem | None = None


@dataclass(eq=False)
class _Sequence:
    """One choice of a request, waiting or in a slot."""

    request: Request
    choice: int
    slot: int = -1
    last_read: int = 0  # which call read a part of the prompt last
    tokens: list[int] = field(default_factory=list)  # generated so far
    start: Any = None  # (state, tokens read) of the first choice, for the others
    ended: bool = False


class _Progress:
    """How far the sequence in each slot is; as arrays, since each turn asks this of all slots."""

    def __init__(self, slots: int):
        self.taken = np.zeros(slots, bool)
        self.read = np.zeros(slots, int)  # tokens that the state in the slot has read, steps under way included
        self.prompt = np.zeros(slots, int)  # tokens to read before the first step, which reads the prompt's last one

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence after the next chunk of its prompt, or after the next step."""
        return int((self.read + np.clip(self.prompt - self.read, 1, CHUNKS[-1])).max())

    @property
    def decoding(self) -> Int[np.ndarray, "n"]:
        """The slots whose prompt is read."""
        return np.flatnonzero(self.taken & (self.read >= self.prompt))

    def unread(self, sequence: _Sequence) -> int:
        """How many tokens of a prompt are still to be read."""
        return max(int(self.prompt[sequence.slot] - self.read[sequence.slot]), 0)

    def begin(self, sequence: _Sequence, read: int) -> None:
        slot = sequence.slot
        self.taken[slot], self.read[slot], self.prompt[slot] = True, read, len(sequence.request.ids) - 1

    def end(self, sequence: _Sequence) -> None:
        slot = sequence.slot
        self.taken[slot], self.read[slot], self.prompt[slot] = False, 0, 0


@dataclass
class Counters:
    """What has happened since the start."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    tokens: int = 0
    steps: int = 0
    failures: int = 0


class Scheduler:
    """Decodes requests together. `stops` are the tokens that end a text; `queue` is how many choices may wait."""

    def __init__(
        self,
        slots: Slots,
        stops: Iterable[int],
        deliver: Callable[[list[Event]], None],
        *,
        queue: int = 1024,
        cache_bytes: int = 0,
    ):
        self.slots, self._stops, self._deliver, self._queue = slots, frozenset(stops), deliver, queue
        self.prefixes, self.counters, self.failure = PrefixCache(cache_bytes), Counters(), None
        self._changed = threading.Condition()  # guards the next five
        self._submitted: list[_Sequence] = []
        self._cancelled: list[tuple[Request, int | None]] = []
        self._unfinished = 0  # choices that wait or run
        self._closing: float | None = None  # when what still runs is given up
        self._ended = False  # the thread, be it by a failure after which it could not begin again
        # Of the scheduler's thread only.
        self._waiting = collections.deque[_Sequence]()
        self._in_slots: dict[int, _Sequence] = {}
        self._reading: dict[int, _Sequence] = {}  # those of them whose prompt is not read to its end
        self._progress = _Progress(slots.count)
        self._followers: dict[Request, list[_Sequence]] = {}  # choices that wait for the first one's state
        self._last_step: tuple[Any, LogProbs | None, list[_Sequence]] | None = None
        self._events: list[Event] = []
        self._reads = 0  # calls that read prompts
        self._thread = threading.Thread(target=self._run, name="scheduler", daemon=True)

    # From any thread.

    def start(self) -> None:
        self._thread.start()

    def submit(self, request: Request) -> None:
        """Begins a request as soon as there is a slot; raises a Problem if the queue is full."""
        with self._changed:
            if self._closing is not None:
                raise Problem(503, "the server is shutting down: send the request to another one")
            if self._ended:
                raise Problem(503, f"the worker has ended ({self.failure}): start the server again")
            if self._unfinished + request.choices > self.slots.count + self._queue:
                raise Problem(
                    429,
                    f"{self._unfinished} answers are being written or wait, and {self.slots.count} slots with a queue "
                    f"of {self._queue} have no place for {request.choices} more: try again later",
                )
            self._unfinished += request.choices
            self.counters.requests += 1
            self._submitted += [_Sequence(request, choice) for choice in range(request.choices)]
            self._changed.notify()

    def cancel(self, request: Request, choice: int | None = None) -> None:
        """Ends a choice, or all, at the next step. There will be no event for it; one that has ended is ignored."""
        with self._changed:
            self._cancelled.append((request, choice))
            self._changed.notify()

    def close(self, grace: float) -> None:
        """Takes no more requests, refuses those that wait, and gives those that run some seconds to end."""
        with self._changed:
            self._closing = min(self._closing or math.inf, time.monotonic() + grace)
            self._changed.notify()

    def join(self, timeout: float | None = None) -> None:
        self._thread.join(timeout)

    def status(self) -> dict[str, Any]:
        """What is running now."""
        return {
            "alive": self._thread.is_alive(),
            "running": len(self._in_slots),
            "waiting": max(self._unfinished - len(self._in_slots), 0),
            "failures": self.counters.failures,
            "last_failure": self.failure,
        }

    # In the scheduler's thread.

    def _run(self) -> None:
        try:
            while failure := self._work():
                self.prefixes.clear()
                self.slots.clear()
                self._tell_all(failure, "begins again: send the request again")
        except BaseException as error:  # there is not even memory to begin again
            self._ended = True  # before those who wait are told, so that nobody joins them afterwards
            self._tell_all(_in_words(error), "has ended: start the server again")

    def _work(self) -> str | None:
        """Turns until the scheduler is closed; a failure ends them, and is returned (as text: errors hold arrays)."""
        try:
            while self._turn():
                pass
        except BaseException as error:  # whatever it is, those who wait must hear of it
            return _in_words(error)

    def _turn(self) -> bool:
        """One turn; False when the scheduler is closed and nothing is left to do."""
        with self._changed:
            idle = not (self._in_slots or self._waiting or self._last_step)
            while idle and not self._submitted and not self._cancelled and self._closing is None:
                self._changed.wait()
            for sequence in self._submitted:
                if sequence.choice == 0:
                    self._waiting.append(sequence)
                else:
                    self._followers.setdefault(sequence.request, []).append(sequence)
            self._submitted = []
            cancelled, self._cancelled = self._cancelled, []
            closing = self._closing
        self._drop(cancelled)
        if closing is not None:
            self._refuse_waiting()
            if time.monotonic() > closing:
                self._fail(Problem(503, "the server was shut down before the answer was complete"))
        self._admit()
        self._read_prompts()
        self._fit()
        step = self._step()
        self._hand_out(self._last_step)
        self._last_step = step
        self._send()
        return closing is None or bool(self._in_slots or self._last_step)

    def _drop(self, cancelled: list[tuple[Request, int | None]]) -> None:
        if not cancelled:
            return
        meant = set(cancelled)
        followers = [s for request, _ in cancelled for s in self._followers.get(request, [])]
        for sequence in [*self._in_slots.values(), *self._waiting, *followers]:
            if (sequence.request, None) in meant or (sequence.request, sequence.choice) in meant:
                if sequence.tokens and not sequence.ended:
                    self._keep(sequence)
                self._end(sequence)
        for request, _ in cancelled:
            self._release_followers(request)

    def _admit(self) -> None:
        """Puts waiting sequences into the first free slots, with the longest part of their prompt that is known."""
        free = (slot for slot in range(self.slots.count) if slot not in self._in_slots)
        begun = []  # with the state that each begins with
        for slot in itertools.islice(free, len(self._waiting)):
            sequence = self._waiting.popleft()
            request, state, read = sequence.request, None, 0
            if sequence.start is not None:
                state, read = sequence.start
            elif (prefix := self.prefixes.longest(request.ids[:-1])) is not None:
                state, read = prefix.state, len(prefix.ids)
                request.cached = read
                self.counters.cached_tokens += read
            if sequence.choice == 0:
                self.counters.prompt_tokens += len(request.ids)
            sequence.slot, sequence.start = slot, None
            self._in_slots[slot] = sequence
            self._progress.begin(sequence, read)
            begun.append((sequence, state))
        self._fit()
        if begun:
            self.slots.begin([_beginning(sequence) for sequence, _ in begun])
        for sequence, state in begun:
            if state is not None:
                self.slots.load(sequence.slot, state)
            if self._progress.unread(sequence):
                self._reading[sequence.slot] = sequence
            else:
                self._prompt_is_read(sequence)

    def _fit(self) -> None:
        """Arrays large enough for what is in the slots, and for what the next chunk or step adds."""
        if self._in_slots:
            self.slots.fit(max(self._in_slots) + 1, self._progress.longest)

    def _chunk(self, sequence: _Sequence) -> int:
        return self.slots.chunk_of(self._progress.unread(sequence))

    def _read_prompts(self) -> None:
        """One chunk of the prompt that was not read for longest, and of others whose next chunk has the same length."""
        if not self._reading:
            return
        self._reads += 1
        reading, read = sorted(self._reading.values(), key=lambda s: s.last_read), self._progress.read
        chunk = self._chunk(reading[0])
        group = [s for s in reading if self._chunk(s) == chunk][: self.slots.rows_of(chunk)]
        parts = [s.request.ids[read[s.slot] : -1][:chunk] for s in group]
        self.slots.read([s.slot for s in group], parts, chunk)
        for sequence, part in zip(group, parts):
            read[sequence.slot] += len(part)
            sequence.last_read = self._reads
            if not self._progress.unread(sequence):
                del self._reading[sequence.slot]
                self._prompt_is_read(sequence)

    def _prompt_is_read(self, sequence: _Sequence) -> None:
        """Keeps the state after a prompt, and lets the other choices of the request begin with it."""
        request, shares = sequence.request, sequence.request in self._followers
        read = int(self._progress.read[sequence.slot])
        new = self.prefixes.keeps and sequence.choice == 0 and read > request.cached
        if not (shares or new):
            return
        state = self.slots.copy(sequence.slot, read)
        if new:
            self.prefixes.add(request.ids[:-1], state)
        self._release_followers(request, (state, read))

    def _release_followers(self, request: Request, start: Any = None) -> None:
        """Lets the other choices begin; if the first was cancelled before its prompt was read, they read it."""
        if request not in self._followers:
            return
        if start is None and any(s.request is request and s.choice == 0 for s in self._waiting):
            return
        if start is None and any(s.request is request for s in self._reading.values()):
            return
        followers = [s for s in self._followers.pop(request, []) if not s.ended]
        for sequence in followers:
            sequence.start = start
        self._waiting.extendleft(reversed(followers))

    def _step(self) -> tuple[Any, LogProbs | None, list[_Sequence]] | None:
        """Begins a decoding step of all slots whose prompt is read."""
        slots = self._progress.decoding
        if not len(slots):
            return None
        active = [self._in_slots[slot] for slot in slots.tolist()]
        tokens, extra = self.slots.step(slots, any(s.request.log_probs for s in active))
        self._progress.read[slots] += 1
        self.counters.steps += 1
        return tokens, extra, active

    def _hand_out(self, step: tuple[Any, LogProbs | None, list[_Sequence]] | None) -> None:
        """The tokens of a step as events. Sequences that have ended since it began are left out."""
        if step is None:
            return
        tokens, extra, active = step
        values = np.asarray(tokens).tolist()  # waits for the device
        extra = extra and jax.tree.map(np.asarray, extra)
        active = [sequence for sequence in active if not sequence.ended]
        self.counters.tokens += len(active)
        for sequence in active:
            request, token = sequence.request, values[sequence.slot]
            sequence.tokens.append(token)
            finish = "stop" if token in self._stops else "length" if len(sequence.tokens) == request.most else None
            log_probs = _of_slot(extra, sequence.slot) if request.log_probs else None
            self._events.append(Event(request, sequence.choice, token, finish, log_probs))
            if finish:
                self._keep(sequence)
                self._end(sequence)

    def _keep(self, sequence: _Sequence) -> None:
        """Keeps the state after an answer: the next turn of a conversation begins with it."""
        if self.prefixes.keeps:
            read = int(self._progress.read[sequence.slot])
            ids = (sequence.request.ids + sequence.tokens)[:read]
            self.prefixes.add(ids, self.slots.copy(sequence.slot, read))

    def _end(self, sequence: _Sequence) -> None:
        """Takes a sequence out of its slot or of the queue."""
        if sequence.ended:
            return
        sequence.ended = True
        if self._in_slots.get(sequence.slot) is sequence:
            del self._in_slots[sequence.slot]
            self._reading.pop(sequence.slot, None)
            self._progress.end(sequence)
        elif sequence in self._waiting:
            self._waiting.remove(sequence)
        with self._changed:
            self._unfinished -= 1

    def _refuse_waiting(self) -> None:
        waiting = [*self._waiting, *(s for followers in self._followers.values() for s in followers)]
        self._followers.clear()
        self._fail(Problem(503, "the server is shutting down: send the request to another one"), waiting)

    def _fail(self, problem: Problem, sequences: list[_Sequence] | None = None) -> None:
        """Ends sequences, by default all, with a problem."""
        if sequences is None:
            followers = [s for group in self._followers.values() for s in group]
            sequences = [*self._in_slots.values(), *self._waiting, *followers]
            self._followers.clear()
        for sequence in sequences:
            self._end(sequence)
            self._events.append(Event(sequence.request, sequence.choice, problem=problem))

    def _send(self) -> None:
        events, self._events = self._events, []
        if events:
            self._deliver(events)

    def _tell_all(self, failure: str, now: str) -> None:
        """Ends all sequences: what has stopped the work, and what the worker does now."""
        self.failure = failure
        self.counters.failures += 1
        with self._changed:
            submitted, self._submitted = self._submitted, []
        self._waiting.extend(submitted)
        self._events, self._last_step = [], None
        self._fail(Problem(500, f"the worker failed ({self.failure}) and {now}"))
        self._reading, self._progress = {}, _Progress(self.slots.count)  # it may have failed between two of them
        with self._changed:
            self._unfinished = len(self._submitted)  # it may have failed between two counts
        self._send()


def _in_words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _of_slot(extra: LogProbs, slot: int) -> TokenLogProbs:
    likeliest = zip(extra.tokens[slot].tolist(), extra.likeliest[slot].tolist())
    return TokenLogProbs(float(extra.chosen[slot]), list(likeliest))


def _beginning(sequence: _Sequence) -> Beginning:
    request = sequence.request
    return Beginning(sequence.slot, request.ids[-1], request.sampling, request.seed, sequence.choice)

"""The states after prompts and answers, kept so that a prompt that begins like one of them is not read again."""

import hashlib
import json
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp

from t2r.attention.softmax import KVCache
from t2r.console import say
from t2r.decode.generate import Generation
from t2r.decode.state_file import fingerprint, load_generation, save_generation
from t2r.environment import total_bytes
from t2r.errors import InputError
from t2r.files import atomic_file, make_folder, read_json
from t2r.model.transformer import DecodeState, LanguageModel

LIST = "prefixes.json"  # in a folder of states: file name → tokens


class Prefix(NamedTuple):
    """A sequence of tokens and the state of a model that has read them."""

    ids: tuple[int, ...]
    state: DecodeState


class PrefixCache:
    """The most recently used prefixes, up to a number of bytes."""

    def __init__(self, most_bytes: int):
        self._most, self._by_hash, self.bytes = most_bytes, OrderedDict[int, Prefix](), 0

    def __len__(self) -> int:
        return len(self._by_hash)

    @property
    def keeps(self) -> bool:
        """Whether it keeps anything at all."""
        return self._most > 0

    def add(self, ids: Sequence[int], state: DecodeState) -> None:
        """Keeps a state, in place of those that were used least recently."""
        size, name = total_bytes(state), _hashes(ids)[-1] if ids else None
        if name is None or size > self._most:
            return
        self._remove(name)
        self._by_hash[name] = Prefix(tuple(ids), state)
        self.bytes += size
        while self.bytes > self._most:
            self._remove(next(iter(self._by_hash)))

    def longest(self, ids: Sequence[int]) -> Prefix | None:
        """The longest prefix of these tokens that is kept."""
        if not self._by_hash:
            return None
        for length, name in reversed(list(enumerate(_hashes(ids), 1))):
            prefix = self._by_hash.get(name)
            if prefix is not None and prefix.ids == tuple(ids[:length]):
                self._by_hash.move_to_end(name)
                return prefix
        return None

    def clear(self) -> None:
        self._by_hash.clear()
        self.bytes = 0

    def _remove(self, name: int) -> None:
        prefix = self._by_hash.pop(name, None)
        self.bytes -= total_bytes(prefix.state) if prefix else 0

    def __iter__(self) -> Iterator[Prefix]:
        return iter(list(self._by_hash.values()))


def _hashes(ids: Sequence[int]) -> list[int]:
    """The hash of each prefix, each from the one before."""
    hashes, last = [], 0
    for token in ids:
        last = hash((last, token))
        hashes.append(last)
    return hashes


def save_prefixes(folder: Path, prefixes: Iterable[Prefix], model: LanguageModel) -> None:
    """Writes each state as a file of `t2r generate --save_state`, and a list of their tokens.

    A file's name follows from the model and the tokens: it never comes to hold another prompt's state, whenever this is
    interrupted.
    """
    make_folder(folder)
    names, of_model = {}, fingerprint(model)
    for ids, state in prefixes:
        name = f"{hashlib.sha256(json.dumps([of_model, *ids]).encode()).hexdigest()[:20]}.state"
        names[name] = ids
        first = lambda x: x._replace(index=x.index[0]) if isinstance(x, KVCache) else x  # noqa: E731
        state = state._replace(layers=tuple(map(first, state.layers)))
        key = jax.random.key_data(jax.random.key(0))
        generation = Generation(state, jnp.zeros(1, jnp.int32), jnp.zeros(1, bool), key)
        save_generation(folder / name, generation, model)
    with atomic_file(folder / LIST) as unfinished:
        unfinished.write_text(json.dumps(names))
    for old in folder.glob("*.state"):
        if old.name not in names:
            old.unlink()


def load_prefixes(folder: Path, cache: PrefixCache, model: LanguageModel) -> None:
    """Adds the states in a folder, if there are any. Those that are damaged or another model's are left out."""
    if not (folder / LIST).exists():
        return
    problems = []
    for name, ids in read_json(folder / LIST, "remove the folder: states are then computed again").items():
        try:
            state = load_generation(folder / name, model).state
        except InputError as error:
            problems.append(str(error).splitlines()[0])
            continue
        own = lambda x: x._replace(index=x.index[None]) if isinstance(x, KVCache) else x  # noqa: E731
        cache.add(ids, state._replace(layers=tuple(map(own, state.layers))))
    if problems:
        say(f"{len(problems)} kept states cannot be used, and are computed again when they are needed: {problems[0]}")

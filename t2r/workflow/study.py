"""A study: the rows of a table, each trained and scored in processes of its own, several at a time.

A row that is finished has a file ROW.json (with a seed other than 0: ROW.seedN.json) and is not done again. One that
was stopped goes on from its last checkpoint. All rows read the same tokenizer and token ids, which the first one makes.
Language models are scored by perplexity, translation models by BLEU.
"""

import contextlib
import importlib.util
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from t2r.console import say, short, table
from t2r.data.pairs import is_pairs, load_pairs
from t2r.data.sources import check_split, files_of, read_text
from t2r.errors import InputError, Stopped, raise_all, unknown
from t2r.evaluation.bleu import check_tokenizer
from t2r.files import atomic_file, digest_of, exclusive, make_folder, read_json, write_json
from t2r.store import model_dir
from t2r.store.tensors import Tensors
from t2r.training.config import check, find_config, load_config, unknown_fields
from t2r.training.metrics import read_metrics

BASE = "transformer"  # the row that others are converted from
SWAPPED = "_swapped"  # the suffix of a row that is converted and not trained
COLUMNS = ("row", "seed", "k", "perplexity", "valid_perplexity", "steps", "trained_tokens", "seconds")
PAIRS_COLUMNS = ("row", "seed", "k", "cross_k", "bleu", "chrf", "valid_perplexity", "steps", "seconds")
SCALED = ("steps", "optimizer.warmup_steps", "eval_every", "checkpoint_every")  # what a shorter study has fewer of
PREPARED = "prepared"  # the folder of tokenizers and token ids
KINDS = {int: "a whole number", float: "a number", bool: "true or false,"}
WAIT = 1.0  # seconds between looks at a folder that another process uses


def rows_of(config: str) -> list[str]:
    """All rows of a config file, and for each feature map that is converted to, what it is before finetuning."""
    names = list(_module(config).ROWS)
    maps = [load_config(f"{config}:{name}").convert.feature_map for name in names]
    return [*names, *(f"{name}{SWAPPED}" for name, feature_map in zip(names, maps) if feature_map == name)]


def columns(data: str) -> tuple[str, ...]:
    """The columns of a study's table: of translation models for sentence pairs, else of language models."""
    return PAIRS_COLUMNS if is_pairs(data) else COLUMNS


def _module(config: str) -> ModuleType:
    """A config file: its table ROWS, and EVALUATE, flags of `t2r evaluate` for its rows, if it has that."""
    path = find_config(config)
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not isinstance(getattr(module, "ROWS", None), dict) or BASE not in module.ROWS:
        raise InputError(f"{path} has no table ROWS with a row {BASE!r}: choose a config that has, such as enwik8")
    return module


class Row(NamedTuple):
    """A row of the table with one seed."""

    name: str
    seed: int

    @property
    def key(self) -> str:
        """The name of its files."""
        return self.name if self.seed == 0 else f"{self.name}.seed{self.seed}"

    @property
    def base(self) -> "Row":
        """The transformer that it is converted from, if it is."""
        return Row(BASE, self.seed)

    @property
    def variant(self) -> str:
        """The variant of the config that it is."""
        return self.name.removesuffix(SWAPPED)


class Study:
    """The rows of a config file, with fields that are changed in all of them."""

    def __init__(
        self,
        config: str,
        data: str,
        output: Path,
        fields: Sequence[str] = (),
        *,
        split: str = "test",
        scale: float = 1.0,
    ):
        self._config, self._data, self._output, self._split = config, data, output, split
        self._fields, self._scale = [f"data.source={data}", *fields], scale
        self._columns, self._translates = columns(data), is_pairs(data)
        self._jobs = 1
        self._log = threading.Lock()
        self._stopping = threading.Event()  # after Ctrl-C and SIGTERM: nothing more is begun
        self._finished: dict[Row, threading.Event] = {}
        self._failed: dict[Row, str] = {}
        self._processes: set[subprocess.Popen] = set()

    def run(self, names: Sequence[str], seeds: Sequence[int] = (0,), jobs: int = 1) -> dict[str, Any]:
        """Runs what is not finished; returns what study.json holds. Rows that fail do not stop the others."""
        self._jobs, ordered = jobs, self._with_bases(names)
        rows = [Row(name, seed) for seed in seeds for name in ordered]
        self._check(rows)
        make_folder(self._output)
        with exclusive(self._output), _stopped_by_sigterm():
            self._check_request()
            self._finished = {row: threading.Event() for row in rows}
            pool = ThreadPoolExecutor(jobs)
            try:
                for future in [pool.submit(self._row, row) for row in rows]:
                    future.result()
            except BaseException:  # Ctrl-C or SIGTERM: trainings save and end
                self._stop()
                raise
            finally:
                pool.shutdown(cancel_futures=True)
            return self._write()

    def _with_bases(self, names: Sequence[str]) -> list[str]:
        """The rows in the order in which they are begun: the transformer first, if another row needs it."""
        wanted, known = list(dict.fromkeys(names)), _module(self._config).ROWS
        others = [name for name in wanted if name.removesuffix(SWAPPED) not in known]
        if others:
            choices = rows_of(self._config)
            problems = [unknown("row", name, choices) for name in others]
            raise_all("the study cannot begin:", problems + _data_problems(self._data, self._split))
        variants = {name: self._load(Row(name, 0)) for name in wanted}
        if any(config.init_from for config in variants.values()) and BASE not in wanted:
            wanted.insert(0, BASE)
        return sorted(wanted, key=lambda name: (name != BASE, bool(variants.get(name) and variants[name].init_from)))

    def _load(self, row: Row) -> ConfigDict:
        """The config of a row, with all fields as they will be."""
        config = load_config(f"{self._config}:{row.variant}")
        fields = [field.split("=", 1) for field in self._fields]
        others = unknown_fields(config, [name for name, _ in fields])
        problems = [others.get(name) or _set(config, name, value) for name, value in fields]
        raise_all("fields:", [problem for problem in problems if problem])
        for name in SCALED:
            value = _get(config, name)
            _set(config, name, str(max(1, round(self._scale * value)) if value > 0 else value))
        config.seed = row.seed
        return config

    def _check(self, rows: Sequence[Row]) -> None:
        """Raises one error for all that can be known to be wrong before anything runs."""
        problems = _data_problems(self._data, self._split)
        if is_pairs(self._data) != ("encoder_layers" in self._load(Row(BASE, 0)).model):
            problems.append(f"--data={self._data}: language models need text, translation models sentence pairs")
        members: dict[str, list[str]] = {}  # rows with the same problem
        for row in rows:
            config = self._load(row)
            if row.name.endswith(SWAPPED) and not (config.convert.feature_map and config.init_from):
                problems.append(f"{row.name}: {row.variant} is not converted from the transformer")
            try:
                check(config)
            except InputError as error:
                for problem in _problems_in(str(error)):
                    members.setdefault(problem, []).append(row.name)
        problems += [f"{_shortly(names)}: {problem}" for problem, names in members.items()]
        raise_all("the study cannot begin:", list(dict.fromkeys(problems)))

    def _check_request(self) -> None:
        """Refuses a folder that has rows of another study, or of files that have changed since."""
        request = {"config": Path(self._config).stem, "data": self._data, "split": self._split}
        request |= {"fields": self._fields[1:], "scale": self._scale, "files": _digests(self._data)}
        path, rows = self._output / "request.json", self._results()
        advice = "choose another --output, or remove it"
        if path.exists():
            before = {"files": request["files"]} | read_json(path, "move the folder away to start over")
            before["fields"] = [field for field in before.get("fields", []) if not field.startswith("data.source=")]
            other = [name for name in request if _comparable(before.get(name)) != _comparable(request[name])]
            problems = [f"{name} was {before.get(name)}, is {request[name]}" for name in other if name != "files"]
            problems += ["the data has changed since"] * (other == ["files"])
            if rows or any(self._output.glob("*/checkpoints/*")):  # until then, it may still become another one
                raise_all(f"{self._output} holds another study ({advice}):", problems)
        elif rows:
            names = _shortly([row["row"] for row in rows])
            what = f"has rows ({names}), and no request.json, which says of which study"
            raise InputError(f"{self._output} {what}: {advice}")
        write_json(path, request)

    def _path(self, row: Row, suffix: str) -> Path:
        return self._output / f"{row.key}{suffix}"

    def _row(self, row: Row) -> None:
        """Trains and scores a row, unless that was done, and marks it as finished."""
        try:
            if self._path(row, ".json").exists():
                say(f"{row.key}: finished before")
                return
            if self._load(row).init_from:
                self._finished[row.base].wait()
                self._raise_if_stopping()
                if not self._path(row.base, ".json").exists():
                    raise InputError(f"{row.base.key} is not finished, which it is converted from")
            self._raise_if_stopping()
            say(f"{row.key}: begun")
            write_json(self._path(row, ".json"), self._measure(row))
            self._write()
            say(f"{row.key}: finished")
        except InputError as error:
            with self._log:
                self._failed[row] = str(error)
            say(f"{row.key}: failed: {error}")
        except Stopped:
            pass  # the same command goes on with it
        finally:
            self._finished[row].set()

    def _measure(self, row: Row) -> dict[str, Any]:
        config, model = self._load(row), self._path(row, "") / "model"
        result = {"row": row.name, "seed": row.seed, "steps": 0}
        if row.name.endswith(SWAPPED):
            if not model.exists():
                self._command(row, "convert", *_conversion_flags(config), f"--output={model}", f"--seed={row.seed}",
                              f"--model={self._path(row.base, '') / 'model'}")  # fmt: skip
            result |= {"seconds": 0.0, "valid_perplexity": None}
        else:
            _wait_until_free(self._path(row, ""), self._stopping)
            self._raise_if_stopping()
            trained = self._command(row, "train", *self._train_flags(row, config))
            result |= {"steps": trained["steps"], "valid_perplexity": trained["valid_perplexity"]}
            result |= {"seconds": training_seconds(self._path(row, "") / "metrics.jsonl")}
        flags = [f"--model={model}", f"--data={self._data}", f"--split={self._split}"]
        flags += getattr(_module(self._config), "EVALUATE", ())
        if not self._translates:  # batches of pairs have different numbers of tokens
            result["trained_tokens"] = result["steps"] * config.data.batch * config.data.length
            flags.append(f"--window={config.data.length}")
        scores = self._command(row, "evaluate", *flags)
        # Scores of translations have seconds, too: those of translating, not of training.
        result |= {name: scores[name] for name in self._columns if name in scores and name not in result}
        result |= _feature_sizes(model)
        result["parameters"] = sum(array.size for array in Tensors(model).values())
        return {**result, self._split: scores, "environment": _environment(model)}

    def _train_flags(self, row: Row, config: ConfigDict) -> list[str]:
        flags = [f"--config={self._config}:{row.variant}", f"--workdir={self._path(row, '')}"]
        flags += [f"--config.{field}" for field in self._fields] + [f"--config.seed={row.seed}"]
        flags += [f"--config.{name}={_get(config, name)}" for name in SCALED if self._scale != 1]
        flags.append(f"--config.prepared={self._output / PREPARED}")
        if config.init_from:
            flags.append(f"--config.init_from={self._path(row.base, '') / 'model'}")
        return flags

    def _command(self, row: Row, *arguments: str) -> dict[str, Any]:
        """Runs a command in a process of its own; returns its JSON. What it says goes to ROW.log."""
        with self._path(row, ".log").open("ab") as log:
            with self._log:  # so that _stop finds every process that was begun
                self._raise_if_stopping()
                process = subprocess.Popen(
                    [sys.executable, "-m", "t2r", *arguments],
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                    env=child_environment(self._jobs),
                )
                self._processes.add(process)
            output, _ = process.communicate()
            with self._log:
                self._processes.discard(process)
        if process.returncode:
            self._stopping.wait(WAIT)  # Ctrl-C ends a terminal's processes all at once: this one may be the first
            self._raise_if_stopping()
            said = self._path(row, ".log").read_text("utf-8", "replace").strip() or "no message"
            _, found, error = f"\n{said}".rpartition("\nerror: ")
            reason = "; ".join(_problems_in(error)) if found else said.splitlines()[-1]
            reason = reason.replace("--config.", "--set=")  # as fields are here
            raise InputError(f"{reason} (all of it: {self._path(row, '.log')})")
        return json.loads(output.splitlines()[-1])

    def _stop(self) -> None:
        """Ends all processes; trainings save first."""
        self._stopping.set()
        say("stopping: rows in training save first")
        for finished in self._finished.values():
            finished.set()
        with self._log:
            for process in self._processes:
                process.send_signal(signal.SIGTERM)

    def _raise_if_stopping(self) -> None:
        if self._stopping.is_set():
            raise Stopped

    def _write(self) -> dict[str, Any]:
        """Writes study.json and study.md from the files of the rows that are finished."""
        with self._log:
            return self._write_alone()

    def _write_alone(self) -> dict[str, Any]:
        results = self._results()
        content = {
            "config": Path(self._config).stem,
            "data": self._data,
            "split": self._split,
            "fields": self._fields,
            "scale": self._scale,
            "rows": results,
            "failed": {row.key: reason for row, reason in self._failed.items()},
        }
        write_json(self._output / "study.json", content)
        with atomic_file(self._output / "study.md") as unfinished:
            unfinished.write_text(markdown(results, self._columns), "utf-8")
        return content

    def _results(self) -> list[dict[str, Any]]:
        """What the rows' files hold, also those of earlier commands for other rows or seeds, in the config's order."""
        order = list(_module(self._config).ROWS)
        names = [*order, *(name + SWAPPED for name in order)]
        paths = [path for path in self._output.glob("*.json") if re.sub(r"\.seed\d+$", "", path.stem) in names]
        found = [_read_row(path, self._columns) for path in paths]

        def place(result: dict[str, Any]) -> tuple[bool, int, int]:
            row = Row(result["row"], result["seed"])
            return row.name != row.variant, order.index(row.variant), row.seed

        return sorted(found, key=place)


@contextlib.contextmanager
def _stopped_by_sigterm() -> Iterator[None]:
    """In its body, the first SIGTERM raises Stopped, as Ctrl-C raises KeyboardInterrupt. Further ones are ignored."""
    if threading.current_thread() is not threading.main_thread():  # Python allows signal handlers there only
        yield
        return

    received = []

    def stop(*_: Any) -> None:
        received.append(True)
        if len(received) == 1:
            raise Stopped("stopped by SIGTERM, and all rows with it")

    previous = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def child_environment(jobs: int) -> dict[str, str]:
    """The environment of a row's processes: each takes its share of a GPU's memory, where JAX alone would take most."""
    share = {"XLA_PYTHON_CLIENT_MEM_FRACTION": f"{0.9 / jobs:.3f}"} if jobs > 1 else {}
    return share | dict(os.environ)


def _data_problems(data: str, split: str) -> list[str]:
    problems = []
    try:
        check_split(split)
    except InputError as error:
        problems.append(f"--split={split}: {error}")
        split = "all"  # the data may be wrong, too
    if is_pairs(data):
        check_tokenizer("13a")  # BLEU is computed by a package that may be missing
        try:
            list(itertools.islice(load_pairs(data, split), 1))
        except InputError as error:
            problems.append(f"--data={data}: {error}")
        return problems
    files = files_of(data)
    problems += [f"--data={data}: {problem}" for path in files if (problem := _text_problem(path))]
    if not files and not data.startswith(("builtin:", "tfds:")):
        problems.append(f"--data={data!r}: use text:PATH, builtin:pydoc or tfds:NAME, or sentence pairs")
    return problems


def _text_problem(path: Path) -> str:
    """What is wrong with a file of text, if anything is."""
    try:
        read_text(path)
    except InputError as error:
        return str(error)
    return ""


def _read_row(path: Path, names: Sequence[str]) -> dict[str, Any]:
    """What a row's file holds: the columns `names`, and more."""
    advice = "remove it: the row is then done again"
    result = read_json(path, advice)
    missing = [name for name in names if name not in result]
    if missing:
        raise InputError(f"{path} is no row of this study, for it lacks {', '.join(missing)}: {advice}")
    if not isinstance(result["seed"], int) or Row(str(result["row"]), result["seed"]).key != path.stem:
        raise InputError(f"{path} is of row {result['row']!r} with seed {result['seed']!r}: {advice}")
    wrong = [name for name in names if name != "row" and not _is_figure(result[name])]
    if wrong:
        raise InputError(f"{path}: {wrong[0]} is {result[wrong[0]]!r}, which is no figure: {advice}")
    return result


def _is_figure(value: Any) -> bool:
    """Whether a cell of a table is a number, or empty."""
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def _digests(data: str) -> list[str]:
    """A digest of the content of each file of a spec; an empty text for one that cannot be read."""
    digests = []
    for path in files_of(data):
        try:
            digests.append(digest_of(path))
        except OSError:
            digests.append("")
    return digests


def _comparable(value: Any) -> Any:
    """A part of a request: of fields, the order does not matter."""
    return sorted(value) if isinstance(value, list) else value


def _problems_in(error: str) -> list[str]:
    """The problems that an error lists line by line, without its title; or its first line."""
    first, *others = error.strip().splitlines()
    problems = [line.strip().removeprefix("- ") for line in others if line.startswith("  - ")]
    return problems if first.endswith(":") and problems else [first]


def _shortly(names: Sequence[str]) -> str:
    """The names of rows, or of some of them."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _get(config: ConfigDict, name: str) -> Any:
    for part in name.split("."):
        config = config[part]
    return config


def _set(config: ConfigDict, name: str, value: str) -> str:
    """Sets a field, such as data.batch, from text, as the type that the field has; what is wrong, if anything is."""
    parents, _, last = name.rpartition(".")
    config = _get(config, parents) if parents else config
    kind = type(config[last])
    try:
        config[last] = value.lower() in ("true", "1") if kind is bool else kind(value)
    except (TypeError, ValueError):
        return f"--set={name}={value}: write {KINDS.get(kind, 'a value')} such as {config[last]!r}"
    return ""


def _conversion_flags(config: ConfigDict) -> list[str]:
    fields = ("feature_map", "features", "cross_features", "keep", "cross_keep", "attention", "window", "sinks")
    return [f"--{name}={config.convert[name]}" for name in fields if config.convert[name]]


def _wait_until_free(folder: Path, stopping: threading.Event) -> None:
    """Waits for a training that was begun by a study that is no longer there, unless this one is stopped."""
    said = False
    while not stopping.is_set():
        try:
            with exclusive(folder):
                return
        except InputError:
            if not said:
                say(f"{folder}: another process is training it; waiting")
            said = True
            stopping.wait(WAIT)


def training_seconds(path: Path) -> float:
    """Seconds of training from the logged speeds, whatever interruptions there were; compiling is not counted."""
    lines = [line for line in read_metrics(path) if line.get("steps_per_second")]
    steps = [0, *(line["step"] for line in lines)]
    return round(sum((b - a) / line["steps_per_second"] for a, b, line in zip(steps, steps[1:], lines)), 1)


def _feature_sizes(model: Path) -> dict[str, int | None]:
    """k of a model's linear attention, causal and, in a translation model, cross; None: it has none."""
    config = model_dir.load_config(model)
    specs = {"k": config.attention} | ({"cross_k": config.cross_attention} if config.encoder_layers else {})
    return {
        name: next((spec.features for spec in members if spec.kind != "softmax"), None)
        for name, members in specs.items()
    }


def _environment(model: Path) -> dict[str, Any] | None:
    """Where a model, or the one that it was converted from, was trained."""
    history = read_json(model / "provenance.json", "remove the model: it is then made again")["history"]
    return next((entry["environment"] for entry in reversed(history) if "environment" in entry), None)


def cells(results: Sequence[dict[str, Any]], names: Sequence[str]) -> list[list[Any]]:
    """A line of these columns for each row."""
    return [["" if row[name] is None else row[name] for name in names] for row in results]


def markdown(results: Sequence[dict[str, Any]], names: Sequence[str] = COLUMNS) -> str:
    """The table of a study, for a page."""
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    lines += ["| " + " | ".join(short(cell) for cell in row) + " |" for row in cells(results, names)]
    return "\n".join(lines) + "\n"


def as_table(results: Sequence[dict[str, Any]], names: Sequence[str] = COLUMNS) -> str:
    """The table of a study, for a terminal."""
    return table(list(names), cells(results, names))

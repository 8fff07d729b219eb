"""A run, top to bottom: data, model, restore, steps, model directory."""

import contextlib
import errno
import json
import math
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grain
import jax
import optax
from flax import nnx
from jax.sharding import Mesh
from ml_collections import ConfigDict

from t2r import environment, processes
from t2r.console import Progress, say
from t2r.convert import model_dir
from t2r.convert.swap import swap
from t2r.data.tokenizer import Tokenizer, TokenizerPair
from t2r.errors import InputError, Stopped, raise_all
from t2r.layout import shardings
from t2r.model.config import from_dict
from t2r.model.loss import Teacher
from t2r.model.parameters import arrays_of, count, trainable_names, with_arrays
from t2r.model.transformer import LanguageModel, make_model
from t2r.train.checkpoint import Checkpoints
from t2r.train.config import MAY_CHANGE, check, conversion, has_teacher
from t2r.train.metrics import Metrics, read_metrics
from t2r.train.optimizer import make_optimizer, make_schedule
from t2r.train.sharding import batch_ways, make_mesh, place, read_part
from t2r.train.step import Step, TrainState, init_state
from t2r.train.task import Task, learn_tokenizer, make_task


def train(config: ConfigDict, workdir: Path) -> dict[str, Any]:
    """Runs a config to its end, from the newest checkpoint if there is one; returns the scores of the result."""
    check(config)
    keep = max(config.keep_checkpoints, config.average_checkpoints)
    checkpoints = Checkpoints(workdir / "checkpoints", keep)
    if checkpoints.latest is not None:
        check_same_run(config, workdir)
    with full_disk_explained(workdir, checkpoints):
        return run(config, workdir, checkpoints)


def run(config: ConfigDict, workdir: Path, checkpoints: Checkpoints) -> dict[str, Any]:
    """The run itself."""
    start_time = time.time()
    model, tokenizer, history = build(config, workdir)
    mesh = make_mesh(config.mesh)
    task = make_task(config, workdir, model, tokenizer, batch_ways(mesh))
    batches = task.batches()
    optimizer = make_optimizer(config.optimizer, config.steps)
    trained = trainable_names(model, config.trainable)
    teacher = load_teacher(config)
    known = teacher and arrays_of(teacher.model)
    state = init_state(arrays_of(model), trained, optimizer, config.seed, teacher=known)
    state = place(state, shardings(state, mesh))

    # Nothing can be wrong with the config any more.
    processes.first_does(lambda: write_config(config, workdir))
    if checkpoints.latest is not None:
        state, data = checkpoints.restore(state)
        batches.set_state(data)
        say(f"continuing at step {int(state.step)} of {config.steps}")
    say(f"{count(state.trained):,} of {count(arrays_of(model)):,} parameters train on {task.summary}")
    state = run_steps(config, workdir, model, teacher, mesh, optimizer, state, batches, checkpoints, task)
    checkpoints.wait()
    averaged = [int(state.step)]
    if config.average_checkpoints > 1:
        mean, averaged = checkpoints.average(config.average_checkpoints, state)
        state = state._replace(trained=mean)
        say(f"the result is the mean of the checkpoints of steps {', '.join(map(str, averaged))}")
    checkpoints.close()

    model = with_arrays(model, {**state.trained, **state.frozen})
    score = validate(task, model, mesh)
    processes.first_does(lambda: record_score(workdir, config.steps, score))
    entry = {
        "action": "train",
        "config": config.to_dict(),
        "checkpoints": averaged,
        "valid_perplexity": score,
        "seconds": round(time.time() - start_time, 1),
        "environment": environment.describe(),
    }
    output = workdir / "model"
    whole = with_arrays(model, {name: processes.gather(array) for name, array in arrays_of(model).items()})
    content = model_dir.Model(whole, tokenizer, {"history": [*history, entry]})
    processes.first_does(lambda: model_dir.save(output, content, replace=True, dtype=config.export_dtype))
    return {"model": str(output), "steps": int(state.step), "valid_perplexity": score}


def check_same_run(config: ConfigDict, workdir: Path) -> None:
    """Refuses to continue a run under another config."""
    before, now = json.loads((workdir / "config.json").read_text()), json.loads(config.to_json())
    changed = [name for name in now if name not in MAY_CHANGE and before.get(name) != now[name]]
    raise_all(
        f"{workdir} holds a run of another config (choose another workdir, or remove it):",
        [f"config.{name} was {before.get(name)}, is {now[name]}" for name in changed],
    )


def write_config(config: ConfigDict, workdir: Path) -> None:
    """The resolved config, whole or not at all."""
    path = workdir / "config.json"
    unfinished = path.with_suffix(f".{os.getpid()}")
    unfinished.write_text(config.to_json(indent=1) + "\n")
    os.replace(unfinished, path)


def build(config: ConfigDict, workdir: Path) -> tuple[LanguageModel, Tokenizer | TokenizerPair, list[dict]]:
    """The model to train, its tokenizer, and what happened to it before."""
    if config.init_from:
        try:
            model, tokenizer, provenance = model_dir.load(config.init_from, **config.model)
        except InputError as error:
            raise InputError(f"config.init_from={config.init_from!r}: {error}") from None
        history = provenance["history"]
    else:
        tokenizer = learn_tokenizer(config, workdir)
        model = make_model(from_dict({**config.model, **vocabulary(tokenizer)}), rngs=nnx.Rngs(config.seed))
        history = []
    if plan := conversion(config):
        model = swap(model, **plan)
        history = [*history, {"action": "swap", **plan}]
    return model, tokenizer, history


def load_teacher(config: ConfigDict) -> Teacher | None:
    """The model as it was before its conversion, if the config wants something to be learned from it."""
    if not has_teacher(config):
        return None
    model = model_dir.load(config.init_from, dtype=config.model.dtype).model  # again: its arrays are not the student's
    return Teacher(model, config.teacher.soft)


def vocabulary(tokenizer: Tokenizer | TokenizerPair) -> dict[str, Any]:
    """The fields of a model config that follow from its tokenizer."""
    if not isinstance(tokenizer, TokenizerPair):
        return {"vocab_size": tokenizer.vocab_size}
    sizes = {"vocab_size": tokenizer.target.vocab_size, "source_vocab_size": tokenizer.source.vocab_size}
    return sizes if tokenizer.joint else {**sizes, "shared_embedding": False}


def validate(task: Task, model: LanguageModel, mesh: Mesh) -> float:
    """The model's perplexity, computed on all devices."""
    with jax.set_mesh(mesh):
        return task.validate(model)


def record_score(workdir: Path, step: int, score: float) -> None:
    """The line of the finished run's validation, unless an earlier run of this command has written it."""
    lines = read_metrics(workdir / "metrics.jsonl")
    if not any(line["step"] == step and "valid_perplexity" in line for line in lines):
        metrics = Metrics(workdir, step)
        metrics.write(step, valid_perplexity=score)
        metrics.close()


def run_steps(
    config: ConfigDict,
    workdir: Path,
    model: LanguageModel,
    teacher: Teacher | None,
    mesh: Mesh,
    optimizer: optax.GradientTransformation,
    state: TrainState,
    batches: grain.DatasetIterator,
    checkpoints: Checkpoints,
    task: Task,
) -> TrainState:
    """Steps until config.steps, logging, validating and saving on the way."""
    finetune = Step(model, optimizer, mesh, state, smoothing=config.label_smoothing, teacher=teacher)
    alone = config.teacher.transfer_steps  # first, in which layers learn each for itself
    transfer = Step(model, optimizer, mesh, state, teacher=teacher, transfer=True) if alone else None
    schedule = make_schedule(config.optimizer, config.steps)
    first = int(state.step)
    metrics = Metrics(workdir, first)
    unchecked: list[tuple[int, dict]] = []  # results not yet looked at: looking waits for the device
    tokens, last_log = 0.0, time.monotonic()

    with Progress("train", config.steps, first) as progress, termination() as asked_to_stop:
        for step in range(first + 1, config.steps + 1):
            one_step = transfer if step <= alone else finetune
            state, result = one_step(state, [read_part(part, mesh) for part in next(batches)])
            unchecked.append((step, result))
            last = step == config.steps
            stopping = asked_to_stop(step)
            saving = last or stopping or step % config.checkpoint_every == 0
            evaluating = config.eval_every and step % config.eval_every == 0 and not last
            if not (saving or evaluating or step % config.log_every == 0):
                progress.advance()
                continue

            results = check_finite(unchecked, config, checkpoints)
            unchecked = []
            tokens += sum(result.pop("tokens") for result in results)
            if step % config.log_every == 0 or last:
                now, result = time.monotonic(), results[-1]
                speed = tokens / (now - last_log)
                tokens, last_log = 0.0, now
                rate = float(schedule(step - 1))
                metrics.write(step, **result, learning_rate=rate, tokens_per_second=round(speed))
                shown = "distance" if step <= alone else "loss"
                progress.advance(**{shown: result[shown]}, tokens_per_s=round(speed))
            else:
                progress.advance()
            if evaluating:
                score = validate(task, with_arrays(model, {**state.trained, **state.frozen}), mesh)
                metrics.write(step, valid_perplexity=score)
                progress.say(f"step {step}: validation perplexity {score:.2f}")
            if saving:
                checkpoints.save(step, state, batches.get_state())
            if stopping and not last:
                checkpoints.close()
                metrics.close()
                raise Stopped(f"stopped as asked, at step {step} of {config.steps}, which is saved")
    metrics.close()
    return state


@contextlib.contextmanager
def termination() -> Iterator[Callable[[int], bool]]:
    """Within it SIGTERM does not end the process; the function says whether one has come, at every step."""
    if processes.several():  # jax.distributed catches it, and lets all stop after the same step
        yield processes.told_to_stop
        return
    came = threading.Event()
    if threading.current_thread() is not threading.main_thread():  # elsewhere signals cannot be caught
        yield lambda step: False
        return
    before = signal.signal(signal.SIGTERM, lambda *_: came.set())
    try:
        yield lambda step: came.is_set()
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def full_disk_explained(workdir: Path, checkpoints: Checkpoints) -> Iterator[None]:
    """Turns what libraries raise when a disk is full into one error; what was being written makes room."""
    try:
        yield
    except Exception as error:
        found = f"{error}"
        full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        if not (full or "No space left" in found or ("RESOURCE_EXHAUSTED" in found and "writ" in found)):
            raise
        checkpoints.drop_unfinished()
        steps = ", ".join(map(str, checkpoints.steps)) or "none yet"
        raise InputError(
            f"the disk of {workdir} is full ({shutil.disk_usage(workdir).free:,} bytes free): the run has stopped. "
            f"Intact: the checkpoints of steps {steps}. Free some space, or lower config.keep_checkpoints; the same "
            "command goes on from the last"
        ) from error


def check_finite(
    unchecked: list[tuple[int, dict]], config: ConfigDict, checkpoints: Checkpoints
) -> list[dict[str, float]]:
    """The results as numbers; the first that is not finite stops the run before anything is saved."""
    numbers = []
    for step, result in unchecked:
        values = {name: float(value) for name, value in result.items()}
        bad = [f"{name} is {value}" for name, value in values.items() if not math.isfinite(value)]
        if bad:
            latest = checkpoints.latest
            kept = f"the checkpoint of step {latest} in {checkpoints.folder}" if latest is not None else "no checkpoint"
            fields = config.optimizer
            raise InputError(
                f"step {step}: {' and '.join(bad)}. Lower config.optimizer.learning_rate (now {fields.learning_rate}), "
                f"lengthen config.optimizer.warmup_steps (now {fields.warmup_steps}) or tighten "
                f"config.optimizer.clip_norm (now {fields.clip_norm}). Intact: {kept}"
            )
        numbers.append(values)
    return numbers

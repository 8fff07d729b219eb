"""A training run from start to end: set up, restore, run the steps, save the model directory."""

import contextlib
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import grain
import jax
from jax.sharding import Mesh
from ml_collections import ConfigDict

from t2r import environment, processes
from t2r.console import Progress, say
from t2r.environment import running_time
from t2r.errors import InputError, Stopped, raise_all
from t2r.files import atomic_file, check_replaceable_json, exclusive, read_json
from t2r.layout import shardings
from t2r.model.parameters import arrays_of, parameter_count, with_arrays
from t2r.model.transformer import LanguageModel
from t2r.store import model_dir
from t2r.training.build import Built, build, load_teacher
from t2r.training.checkpoint import Checkpoints
from t2r.training.config import MAY_CHANGE, check
from t2r.training.interruptions import quiet_libraries, shortages_explained, stop_requests
from t2r.training.metrics import Metrics, read_metrics
from t2r.training.optimizer import make_schedule
from t2r.training.sharding import batch_ways, load_batch, make_mesh, place
from t2r.training.stages import Stages, make_stages
from t2r.training.step import TrainState, init_state, make_step
from t2r.training.task import Task, make_task


class Run(NamedTuple):
    """The constant parts of a run, set up once from its config."""

    config: ConfigDict
    workdir: Path
    built: Built
    mesh: Mesh
    task: Task
    stages: Stages
    checkpoints: Checkpoints

    def model(self, state: TrainState) -> LanguageModel:
        """The model with the parameters of `state`."""
        return with_arrays(self.built.model, {**state.trained, **state.frozen})

    def validate(self, state: TrainState) -> float:
        """The perplexity of the validation data under the model of `state`, computed on all devices."""
        with jax.set_mesh(self.mesh):
            return self.task.validate(self.model(state))


def train(config: ConfigDict, workdir: Path) -> dict[str, Any]:
    """Runs a config to its last step, from the newest checkpoint if there is one.

    Returns the path of the trained model, its number of steps and its validation perplexity.
    """
    check(config)
    check_foreign(workdir)
    # Of several processes, which share the work directory, the first holds it for all.
    alone = exclusive(workdir) if processes.is_first() else contextlib.nullcontext()
    with alone, quiet_libraries():
        checkpoints = Checkpoints(workdir / "checkpoints", max(config.keep_checkpoints, config.average_checkpoints))
        if checkpoints.latest is not None:
            check_same_run(config, workdir, checkpoints.latest)
        read_metrics(workdir / "metrics.jsonl")  # a damaged file is refused before anything is computed
        with shortages_explained(workdir, checkpoints):
            return run_to_the_end(config, workdir, checkpoints)


def run_to_the_end(config: ConfigDict, workdir: Path, checkpoints: Checkpoints) -> dict[str, Any]:
    """Sets the run up, restores it, runs its steps, and writes the model directory."""
    began = time.time()
    run, state, batches = set_up(config, workdir, checkpoints)
    state = restore(run, state, batches)
    processes.on_first_process(lambda: write_config(config, workdir))  # after all that may refuse it
    state = run_steps(run, state, batches)
    state, averaged = average(run, state)
    return save_model(run, state, {"checkpoints": averaged}, began)


def check_foreign(workdir: Path) -> None:
    """Refuses a folder whose config.json or folder `model` is of something else: they would be replaced."""
    keys = {"steps", "optimizer", "data"}
    check_replaceable_json(workdir / "config.json", keys, "a training run", "choose another workdir")
    model_dir.check_replaceable(workdir / "model")


def check_same_run(config: ConfigDict, workdir: Path, step: int) -> None:
    """Raises an InputError if the run in `workdir`, now at `step`, has another config, apart from MAY_CHANGE."""
    file = read_json(workdir / "config.json", "move the work directory away to start over")
    before, now = flat(file), flat(json.loads(config.to_json()))
    changed = [name for name in {**now, **before} if before.get(name, ABSENT) != now.get(name, ABSENT)]
    raise_all(
        f"{workdir} holds a run with another config (choose another workdir, or remove it):",
        [
            f"config.{name} was {before.get(name, ABSENT)}, is {now.get(name, ABSENT)}"
            for name in changed
            if name.partition(".")[0] not in MAY_CHANGE and not (name == "optimizer.period" and before.get(name) == 0)
        ],
    )
    fields = config.optimizer
    if "steps" in changed and fields.schedule == "cosine_cycles" and not fields.period:
        both = [steps - config.transfer.steps for steps in (before["steps"], config.steps)]  # transfer has its own
        old, new = (max(steps - fields.warmup_steps, 1) for steps in both)
        if old == new:
            return
        rates = [float(make_schedule(fields, steps)(max(step - config.transfer.steps, 0))) for steps in both]
        raise InputError(
            f"config.steps was {before['steps']}, is {config.steps}: with config.optimizer.period=0 the cosine "
            f"schedule spans all steps, so the learning rate after step {step} would be {rates[1]:.3g} instead of "
            f"{rates[0]:.3g}. Set --config.optimizer.period={old} to keep the run's schedule, after which a new cycle "
            f"begins, or --config.optimizer.period={new} to span {config.steps} steps from now on; or choose "
            "another workdir"
        )


ABSENT = "absent"  # a field that a config does not have


def flat(fields: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{dotted name: value} of the fields of a config, such as `optimizer.learning_rate`."""
    result = {}
    for name, value in fields.items():
        result |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return result


def set_up(
    config: ConfigDict, workdir: Path, checkpoints: Checkpoints
) -> tuple[Run, TrainState, grain.DatasetIterator]:
    """(the run: model, mesh, data and optimizer; the state before the first step, on the mesh; the batches)."""
    built, mesh = build(config, workdir), make_mesh(config.mesh)
    task = make_task(config, workdir, built.model, built.tokenizer, batch_ways(mesh))
    batches = task.batches()
    teacher = load_teacher(config)  # after the task, whose data another copy of it may have written
    stages = make_stages(config, built.model, teacher)
    known = teacher and arrays_of(teacher.model)
    state = init_state(arrays_of(built.model), stages.learning, stages.optimizer, config.seed, teacher=known)
    state = place(state, shardings(state, mesh))
    return Run(config, workdir, built, mesh, task, stages, checkpoints), state, batches


def write_config(config: ConfigDict, workdir: Path) -> None:
    """Writes the resolved config to config.json, atomically."""
    with atomic_file(workdir / "config.json") as unfinished:
        unfinished.write_text(config.to_json(indent=1) + "\n")


def restore(run: Run, state: TrainState, batches: grain.DatasetIterator) -> TrainState:
    """The state of the newest checkpoint, after moving `batches` to its position; `state` if there is no checkpoint."""
    if run.checkpoints.latest is not None:
        state, data = run.checkpoints.restore(state)
        if int(state.step) > run.config.steps:
            raise InputError(
                f"{run.workdir} is at step {int(state.step)}, beyond config.steps={run.config.steps}: choose as many "
                "steps or more, or another workdir"
            )
        batches.set_state(data)
        say(f"continuing at step {int(state.step)} of {run.config.steps}")
    total = parameter_count(arrays_of(run.built.model))
    say(f"{parameter_count(state.trained):,} of {total:,} parameters train on {run.task.summary}")
    return state


def run_steps(run: Run, state: TrainState, batches: grain.DatasetIterator) -> TrainState:
    """Runs the remaining steps; logs, validates and saves checkpoints at the intervals of the config."""
    config, checkpoints, first = run.config, run.checkpoints, int(state.step)
    log, stage, one_step = Log(config, run.workdir, run.stages, first), None, None

    with Progress("train", config.steps, first) as progress, stop_requests() as stop_requested:
        for step in range(first + 1, config.steps + 1):
            if stage is not run.stages.at(step):
                stage = run.stages.at(step)
                one_step = make_step(stage.objective, stage.optimizer, run.mesh, state)
                progress.forget()  # the values of another stage are others
                if len(run.stages.all) > 1:
                    progress.say(f"stage {stage.name}: steps {stage.first + 1} to {stage.last}")
            state, result = one_step(state, [load_batch(part, run.mesh) for part in next(batches)])
            log.add(step, result)
            last, stopping = step == config.steps, stop_requested(step)
            saving = last or stopping or step % config.checkpoint_every == 0
            evaluating = config.eval_every and step % config.eval_every == 0 and not last
            logging = last or step % config.log_every == 0
            if saving or evaluating or logging:
                log.check_finite(checkpoints)
            progress.advance(**(log.write(step) if logging else {}))
            with log.not_timed():
                if evaluating:
                    score = run.validate(state)
                    log.metrics.write(step, valid_perplexity=score)
                    progress.say(f"step {step}: validation perplexity {score:.2f}")
                if saving:
                    checkpoints.save(step, state, batches.get_state())
            if stopping:  # after the last step, too: what would follow may take long
                checkpoints.close()
                log.metrics.close()
                raise Stopped(f"stopped by SIGTERM after step {step} of {config.steps}, which is saved")
    log.metrics.close()
    checkpoints.wait()
    return state


STEPS_AHEAD = 2  # that the host starts before they are computed: a device is never idle, and a run can stop soon


class Log:
    """The results of steps. They are read only when needed, because reading one waits for the device."""

    def __init__(self, config: ConfigDict, workdir: Path, stages: Stages, first: int):
        self.metrics = Metrics(workdir, first)
        self._config, self._stages = config, stages
        self._unchecked: list[tuple[int, dict]] = []
        self._latest: dict[str, float] = {}
        self._tokens, self._steps, self._since = 0.0, 0, running_time()

    @contextlib.contextmanager
    def not_timed(self) -> Iterator[None]:
        """Within it, time does not count for tokens_per_second."""
        began = running_time()
        yield
        self._since += running_time() - began

    def add(self, step: int, result: dict[str, jax.Array]) -> None:
        """Stores the result of a step without waiting for it, but for an earlier one: see STEPS_AHEAD."""
        self._unchecked.append((step, result))
        if len(self._unchecked) > STEPS_AHEAD:
            jax.block_until_ready(self._unchecked[-1 - STEPS_AHEAD][1])

    def check_finite(self, checkpoints: Checkpoints) -> None:
        """Waits for all stored results. Raises an InputError, before anything is saved, if one is not finite."""
        for step, result in self._unchecked:
            values = {name: float(value) for name, value in result.items()}
            bad = [f"{name} is {value}" for name, value in values.items() if not math.isfinite(value)]
            if bad:
                raise InputError(f"step {step}: {' and '.join(bad)}. {self._advice(checkpoints)}")
            self._tokens += values.pop("tokens")
            self._steps += 1
            self._latest = values
        self._unchecked = []

    def _advice(self, checkpoints: Checkpoints) -> str:
        latest, fields = checkpoints.latest, self._config.optimizer
        saved = f"the checkpoint of step {latest} in {checkpoints.folder}" if latest is not None else "no checkpoint"
        return (
            f"Lower config.optimizer.learning_rate (now {fields.learning_rate}), lengthen "
            f"config.optimizer.warmup_steps (now {fields.warmup_steps}) or tighten config.optimizer.clip_norm (now "
            f"{fields.clip_norm}). Intact: {saved}"
        )

    def write(self, step: int) -> dict[str, float]:
        """Writes a line of metrics; returns the values for the progress bar."""
        now = running_time()
        seconds = now - self._since
        speed, steps = round(self._tokens / seconds), round(self._steps / seconds, 4)
        self._tokens, self._steps, self._since = 0.0, 0, now
        stage = self._stages.at(step)
        rate = stage.learning_rate(step)
        self.metrics.write(step, **self._latest, learning_rate=rate, tokens_per_second=speed, steps_per_second=steps)
        shown = "distance" if stage.objective.transfer else "loss"
        return {shown: self._latest[shown], "learning_rate": rate, "tokens_per_s": speed}


def average(run: Run, state: TrainState) -> tuple[TrainState, list[int]]:
    """(the state with the mean parameters of the last `average_checkpoints` checkpoints, their steps)."""
    if run.config.average_checkpoints == 1:
        steps = [int(state.step)]
    else:
        mean, steps = run.checkpoints.average(run.config.average_checkpoints, state)
        state = state._replace(trained=mean)
        say(f"the final model is the mean of the checkpoints of steps {', '.join(map(str, steps))}")
    run.checkpoints.close()
    return state, steps


def save_model(run: Run, state: TrainState, entry: dict[str, Any], began: float) -> dict[str, Any]:
    """Validates the final model and writes it to workdir/model, with `entry` in its history."""
    score, output = run.validate(state), run.workdir / "model"
    processes.on_first_process(lambda: record_score(run.workdir, run.config.steps, score))
    entry = {
        "action": "train",
        "config": run.config.to_dict(),
        **entry,
        "valid_perplexity": score,
        "seconds": round(time.time() - began, 1),
        "environment": environment.describe(),
    }
    model = run.model(state)
    gathered = with_arrays(model, {name: processes.gather(array) for name, array in arrays_of(model).items()})
    content = model_dir.LoadedModel(gathered, run.built.tokenizer, {"history": [*run.built.history, entry]})
    dtype = run.config.export_dtype
    processes.on_first_process(lambda: model_dir.save(output, content, replace=True, dtype=dtype))
    return {"model": str(output), "steps": int(state.step), "valid_perplexity": score}


def record_score(workdir: Path, step: int, score: float) -> None:
    """Logs the final validation perplexity, unless an earlier invocation has logged it."""
    lines = read_metrics(workdir / "metrics.jsonl")
    if not any(line["step"] == step and "valid_perplexity" in line for line in lines):
        metrics = Metrics(workdir, step)
        metrics.write(step, valid_perplexity=score)
        metrics.close()

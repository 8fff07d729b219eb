"""A run, top to bottom: data, model, restore, steps, model directory."""

import json
import math
import os
import time
from pathlib import Path
from typing import Any

import grain
import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh
from ml_collections import ConfigDict

from t2r import environment
from t2r.console import Progress, say
from t2r.convert import model_dir
from t2r.convert.swap import swap
from t2r.data.batches import prepare_tokenizer, tokenize, training_batches
from t2r.data.sources import load_documents
from t2r.data.tokenizer import Tokenizer
from t2r.errors import InputError, raise_all
from t2r.evaluate.perplexity import perplexity
from t2r.model.config import from_dict
from t2r.model.parameters import arrays_of, count, trainable_names, with_arrays
from t2r.model.transformer import LanguageModel, check_length
from t2r.train.checkpoint import Checkpoints
from t2r.train.config import MAY_CHANGE, check
from t2r.train.metrics import Metrics
from t2r.train.optimizer import make_optimizer, make_schedule
from t2r.train.sharding import batch_sharding, make_mesh, replicated
from t2r.train.step import TrainState, init_state, make_step


def train(config: ConfigDict, workdir: Path) -> dict[str, Any]:
    """Runs a config to its end, from the newest checkpoint if there is one; returns the scores of the result."""
    check(config)
    checkpoints = Checkpoints(workdir / "checkpoints", config.keep_checkpoints)
    if checkpoints.latest is not None:
        check_same_run(config, workdir)
    start_time = time.time()
    model, tokenizer, history = build(config, workdir)
    check_length(model.config, config.data.length)
    # With a source of its own to validate on, all of `source` is for training.
    train_split, valid_source, valid_split = "train", config.data.source, "valid"
    if config.data.valid:
        train_split, valid_source, valid_split = "all", config.data.valid, "all"
    tokens = tokenize(tokenizer, load_documents(config.data.source, train_split))
    valid = np.append(tokenizer.end, tokenize(tokenizer, load_documents(valid_source, valid_split)))
    batches = training_batches(tokens, length=config.data.length, batch=config.data.batch, seed=config.seed)

    mesh = make_mesh(config.mesh)
    if (config.data.batch // config.accumulate) % mesh.size:
        raise InputError(
            f"config.data.batch={config.data.batch} over config.accumulate={config.accumulate} must divide among "
            f"{mesh.size} devices"
        )
    optimizer = make_optimizer(config.optimizer, config.steps)
    trained = trainable_names(model, config.trainable)
    state = jax.device_put(init_state(arrays_of(model), trained, optimizer, config.seed), replicated(mesh))

    # Nothing can be wrong with the config any more.
    write_config(config, workdir)
    if checkpoints.latest is not None:
        state, data = checkpoints.restore(state)
        batches.set_state(data)
        say(f"continuing at step {int(state.step)} of {config.steps}")
    say(
        f"{count(state.trained):,} of {count(arrays_of(model)):,} parameters train on {len(tokens):,} tokens, "
        f"{config.data.batch * config.data.length:,} a step"
    )
    state, score = run_steps(config, workdir, model, mesh, optimizer, state, batches, checkpoints, valid)
    checkpoints.close()

    model = with_arrays(model, {**state.trained, **state.frozen})
    entry = {
        "action": "train",
        "config": config.to_dict(),
        "valid_perplexity": score,
        "seconds": round(time.time() - start_time, 1),
        "environment": environment.describe(),
    }
    output = workdir / "model"
    content = model_dir.Model(model, tokenizer, {"history": [*history, entry]})
    model_dir.save(output, content, replace=True, dtype=config.export_dtype)
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


def build(config: ConfigDict, workdir: Path) -> tuple[LanguageModel, Tokenizer, list[dict]]:
    """The model to train, its tokenizer, and what happened to it before."""
    data, convert = config.data, config.convert
    if config.init_from:
        model, tokenizer, provenance = model_dir.load(config.init_from, **config.model)
        history = provenance["history"]
    else:
        split = "all" if data.valid else "train"
        tokenizer = prepare_tokenizer(workdir, data.source, split, data.tokenizer, data.vocab_size)
        fields = from_dict({**config.model, "vocab_size": tokenizer.vocab_size})
        model, history = LanguageModel(fields, rngs=nnx.Rngs(config.seed)), []
    if convert.feature_map:
        plan = dict(feature_map=convert.feature_map, features=convert.features or None, keep=convert.keep)
        model = swap(model, **plan, seed=config.seed)
        history = [*history, {"action": "swap", **plan}]
    return model, tokenizer, history


def run_steps(
    config: ConfigDict,
    workdir: Path,
    model: LanguageModel,
    mesh: Mesh,
    optimizer: optax.GradientTransformation,
    state: TrainState,
    batches: grain.DatasetIterator,
    checkpoints: Checkpoints,
    valid: np.ndarray,
) -> tuple[TrainState, float]:
    """Steps until config.steps, logging, evaluating and saving on the way; also the last validation perplexity."""
    step_function = make_step(model, optimizer, mesh)
    schedule = make_schedule(config.optimizer, config.steps)
    first = int(state.step)
    metrics = Metrics(workdir, first)
    tokens_per_step = config.data.batch * config.data.length
    unchecked: list[tuple[int, dict]] = []  # results not yet looked at: looking waits for the device
    last_log = (first, time.monotonic())

    def validate() -> float:
        return perplexity(with_arrays(model, {**state.trained, **state.frozen}), valid, quiet=True).perplexity

    with Progress("train", config.steps, first) as progress:
        for step in range(first + 1, config.steps + 1):
            batch = next(batches).reshape(config.accumulate, -1, config.data.length + 1)
            state, result = step_function(state, jax.device_put(batch, batch_sharding(mesh)))
            unchecked.append((step, result))
            last = step == config.steps
            saving = last or step % config.checkpoint_every == 0
            evaluating = config.eval_every and step % config.eval_every == 0 and not last
            if not (saving or evaluating or step % config.log_every == 0):
                progress.advance()
                continue

            result = check_finite(unchecked, config, checkpoints)
            unchecked = []
            if step % config.log_every == 0 or last:
                now = time.monotonic()
                speed = tokens_per_step * (step - last_log[0]) / (now - last_log[1])
                last_log = (step, now)
                rate = float(schedule(step - 1))
                metrics.write(step, **result, learning_rate=rate, tokens_per_second=round(speed))
                progress.advance(loss=result["loss"], tokens_per_s=round(speed))
            else:
                progress.advance()
            if evaluating:
                score = validate()
                metrics.write(step, valid_perplexity=score)
                progress.say(f"step {step}: validation perplexity {score:.2f}")
            if saving:
                checkpoints.save(step, state, batches.get_state())
    score = validate()
    if first < config.steps:  # else this run was finished before, and has the line
        metrics.write(config.steps, valid_perplexity=score)
    metrics.close()
    return state, score


def check_finite(unchecked: list[tuple[int, dict]], config: ConfigDict, checkpoints: Checkpoints) -> dict[str, float]:
    """The newest results as numbers; the first that is not finite stops the run before anything is saved."""
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
    return values

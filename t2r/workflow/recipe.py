"""The config of a conversion's run: a variant of configs/convert.py for a model, its data and the options given."""

import ast
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from ml_collections import ConfigDict

from t2r.data.pairs import is_pairs
from t2r.errors import InputError
from t2r.model.config import ModelConfig
from t2r.training.config import check, check_overrides, load_config

LEAST_TEXTS = 400  # that the teacher writes: the last twentieth of them are held out


def make_config(
    model: str | Path,
    architecture: ModelConfig,
    *,
    data: str | None = None,
    recipe: str | None = None,
    steps: int | None = None,
    plan: dict[str, Any] | None = None,
    fields: dict[str, Any] | None = None,
) -> ConfigDict:
    """`plan` has fields of config.convert, `fields` any field by its dotted name, such as `data.batch`."""
    recipe = recipe or _default_recipe(architecture, data)
    config = load_config(f"convert:{recipe}")
    _check_data(architecture, data, recipe)
    config.init_from = str(model)
    if jax.default_backend() == "cpu":
        config.model.dtype = "float32"  # CPUs gain nothing from bfloat16
    if data:
        config.data.update(valid=data) if recipe.startswith("data_free") else config.data.update(source=data)
    _fit_positions(config, architecture.max_positions)
    _plan(config, plan or {})
    if steps:
        _shorten(config, steps)
    config.log_every = max(1, (config.transfer.steps or config.steps) // 8)
    config.eval_every = config.transfer.steps or max(1, config.steps // 4)  # so that the end of the transfer is scored
    config.checkpoint_every = max(1, config.steps // 20)
    if "init_from" in (fields or {}):
        raise InputError(f"--set=init_from={fields['init_from']}: the model to convert is --model={model}")
    set_fields(config, fields or {})
    if config.teacher.writes and "teacher.texts" not in (fields or {}):  # no more than are read
        config.teacher.texts = min(config.teacher.texts, max(LEAST_TEXTS, config.steps * config.data.batch))
    check(config)
    return config


def _default_recipe(architecture: ModelConfig, data: str | None) -> str:
    if architecture.encoder_layers:
        return "distilled"
    return "text" if data else "data_free"


def _check_data(architecture: ModelConfig, data: str | None, recipe: str) -> None:
    translates = bool(architecture.encoder_layers)
    kind, needed = ("translation", "tsv:FILE") if translates else ("language", "text:FILE")
    if recipe.startswith(("pairs", "distilled")) != translates:
        fitting = "pairs or distilled" if translates else "text or data_free"
        raise InputError(f"--recipe={recipe}: the model is a {kind} model; choose {fitting}")
    if data is None and not recipe.startswith("data_free"):
        raise InputError(f"--data is missing: the recipe {recipe} trains a {kind} model on --data={needed}")
    if data is not None and is_pairs(data) != translates:
        raise InputError(f"--data={data}: a {kind} model needs {'sentence pairs' if translates else 'text'}, {needed}")


def _fit_positions(config: ConfigDict, positions: int) -> None:
    """No sequences longer than the model's learned positions, if it has such."""
    if positions:
        config.data.length = min(config.data.length, positions)
        config.teacher.length = min(config.teacher.length, positions - 1)


def _plan(config: ConfigDict, plan: dict[str, Any]) -> None:
    """Sets the fields of config.convert that are given, and those that follow: without a window there are no sinks."""
    given = {name: value for name, value in plan.items() if value is not None}
    if given.get("feature_map", "t2r") != "t2r":
        given = {"features": 0, "cross_features": 0, **given}  # the map's own, not those of the recipe
    if given.get("attention") == "cross":
        given = {"window": 0, **given}
    if given.get("window") == 0:
        given = {"sinks": 0, **given}
    config.convert.update(given)


def _shorten(config: ConfigDict, steps: int) -> None:
    """Another number of steps: the transfer keeps its share of them; in a shorter run so do the warm-ups."""
    share = steps / config.steps
    config.transfer.steps = round(config.transfer.steps * share)
    for fields in (config.transfer, config.optimizer):
        fields.warmup_steps = min(fields.warmup_steps, round(fields.warmup_steps * share))
    config.steps = steps


def set_fields(config: ConfigDict, fields: dict[str, Any]) -> None:
    """Sets fields by their dotted names; all that do not exist are one error."""
    check_overrides(config, list(fields))
    try:
        config.update_from_flattened_dict(fields)
    except (TypeError, ValueError) as error:
        raise InputError(f"config: {error}") from None


def parse_fields(assignments: Sequence[str]) -> dict[str, Any]:
    """`["data.batch=16", "data.valid=text:a.txt"]` as {name: value}."""
    fields = {}
    for assignment in assignments:
        name, equals, value = assignment.partition("=")
        if not equals:
            raise InputError(f"--set={assignment}: write FIELD=VALUE, such as --set=data.batch=16")
        try:
            number = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            number = None
        fields[name] = number if isinstance(number, int | float) else value
    return fields

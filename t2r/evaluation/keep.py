"""Which layers keep softmax attention, chosen by measured damage: `keep=auto`."""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

from t2r.console import say, table
from t2r.conversion.swap import swapped_config
from t2r.errors import InputError
from t2r.evaluation.damage import Damage, rows
from t2r.model.config import ModelConfig
from t2r.model.state_size import natural_length, sequence_bytes

MOST_DAMAGE = 10.0  # percent above the score of the whole model: the bound of keep=auto

ATTENTION = {"keep": "attention", "cross_keep": "cross"}  # what each field of a plan is for
COUNT, PERCENT = r"(?P<count>\d+)", r"(?P<percent>\d+(\.\d+)?)%"
BUDGET = r"(?P<size>\d+(\.\d+)?)(?P<unit>[KMG])iB(@(?P<length>[1-9]\d*))?"
AUTO = re.compile(f"auto(:({COUNT}|{PERCENT}|{BUDGET}))?")
UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}


class Rule(NamedTuple):
    """How many layers are kept: a count; all above a damage in percent; or as many as fit into a state of some size."""

    count: int | None = None
    percent: float | None = None
    budget: int | None = None  # bytes of the state of one sequence
    length: int | None = None  # tokens of that sequence; None: see `natural_length`


def is_automatic(keep: str) -> bool:
    """Whether `keep` asks for a measurement: auto, auto:4, auto:10% or auto:8MiB."""
    return keep.startswith("auto")


def parse(keep: str) -> Rule:
    """The rule of `auto`, `auto:4`, `auto:10%`, `auto:8MiB` or `auto:8MiB@4096`."""
    match = AUTO.fullmatch(keep)
    if not match:
        raise InputError(
            f"keep={keep!r}: use auto, auto:N for the N worst layers, auto:P% for those that damage more, or auto:8MiB "
            "for as many as fit into a state of that size (KiB, MiB, GiB; auto:8MiB@4096: for 4,096 tokens)"
        )
    if match["count"]:
        return Rule(count=int(match["count"]))
    if match["size"]:
        budget = round(float(match["size"]) * UNITS[match["unit"]])
        return Rule(budget=budget, length=int(match["length"]) if match["length"] else None)
    return Rule(percent=float(match["percent"] or MOST_DAMAGE))


def choose_layers(
    plan: dict[str, Any], config: ModelConfig, measure: Callable[[], Damage]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(the arguments of `swap` with layer numbers in place of `auto`, the measurement for the provenance)."""
    asked = {name: plan[name] for name in ATTENTION if plan.get(name) and is_automatic(plan[name])}
    if not asked:
        return plan, {}
    translates = bool(config.encoder_layers)
    if "cross_keep" in asked and not translates:
        raise InputError(f"cross_keep={plan['cross_keep']!r}: a language model has no cross attention")
    if "keep" in asked and plan.get("cross_keep") is None and translates:
        asked["cross_keep"] = plan["keep"]  # each kind of attention has its own worst layers
    check(asked, plan, config)  # before anything is measured
    damage = measure()
    chosen = choose(asked, plan, config, damage)
    say(table(["attention", "perplexity", "damage"], [("all", damage.base, ""), *rows(damage)]))
    kept = ", ".join(f"{name}={keep} keeps {chosen[name]}" for name, keep in asked.items())
    say(f"{kept} (measured in {damage.seconds} s)")
    return {**plan, **chosen}, {"asked": asked, "damage": damage._asdict()}


def check_plan(plan: dict[str, Any], config: ModelConfig) -> None:
    """Raises an InputError for a conversion that cannot be: better before anything is computed than after it."""
    if any(spec.kind != "softmax" for spec in (*config.attention, *config.cross_attention)):
        raise InputError("the model is converted already: give the transformer, all of whose attention is softmax")
    asked = {name: plan[name] for name in ATTENTION if plan.get(name) and is_automatic(plan[name])}
    check(asked, plan, config)
    _swapped(config, plan, dict.fromkeys(asked, "none"))


def check(asked: dict[str, str], plan: dict[str, Any], config: ModelConfig) -> None:
    """Raises an InputError for rules that no damage could satisfy: more layers than there are, too small a state."""
    rules = {name: parse(keep) for name, keep in asked.items()}
    for name, rule in rules.items():
        if (rule.count or 0) > config.layers:
            raise InputError(f"keep={asked[name]!r}: the model has {config.layers} layers")
        if rule.budget is None:
            continue
        if {*rules.values()} != {rule} or "keep" not in rules:
            raise InputError(f"{name}={asked[name]!r}: a budget is for all of the state; give it as keep alone")
        length = rule.length or natural_length(config)
        state = f"keep={asked[name]!r}: the state of a sequence of {length:,} tokens"
        converted = _swapped(config, plan, dict.fromkeys(asked, "none"))
        whole, least = (sequence_bytes(one, length) for one in (config, converted))
        if whole <= rule.budget:
            raise InputError(f"{state} fits without a conversion: the transformer's has {_size(whole)}")
        if least > rule.budget:
            raise InputError(f"{state} has {_size(least)} when all layers are converted: give at least as much")


def choose(asked: dict[str, str], plan: dict[str, Any], config: ModelConfig, damage: Damage) -> dict[str, str]:
    """For each rule that is asked for, the numbers of the layers that are kept, such as 3,17, or none."""
    chosen = {}
    for name, keep in asked.items():
        rule, attention = parse(keep), ATTENTION[name]
        if rule.budget is not None:
            return _within_budget(rule, list(asked), plan, config, damage)
        worst = rule.count is not None
        chosen[name] = _numbers(damage.worst(rule.count, attention) if worst else damage.above(rule.percent, attention))
    return chosen


def _within_budget(
    rule: Rule, names: list[str], plan: dict[str, Any], config: ModelConfig, damage: Damage
) -> dict[str, str]:
    """The N worst layers of each kind of attention, with the largest N whose state fits."""
    length = rule.length or natural_length(config)
    most = min(len(damage.layers(ATTENTION[name])) for name in names)
    for count in reversed(range(most)):
        chosen = {name: _numbers(damage.worst(count, ATTENTION[name])) for name in names}
        size = sequence_bytes(_swapped(config, plan, chosen), length)
        if size <= rule.budget:
            break
    say(f"{count} layers are kept: {_size(size)} of state at {length:,} tokens")
    return chosen


def _swapped(config: ModelConfig, plan: dict[str, Any], chosen: dict[str, str]) -> ModelConfig:
    return swapped_config(config, **{name: value for name, value in {**plan, **chosen}.items() if name != "seed"})


def _numbers(layers: list[int]) -> str:
    return ",".join(map(str, layers)) or "none"


def _size(count: int) -> str:
    return f"{count / 2**20:,.2f} MiB" if count >= 2**20 else f"{count / 2**10:,.2f} KiB"

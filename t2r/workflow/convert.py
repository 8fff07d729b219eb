"""Converts a transformer into an RNN and finetunes it, in steps that resume: from a source to a model and a report."""

import copy
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from t2r import environment
from t2r.console import finite, say
from t2r.conversion.directory import merge_model
from t2r.data.pairs import is_pairs
from t2r.data.prepared import stamps, stamps_of
from t2r.errors import InputError
from t2r.evaluation.bleu import check_tokenizer
from t2r.evaluation.keep import check_plan
from t2r.files import check_free, exclusive, read_json, write_json
from t2r.importers.source import import_model
from t2r.model.config import ModelConfig
from t2r.model.parameters import arrays_of, parameter_count
from t2r.model.state_size import natural_length
from t2r.store import model_dir
from t2r.training.build import build
from t2r.training.config import conversion
from t2r.training.task import make_task, splits
from t2r.training.trainer import flat, train
from t2r.workflow.curve import NOT_CONVERTED, point
from t2r.workflow.measure import HeldOut, attentions, decoding, validation_curve
from t2r.workflow.page import write_report
from t2r.workflow.recipe import make_config
from t2r.workflow.steps import Steps, as_json

LENGTHS = (128, 512, 2048, 8192)
WRITERS = ("transformer", "converted", "control")  # models whose texts are scored


def convert_and_finetune(
    source: str | Path,
    output: str | Path,
    *,
    data: str | None = None,
    recipe: str | None = None,
    steps: int | None = None,
    workdir: str | Path | None = None,
    prompts: Sequence[str] = (),
    lengths: Sequence[int] = LENGTHS,
    control: bool = False,
    curve: Sequence[int] = (),
    fields: dict[str, Any] | None = None,
    command: str | None = None,
    **plan: Any,
) -> dict[str, Any]:
    """Writes the finetuned model to `output`, and report.html and report.json to `workdir` (default: OUTPUT.run).

    `source` is a model directory, `builtin:NAME`, or what `import_model` takes. `recipe` is a variant of
    configs/convert.py; `plan` has fields of config.convert, such as keep and window, `fields` any others by their
    dotted names. Without `data`, a language model trains on text that it writes itself. With `control`, the transformer
    is also finetuned without a conversion. With `curve`, the same recipe is trained once for each of these numbers of
    layers that keep softmax, for a plot of quality against the size of the state. The same call resumes what was
    interrupted. Returns a summary.
    """
    output, workdir = Path(output), Path(workdir or f"{output}.run")
    if workdir == output or output in workdir.parents or output.parent == workdir:
        raise InputError(f"--workdir={workdir} and --output={output}: choose two folders that are not in each other")
    finished = workdir / "steps.json"
    if not os.path.lexists(finished):
        check_free(output)  # later it is this work's own
    transformer = find_model(source, workdir)
    architecture = model_dir.load_config(model_dir.resolve(transformer))
    config = make_config(transformer, architecture, data=data, recipe=recipe, steps=steps, plan=plan, fields=fields)
    if control and config.steps == config.transfer.steps:
        raise InputError("--control needs steps after the attention transfer: there is nothing to compare")
    check_plan(conversion(config), architecture)
    warn_of_window(config)
    curves = curve_configs(config, curve, architecture)
    if architecture.encoder_layers:
        check_tokenizer("13a")  # sacrebleu is installed
    with exclusive(workdir):
        request = {"source": str(source), "output": str(output), **request_of(config)}
        total = 8 + control + (not architecture.encoder_layers) + sum(run != config for run in curves.values())
        work = Work(config, workdir, output, Steps(finished, request, total))
        report = work.run(list(prompts), sorted(lengths), control, curves)
        report |= {"source": str(source), "command": command, "config": as_json(config.to_dict())}
        write_json(workdir / "report.json", finite(report))
        write_report(workdir / "report.html", report)
    return summary(report, workdir)


def warn_of_window(config: ConfigDict) -> None:
    """Says so if attention is exact for all tokens that training sees, so that φ learns nothing."""
    exact, length = config.convert.window + config.convert.sinks, config.data.length
    if not is_pairs(config.data.source) and exact >= length:
        say(
            f"attention is exact for {exact} tokens, and training sequences have {length}: φ is never used and learns "
            "nothing; choose a smaller --window, or longer sequences with --set=data.length=N"
        )


def is_whole(path: Path) -> bool:
    """Whether there is a model that can be read."""
    try:
        model_dir.load(path)
    except InputError:
        return False
    return True


def find_model(source: str | Path, workdir: Path) -> str:
    """The model directory of a source; a model of another library is imported into the work directory, once."""
    if str(source).startswith("builtin:") or (Path(source) / "provenance.json").exists():
        return str(source)
    imported = workdir / "transformer"
    if not os.path.lexists(imported):
        say(f"import {source}")
        import_model(source, imported)
    history = read_json(imported / "provenance.json", "remove this folder: the model is then imported again")["history"]
    if history[0].get("source") != str(Path(source)):
        raise InputError(f"{imported} was imported from {history[0].get('source')}: choose another --workdir")
    return str(imported)


def request_of(config: ConfigDict) -> dict[str, Any]:
    """All that the trained model depends on, by name."""
    model = stamps([Path(model_dir.resolve(config.init_from)) / "model.safetensors"])
    files = {"model's size and time": model, "data's size and time": stamps_of(config.data.source)}
    return {**{f"config.{name}": value for name, value in flat(config.to_dict()).items()}, **files}


class Work:
    """The steps of one conversion, and what they share."""

    def __init__(self, config: ConfigDict, workdir: Path, output: Path, steps: Steps):
        self.config, self.workdir, self.output, self.steps = config, workdir, output, steps
        self.training = workdir / "finetune"  # the work directory of the training run
        self.control_run = workdir / "control"
        self.translates = is_pairs(config.data.source)

    def run(
        self, prompts: list[str], lengths: list[int], control: bool, curves: dict[int, ConfigDict]
    ) -> dict[str, Any]:
        """Does all steps that are not finished; returns the content of the report."""
        config, step, held_out = self.config, self.steps.run, HeldOut(self.config, self.training, prompts)
        transfer, rest = config.transfer.steps, config.steps - config.transfer.steps
        lost = not is_whole(self.output)

        data = step("data", "data" + (": the transformer writes it" if config.teacher.writes else ""), self.prepare)
        before = step("transformer", "score the transformer", lambda: held_out.measure(self.load()), prompts)
        swapped = step("swapped", "swap its attention, and score it", lambda: self.swap(held_out), prompts)
        title, untrained = f"train: {transfer} steps of transfer, then {rest}", not (self.training / "model").exists()
        trained = step("training", title, lambda: train(config, self.training), again=lost and untrained)
        model = step("model", f"merge and save as {self.output}", self.save, again=lost)
        after = step("converted", "score it", lambda: held_out.measure(self.load(self.output)), prompts)
        damage = swapped["plan"].get("damage")
        looked_at = step("attentions", "look at each attention", lambda: self.look(held_out, damage))
        measured = step("decoding", "measure decoding", lambda: self.decode(lengths), lengths)
        rows = {"transformer": before, "swapped": swapped}
        curve = validation_curve(self.training)
        if transfer and rest and transfer in curve:
            rows["after transfer"] = {"scores": {"perplexity": curve[transfer]}}
        rows["converted"] = after
        if control:
            title = f"control: finetune the transformer for {rest} steps"
            rows["control"] = step("control", title, lambda: self.control(held_out), prompts)
        samples = None
        if not self.translates:
            title, names = "score what the models write", [name for name in WRITERS if name in rows]
            samples = step("samples", title, lambda: self.samples(held_out, names), names)
        points = self.curve(held_out, curves, rows) if curves else None
        return {
            "model": str(self.output),
            "data": data["summary"],
            "held_out": self.describe_held_out(),
            "steps": config.steps,
            "transfer_steps": transfer,
            "plan": swapped["plan"],
            "scores": {name: row["scores"] for name, row in rows.items()},
            "recovered": recovered(*(row["scores"]["perplexity"] for row in (before, swapped, after))),
            "curve": {0: swapped["scores"]["perplexity"], **curve},
            "valid_perplexity": trained["valid_perplexity"],
            "attentions": looked_at["attentions"],
            "damage": damage,
            "decoding": measured,
            "samples": samples,
            "state_curve": points,
            "texts": {name: row["texts"] for name, row in rows.items() if "texts" in row},
            **model,
            "environment": environment.describe(),
            "step_seconds": self.steps.seconds,
            "seconds": round(sum(self.steps.seconds.values())),
        }

    def load(self, path: str | Path | None = None) -> model_dir.LoadedModel:
        """The transformer, or another model, with the run's type of activations."""
        return model_dir.load(path or self.config.init_from, dtype=self.config.model.dtype)

    def prepare(self) -> dict[str, Any]:
        """Tokenizes the data, or has the transformer write it, in the run's work directory, where training finds it."""
        model, tokenizer, _ = self.load()
        return {"summary": make_task(self.config, self.training, model, tokenizer, 1).summary}

    def swap(self, held_out: HeldOut) -> dict[str, Any]:
        """The scores of the model that training starts from, and the plan of its conversion, with measured damage."""
        model, tokenizer, history = build(self.config, self.training)
        loaded = model_dir.LoadedModel(model, tokenizer, {"history": history})
        return {"plan": history[-1], **held_out.measure(loaded)}

    def save(self) -> dict[str, Any]:
        """Writes the trained model, merged if it can be, to `output`."""
        trained, reason = model_dir.load(self.training / "model"), None
        try:
            content = merge_model(trained)
        except InputError as error:
            content, reason = trained, str(error)
            say(f"     not merged: {reason}")
        if os.path.lexists(self.output):  # the last run was killed after it had written it; else it is someone's own
            stored = self.output / "provenance.json"
            if not stored.exists() or read_json(stored, "remove it") != as_json(content.provenance):
                check_free(self.output)
        model_dir.save(self.output, content, replace=True)
        return {"not_merged": reason, "parameters": parameter_count(arrays_of(content.model))}

    def look(self, held_out: HeldOut, damage: dict[str, Any] | None) -> dict[str, Any]:
        """What became of each attention; of the model before it is merged, which has φ of its own."""
        loaded = self.load(self.training / "model")
        return {"attentions": attentions(loaded, held_out.batch(loaded), self.training, damage)}

    def decode(self, lengths: list[int]) -> dict[str, Any]:
        return decoding(self.load().model, self.load(self.output).model, lengths)

    def control(self, held_out: HeldOut) -> dict[str, Any]:
        """The scores of the transformer after the same finetuning, on the same data, without a conversion."""
        config = copy.deepcopy(self.config)
        config.steps, config.transfer.steps, config.convert.feature_map = config.steps - config.transfer.steps, 0, ""
        return held_out.measure(self.load(self.train_beside(config, self.control_run)))

    def train_beside(self, config: ConfigDict, folder: Path) -> Path:
        """Trains another config on the data of this one, in another work directory; returns the path of the model."""
        folder.mkdir(parents=True, exist_ok=True)
        # What the transformer wrote, and its damage, are not computed again.
        for pattern in ("finetune/teacher-????????", "finetune/damage-????????", "curve/*/damage-????????"):
            for known in self.workdir.glob(pattern):
                if not os.path.lexists(folder / known.name):
                    (folder / known.name).symlink_to(os.path.relpath(known, folder))
        return Path(train(config, folder)["model"])

    def curve(
        self, held_out: HeldOut, configs: dict[int, ConfigDict], rows: dict[str, dict[str, Any]]
    ) -> dict[str, Any]:
        """The points of quality against the size of the state: the transformer, and each number of kept layers."""
        transformer = self.architecture(self.config.init_from)
        length = natural_length(transformer)
        names = [name for name in NOT_CONVERTED if name in rows]
        points = [point(name, transformer, length, rows[name]["scores"]) for name in names]
        for kept, config in configs.items():
            folder, model, measured = self.workdir / "curve" / f"{kept}", self.output, rows["converted"]
            if config != self.config:

                def train_and_measure(config: ConfigDict = config, folder: Path = folder) -> dict[str, Any]:
                    return held_out.measure(self.load(self.train_beside(config, folder)))

                title = f"curve: train with {kept} softmax layers"
                model, measured = folder / "model", self.steps.run(f"curve {kept}", title, train_and_measure)
            points.append(point(f"{kept} softmax", self.architecture(model), length, measured["scores"]))
        return {"length": length, "points": points}

    def architecture(self, path: str | Path) -> ModelConfig:
        """The config of a model directory, with the run's type of activations."""
        return model_dir.load_config(model_dir.resolve(str(path)), dtype=self.config.model.dtype)

    def samples(self, held_out: HeldOut, names: list[str]) -> dict[str, Any]:
        """By model, how the transformer finds the texts that it writes."""
        paths = {"transformer": None, "converted": self.output, "control": self.control_run / "model"}
        transformer = self.load()
        return {name: held_out.samples(self.load(paths[name]), transformer) for name in names}

    def describe_held_out(self) -> str:
        """On what all models are scored."""
        data, split = splits(self.config)[1]
        if self.config.teacher.writes and not self.config.data.valid and not is_pairs(data):
            return "the last twentieth of the texts that the transformer wrote"
        return f"the {split} split of {data}" if split != "all" else data


def curve_configs(config: ConfigDict, counts: Sequence[int], architecture: ModelConfig) -> dict[int, ConfigDict]:
    """By number of layers that keep softmax, the config of the run that keeps so many, the most damaging ones."""
    most = architecture.layers - 1
    if wrong := [count for count in counts if not 0 <= count <= most]:
        raise InputError(f"--curve has {', '.join(map(str, wrong))}: of {most + 1} layers 0 to {most} can be kept")
    configs = {}
    for count in sorted(set(counts)):
        configs[count] = copy.deepcopy(config)
        configs[count].convert.update(keep=f"auto:{count}" if count else "none", cross_keep="")
    return configs


def recovered(before: float, swapped: float, after: float) -> float | None:
    """The share of the perplexity lost by the swap that training recovered; None if the swap lost nothing."""
    return (swapped - after) / (swapped - before) if swapped > before else None


def summary(report: dict[str, Any], workdir: Path) -> dict[str, Any]:
    """What programs want to know of a conversion."""
    measured = report["decoding"]
    pairs = list(zip(measured["transformer"], measured["rnn"]))
    return {
        "model": report["model"],
        "scores": report["scores"],
        "recovered": report["recovered"],
        "samples": report["samples"],
        "state_curve": report["state_curve"],
        "merged": report["not_merged"] is None,
        "speedup": {str(a["length"]): round(a["seconds"] / b["seconds"], 2) for a, b in pairs},
        "state_bytes": {str(b["length"]): b["state_bytes"] for _, b in pairs},
        "transformer_state_bytes": {str(a["length"]): a["state_bytes"] for a, _ in pairs},
        "predicted_crossover": measured["predicted_crossover"],
        "measured_crossover": measured["measured_crossover"],
        "report": str(workdir / "report.html"),
        "seconds": report["seconds"],
    }

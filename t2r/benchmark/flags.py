"""What `benchmark decode` and `benchmark memory` are asked for: which models, at which lengths, where."""

import ast
import hashlib
import json
from types import SimpleNamespace
from typing import Any, NamedTuple

from absl import flags

from t2r.errors import InputError, raise_all

flags.disclaim_key_flags()  # flags belong to the command that defines them with `define`

LENGTHS = [str(2**power) for power in range(9, 16)]  # 512 to 32k


class Asked(NamedTuple):
    """The flags, read."""

    rows: dict[str, Any]  # name → ModelConfig
    lengths: list[int]
    batch: int
    dtype: str
    identity: dict[str, Any]  # of the architecture, in results

    @property
    def title(self) -> str:
        """The architecture and the batch, for plots."""
        changed = ", ".join(self.identity["fields"])
        return f"{self.identity['architecture']}{changed and f' ({changed})'}, batch {self.batch}"

    @property
    def common(self) -> dict[str, Any]:
        """What all measurements have in common."""
        return {"batch": self.batch, "dtype": self.dtype, **self.identity}


def define() -> SimpleNamespace:
    """The flags that the two commands share."""
    return SimpleNamespace(
        preset=flags.DEFINE_string("preset", None, "An architecture, such as paper_lm or paper_mt."),
        model=flags.DEFINE_string("model", None, "A model directory whose architecture is taken; or builtin:NAME."),
        field=flags.DEFINE_multi_string("field", [], "NAME=VALUE: a field of the architecture, changed; repeat it."),
        rows=flags.DEFINE_list("rows", None, "Models to compare; default: those of the paper's figures."),
        features=flags.DEFINE_integer("features", 0, "Features of causal attention; 0: the paper's.", lower_bound=0),
        cross_features=flags.DEFINE_integer("cross_features", 0, "Likewise of cross attention.", lower_bound=0),
        lengths=flags.DEFINE_list("lengths", LENGTHS, "Generated lengths; sources are as long."),
        batch=flags.DEFINE_integer("batch", 16, "Texts at once.", lower_bound=1),
        dtype=flags.DEFINE_enum("dtype", "bfloat16", ["float32", "bfloat16"], "Of weights and activations."),
        topology=flags.DEFINE_string("topology", None, "Compile for this TPU, such as v2:2x2; nothing is run."),
        mesh=flags.DEFINE_string("mesh", "", "Of a topology: data=N,fsdp=N,tensor=N; default: one device."),
        **define_run(),
    )


def define_run() -> dict[str, Any]:
    """The flags of every benchmark with a directory of results."""
    return dict(
        output=flags.DEFINE_string("output", None, "Directory for results and plots; a stopped run goes on from it."),
        again=flags.DEFINE_bool("again", False, "Measure again what the directory already has."),
        budget_seconds=flags.DEFINE_float("budget_seconds", 0, "Start no measurement after so long; 0: no limit."),
        device_report=flags.DEFINE_bool("device_report", False, "Say what was measured, and what is an estimate."),
    )


def read(given: SimpleNamespace) -> Asked:
    """Checks the flags; all that is wrong with the rows is one error."""
    from t2r.benchmark.rows import converted, default_rows
    from t2r.model.transformer import check_length

    config = architecture(given)
    lengths = parse_lengths(given.lengths.value)
    check_length(config, lengths[-1])
    sizes = dict(features=given.features.value, cross_features=given.cross_features.value)
    rows, problems = {}, []
    for name in given.rows.value or default_rows(config):
        try:
            rows[name] = converted(config, name, **sizes)
        except InputError as error:
            problems.append(str(error))
    raise_all("--rows:", problems)
    identity = {"architecture": given.preset.value or given.model.value, "fields": given.field.value, **sizes}
    digest = hashlib.sha256(json.dumps(config.to_dict(), sort_keys=True).encode()).hexdigest()[:12]
    return Asked(rows, lengths, given.batch.value, given.dtype.value, {**identity, "digest": digest})


def architecture(given: SimpleNamespace):
    """The ModelConfig that --preset or --model and --field name."""
    from t2r.convert import model_dir
    from t2r.model.config import preset

    if (given.preset.value is None) == (given.model.value is None):
        raise InputError("name an architecture: --preset=paper_lm, --preset=paper_mt, or --model=DIRECTORY")
    fields = parse_fields(given.field.value)
    try:
        if given.preset.value is not None:
            return preset(given.preset.value, **fields)
        return model_dir.load_config(model_dir.resolve(given.model.value)).replace(**fields)
    except TypeError as error:  # a word for a number, or a number for a tuple
        raise InputError(
            f"--field={' --field='.join(given.field.value)}: a value of another kind is needed ({error})"
        ) from None


def parse_fields(texts: list[str]) -> dict[str, Any]:
    """NAME=VALUE; a value is a number, True, False, a tuple such as (), or else a word."""
    fields, problems = {}, []
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            problems.append(f"--field={text}: write NAME=VALUE, such as vocab_size=32768")
            continue
        try:
            fields[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            fields[name] = value
    raise_all("fields of the architecture:", problems)
    return fields


def parse_lengths(texts: list[str]) -> list[int]:
    """Whole numbers above 0, in order."""
    if not texts or not all(text.strip().isdigit() and int(text) for text in texts):
        raise InputError(f"--lengths={','.join(texts)}: give whole numbers above 0, such as 128,512")
    return sorted({int(text) for text in texts})


def parse_mesh(text: str) -> dict[str, int]:
    """Sizes of a mesh's axes, all 1 but those that are named."""
    from t2r.layout import AXES

    sizes = dict.fromkeys(AXES, 1)
    for part in text.split(",") if text else []:
        name, _, size = part.partition("=")
        if name not in sizes or not size.isdigit():
            raise InputError(f"--mesh={text}: write sizes of {', '.join(AXES)}, such as data=2,tensor=4")
        sizes[name] = int(size)
    return sizes


def open_results(name: str, given: SimpleNamespace, topology: str | None = None):
    """The directory of results, for this machine or for the TPU that is compiled for."""
    from t2r import environment
    from t2r.benchmark.results import Results
    from t2r.benchmark.topology import compiler, devices_of, without_devices

    described = {}
    if topology:
        without_devices()
        devices_of(topology)  # or one clear error
        described = {"topology": topology, "compiler": compiler()}
    found = {**environment.describe(), **described}
    output, again, budget = given.output.value, given.again.value, given.budget_seconds.value
    return Results(name, output, found, again=again, budget_seconds=budget)


def where(results, devices: int = 1) -> str:
    """What figures were measured on, or estimated for."""
    found = results.environment
    if "topology" in found:
        kind = f"{devices} device{'s' * (devices > 1)} of TPU {found['topology']}"
        return f"{kind}: compiled, not measured ({found['compiler']})"
    return found["device"]


def report(results, given: SimpleNamespace) -> None:
    """With --device_report, prints where the figures come from."""
    if given.device_report.value:
        from t2r.benchmark.results import device_report

        print(device_report(results.lines, results.environment["device"]))

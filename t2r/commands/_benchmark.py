"""Flags that several benchmarks share, and what they mean."""

from types import SimpleNamespace
from typing import Any

from absl import flags

from t2r.errors import InputError

flags.disclaim_key_flags()  # flags belong to the command that calls a function here

LENGTHS = [str(2**power) for power in range(9, 16)]  # 512 to 32k


def define_models() -> SimpleNamespace:
    """The flags of `benchmark decode` and `benchmark memory`."""
    return SimpleNamespace(
        preset=flags.DEFINE_string("preset", None, "An architecture, such as paper_lm or paper_mt."),
        model=flags.DEFINE_string("model", None, "A model directory whose architecture is taken; or builtin:NAME."),
        fields=flags.DEFINE_multi_string("field", [], "NAME=VALUE: a field of the architecture, changed; repeat it."),
        rows=flags.DEFINE_list("rows", None, "Models to compare; default: those of the paper's figures."),
        features=flags.DEFINE_integer("features", 0, "Features of causal attention; 0: the paper's.", lower_bound=0),
        cross_features=flags.DEFINE_integer("cross_features", 0, "Likewise of cross attention.", lower_bound=0),
        lengths=flags.DEFINE_list("lengths", LENGTHS, "Generated lengths; sources are as long."),
        batch=flags.DEFINE_integer("batch", 16, "Sequences at once.", lower_bound=1),
        dtype=flags.DEFINE_enum("dtype", "bfloat16", ["float32", "bfloat16"], "Of weights and activations."),
    )


def define_topology() -> SimpleNamespace:
    """The flags of a TPU that is compiled for."""
    return SimpleNamespace(
        topology=flags.DEFINE_string("topology", None, "Compile for this TPU, such as v2:2x2; nothing is run."),
        mesh=flags.DEFINE_string("mesh", "", "Of a topology: data=N,fsdp=N,tensor=N; default: one device."),
    )


def define_output() -> SimpleNamespace:
    """The flags of every benchmark with a directory of results."""
    return SimpleNamespace(
        folder=flags.DEFINE_string("output", None, "Directory for results and plots; a stopped run goes on from it."),
        again=flags.DEFINE_bool("again", False, "Measure again what the directory already has."),
        budget_seconds=flags.DEFINE_float("budget_seconds", 0, "Start no measurement after so long; 0: no limit."),
        device_report=flags.DEFINE_bool("device_report", False, "Say what was measured, and what is an estimate."),
    )


def values(given: SimpleNamespace) -> dict[str, Any]:
    """The flags' values, as arguments of a function."""
    return {name: flag.value for name, flag in vars(given).items()}


def request(given: SimpleNamespace):
    """The models and lengths that the flags of `define_models` ask for."""
    from t2r.benchmark.models import make_request

    return make_request(**values(given) | {"lengths": parse_lengths(given.lengths.value)})


def output(given: SimpleNamespace):
    """Where the flags of `define_output` send results."""
    from t2r.benchmark.shared import Output

    return Output(**values(given))


def topology(given: SimpleNamespace) -> dict[str, Any]:
    """The TPU that the flags of `define_topology` name, as arguments."""
    return {"topology": given.topology.value, "mesh": parse_mesh(given.mesh.value)}


def parse_lengths(words: list[str]) -> list[int]:
    """Whole numbers above 0, in order."""
    if not words or not all(word.strip().isdigit() and int(word) for word in words):
        raise InputError(f"--lengths={','.join(words)}: give whole numbers above 0, such as 128,512")
    return sorted({int(word) for word in words})


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

"""Flags that several benchmarks share, and their parsing."""

from types import SimpleNamespace
from typing import Any

from absl import flags

from t2r.commands._lists import define_numbers
from t2r.errors import InputError

flags.disclaim_key_flags()  # --help lists the flags with the command that defines them by calling a function below

LENGTHS = [str(2**power) for power in range(9, 16)]  # 512 to 32k


def define_models(lengths: list[str] = LENGTHS, batch: int = 16) -> SimpleNamespace:
    """Flags that select models and lengths, for benchmarks that compare models."""
    return SimpleNamespace(
        **vars(define_architecture(batch)),
        rows=flags.DEFINE_list(
            "rows",
            None,
            "Models to compare, such as transformer,t2r; default: those of the paper's figures; with rotary positions, "
            "transformer,t2r,t2r_window,t2r_hybrid.",
        ),
        lengths=define_numbers("lengths", lengths, "Lengths in tokens; sources have the same length."),
    )


def define_architecture(batch: int) -> SimpleNamespace:
    """Flags that select an architecture, how it is converted, and how it runs."""
    return SimpleNamespace(
        preset=flags.DEFINE_string(
            "preset", None, "Architecture: a preset, such as paper_lm, smollm2_135m or llama_1b."
        ),
        model=flags.DEFINE_string(
            "model",
            None,
            "Architecture: that of a model directory, builtin:NAME, or ORG/NAME of the Hugging Face hub.",
        ),
        fields=flags.DEFINE_multi_string("field", [], "NAME=VALUE: change a field of the architecture; repeatable."),
        features=flags.DEFINE_integer(
            "features", 0, "Feature size k of causal attention; 0: the paper's.", lower_bound=0
        ),
        cross_features=flags.DEFINE_integer(
            "cross_features", 0, "Feature size k of cross attention; 0: the paper's.", lower_bound=0
        ),
        window=flags.DEFINE_integer(
            "window", 32, "Tokens of the window of rows that have one.", lower_bound=1, upper_bound=2**16
        ),
        batch=flags.DEFINE_integer("batch", batch, "Sequences in a batch.", lower_bound=1),
        dtype=flags.DEFINE_enum("dtype", "bfloat16", ["float32", "bfloat16"], "Type of weights and activations."),
    )


def define_topology() -> SimpleNamespace:
    """Flags that select a TPU to compile for."""
    return SimpleNamespace(
        topology=flags.DEFINE_string("topology", None, "Only compile, for this TPU slice, such as v2:2x2 or v2-8."),
        mesh=flags.DEFINE_string("mesh", "", "With --topology: data=N,fsdp=N,tensor=N; default: one device."),
    )


def define_output() -> SimpleNamespace:
    """Flags of every benchmark that writes a directory of results."""
    return SimpleNamespace(
        folder=flags.DEFINE_string(
            "output", None, "Directory for results and plots; measurements that it has already are reused."
        ),
        again=flags.DEFINE_bool("again", False, "Do not reuse measurements in the directory."),
        budget_seconds=flags.DEFINE_float(
            "budget_seconds", 0, "Start no measurement after this time; 0: no limit.", lower_bound=0
        ),
        device_report=flags.DEFINE_bool(
            "device_report", False, "Print which figures are measured, estimated or computed."
        ),
    )


def values(defined: SimpleNamespace) -> dict[str, Any]:
    """The values of flags, as keyword arguments."""
    return {name: flag.value for name, flag in vars(defined).items()}


def request(defined: SimpleNamespace, **more: Any):
    """The Request (models and lengths) of the flags of `define_models`, and of what a benchmark has beside them."""
    from t2r.benchmark.models import make_request

    return make_request(**values(defined) | {"lengths": parse_lengths(defined.lengths.value)}, **more)


def output(defined: SimpleNamespace):
    """The Output of the flags of `define_output`."""
    from t2r.benchmark.shared import Output

    return Output(**values(defined))


def topology(defined: SimpleNamespace) -> dict[str, Any]:
    """The values of the flags of `define_topology`, as keyword arguments."""
    return {"topology": defined.topology.value, "mesh": parse_mesh(defined.mesh.value)}


def parse_lengths(items: list[str]) -> list[int]:
    """The numbers of a flag of `define_numbers`, sorted and without duplicates."""
    return sorted({int(item) for item in items})


def parse_mesh(text: str) -> dict[str, int]:
    """Sizes of the mesh axes from NAME=SIZE,...; axes that are not named have size 1."""
    from t2r.layout import AXES

    sizes = dict.fromkeys(AXES, 1)
    for part in text.split(",") if text else []:
        name, _, size = part.partition("=")
        if name not in sizes or not size.isdigit():
            raise InputError(f"--mesh={text}: give sizes of {', '.join(AXES)}, such as data=2,tensor=4")
        sizes[name] = int(size)
    return sizes

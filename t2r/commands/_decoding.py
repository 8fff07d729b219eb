"""Flags that several commands share: how a model decodes."""

from typing import Any

from absl import flags

flags.disclaim_key_flags()  # --help lists the flags with the command that defines them by calling a function below


def define_dtype() -> Any:
    return flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16"], "Type of activations.")


def define_weights() -> Any:
    return flags.DEFINE_enum(
        "weights", "float32", ["float32", "int8"], "Matrices: as --dtype says (float32), or in 8 bits, fastest on CPUs."
    )


def define_kernels() -> Any:
    return flags.DEFINE_enum(
        "kernels",
        "auto",
        ["auto", "on", "off"],
        "GPU kernels for decoding; auto: where they are faster; on: wherever one exists; off: never.",
    )


def define_sampling(
    temperature: float = 0.0, top_p: float = 1.0, meaning: str = "Sampling temperature; 0: greedy."
) -> tuple[Any, Any, Any]:
    """The flags --temperature, --top_k and --top_p, with these defaults."""
    return (
        flags.DEFINE_float("temperature", temperature, meaning, lower_bound=0),
        flags.DEFINE_integer("top_k", 0, "Sample from the k most likely tokens; 0: from all.", lower_bound=0),
        flags.DEFINE_float(
            "top_p",
            top_p,
            "Sample from the most likely tokens whose total probability reaches this.",
            lower_bound=0,
            upper_bound=1,
        ),
    )

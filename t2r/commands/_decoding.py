"""Flags that several commands share: how a model decodes."""

from collections.abc import Sequence
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
            "Sample from the most likely tokens whose total probability reaches this: above 0, at most 1.",
            lower_bound=1e-9,
            upper_bound=1,
        ),
    )


def given(some: Sequence[Any]) -> str:
    """The flags among these that were given, as one writes them; empty if none was."""
    return " and ".join(flags.FLAGS[flag.name].serialize() for flag in some if flag.present)


def ignored(some: Sequence[Any], temperature: Any, *, when_sampling: bool = False) -> list[str]:
    """A problem for the flags among these that were given and have no effect: those of sampling without a temperature.

    With `when_sampling`, those of beam search with one.
    """
    names = given(some)
    if not names or bool(temperature.value) != when_sampling:
        return []
    if when_sampling:
        return [f"{names}: for beam search only; leave out --temperature"]
    return [f"{names}: nothing is sampled; add --temperature, such as --temperature=0.8, or leave out {names}"]


def chosen_sampling(temperature: Any, top_k: Any, top_p: Any, *others: Any) -> Any:
    """The Sampling that these flags ask for; an error if they, or others, say how to sample and nothing is sampled."""
    from t2r.decode.sampling import Sampling
    from t2r.errors import raise_all

    raise_all("flags:", ignored([top_k, top_p, *others], temperature))
    return Sampling(temperature.value, top_k.value, top_p.value)

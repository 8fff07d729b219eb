"""Flags whose values are lists of whole numbers: they are checked with all other flags, so that one error names all."""

from typing import Any

from absl import flags

flags.disclaim_key_flags()  # --help lists the flags with the command that defines them by calling the function below


def define_numbers(name: str, default: list[str] | None, text: str, *, least: int = 1, most: int | None = None) -> Any:
    """A flag of whole numbers, joined by commas, from `least` to `most`."""
    flag = flags.DEFINE_list(name, default, text)
    example = ",".join(default[:3]) if default else "128,512"
    bounds = f" from {least} to {most}" if most is not None else " above 0" if least else ""

    def check(items: list[str] | None) -> bool:
        if items == default:
            return True
        if not items or not all(item.strip().isdecimal() and fits(int(item)) for item in items):
            raise flags.ValidationError(f"give whole numbers{bounds}, such as {example}")
        return True

    def fits(number: int) -> bool:
        return number >= least and (most is None or number <= most)

    flags.register_validator(name, check)
    return flag

"""Measure which attention a model cannot do without: each one alone is reduced, without any training.

t2r damage --model=MODEL --data=text:FILE [--window=32 --sinks=4]
t2r damage --model=MODEL --data=tsv:FILE          (a translation model)

Causal attention is reduced to the last --window and the first --sinks tokens, cross attention to the mean of the
source. A language model is scored by its recall: the perplexity of the second half of sequences whose second half
repeats the first. A translation model is scored by the perplexity of its own greedy translations. The attention that
does most damage should keep softmax: --keep=auto:N of `t2r convert`, --config.convert.keep=auto:N of `t2r train`.
With --heads, each key/value head of causal attention is reduced alone, too: which heads of a layer do the damage.
"""

from typing import Any

from absl import flags

_MODEL = flags.DEFINE_string(
    "model", None, "Model directory, builtin:NAME, or ORG/NAME of the Hugging Face hub.", required=True
)
_DATA = flags.DEFINE_string("data", None, "Text, or sentence pairs (sources are read).", required=True)
_SPLIT = flags.DEFINE_string("split", None, "train, valid, test or all; default: all for files, else test.")
_WINDOW = flags.DEFINE_integer("window", 32, "Tokens that causal attention is reduced to.", lower_bound=1)
_SINKS = flags.DEFINE_integer("sinks", 4, "First tokens of a sequence that stay, too.", lower_bound=0)
_LENGTH = flags.DEFINE_integer(
    "length", None, "Tokens in a sequence, or the most in a source; default: 512, or 128.", lower_bound=4
)
_SEQUENCES = flags.DEFINE_integer("sequences", None, "Sequences or sentences; default: 16, or 96.", lower_bound=1)
_HEADS = flags.DEFINE_bool("heads", False, "Also measure each key/value head of causal attention.")
_OUTPUT = flags.DEFINE_string("output", None, "A plot: FILE.png or FILE.svg.")


def main() -> dict[str, Any]:
    from t2r.console import table
    from t2r.evaluation.damage import check_plot, measure_on_data, plot, rows
    from t2r.importers import by_name

    if _OUTPUT.value:
        check_plot(_OUTPUT.value)
    loaded = by_name.load(_MODEL.value)
    sizes = dict(length=_LENGTH.value, sequences=_SEQUENCES.value)
    options = dict(window=_WINDOW.value, sinks=_SINKS.value)
    damage = measure_on_data(loaded, _DATA.value, _SPLIT.value, **sizes, **options, heads=_HEADS.value)
    print(table(["attention", "perplexity", "damage"], [("all", damage.base, ""), *rows(damage)]))
    if _OUTPUT.value:
        plot(damage, _OUTPUT.value)
    return {**damage._asdict(), **options}

"""Compare the attention of converted models with their transformer's, by feature size (the paper's Figures 4 to 6).

t2r analyze --model=RUN_A,RUN_B,... --transformer=MODEL --data=SPEC --output=DIR
t2r analyze --model=MODEL --data=tsv:FILE --output=DIR          (translation: causal and cross attention)

Each model is a model directory or the work directory of a finished run. What it is (its feature size, whether it was
finetuned, with φ frozen or not, or trained from random initialisation) is read from its config and provenance. Measured
for each head: the Euclidean distance of its attention distributions to the transformer's, KL divergence, entropy, how
far it looks back; for each layer dead features and clamped normalisers; and perplexity. DIR gets analysis.json,
report.html, and each figure as PNG and SVG. Without --transformer there are no distances.
"""

from typing import Any

from absl import flags

from t2r.commands import _decoding as decoding

_MODEL = flags.DEFINE_list("model", None, "Models or finished runs to analyse, joined by commas.", required=True)
_DATA = flags.DEFINE_string("data", None, "Text, or sentence pairs for translation models.", required=True)
_OUTPUT = flags.DEFINE_string("output", None, "Directory for figures, report.html and analysis.json.", required=True)
_TRANSFORMER = flags.DEFINE_string("transformer", None, "The model that the others were converted from.")
_SPLIT = flags.DEFINE_string("split", None, "train, valid, test or all; default: all for files, else test.")
_LENGTH = flags.DEFINE_integer(
    "length", None, "Tokens in a window of text, or the most in a sentence; default: 512, or 96.", lower_bound=2
)
_QUERIES = flags.DEFINE_integer(
    "queries", 1, "Text: how many of the last tokens of a window are looked at; the paper: 1.", lower_bound=1
)
_SEQUENCES = flags.DEFINE_integer("sequences", 256, "Windows or pairs to read, at most.", lower_bound=1)
_BATCH = flags.DEFINE_integer("batch", 4, "Sequences at a time.", lower_bound=1)
_DTYPE = decoding.define_dtype()


def main() -> dict[str, Any]:
    import shlex
    import sys

    from t2r.analysis.analyze import analyze
    from t2r.analysis.page import check_output, headers, rows, summary, write
    from t2r.console import table
    from t2r.errors import InputError
    from t2r.files import output_folder

    if _TRANSFORMER.value == "":
        raise InputError("--transformer is empty: name the model that was converted, or leave it out")
    output = output_folder(_OUTPUT.value)
    check_output(output)
    analysis = analyze(
        [name.strip() for name in _MODEL.value if name.strip()],
        _DATA.value,
        transformer=_TRANSFORMER.value,
        split=_SPLIT.value,
        length=_LENGTH.value,
        queries=_QUERIES.value,
        sequences=_SEQUENCES.value,
        batch=_BATCH.value,
        dtype=_DTYPE.value,
    )
    figures = write(output, analysis, shlex.join(["t2r", *sys.argv[1:]]))
    for kind, cells in rows(analysis).items():
        print(f"{kind} attention")
        print(table(headers(kind), [["" if cell is None else cell for cell in row] for row in cells]))
    return {**summary(analysis), "report": str(output / "report.html"), "figures": figures}

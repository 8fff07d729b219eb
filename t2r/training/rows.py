"""The rows of the paper's translation table: what takes the place of softmax, and where training starts."""

from typing import NamedTuple

from ml_collections import ConfigDict

from t2r.errors import InputError


class TableRow(NamedTuple):
    """Feature map, features of causal and of cross attention (0: the map's own), and whether to start at random."""

    feature_map: str
    features: int = 0
    cross_features: int = 0
    from_scratch: bool = False


ROWS = {
    "transformer": TableRow("", from_scratch=True),
    "elu_scratch": TableRow("elu", from_scratch=True),
    "rfa_scratch": TableRow("rfa", 4, 32, from_scratch=True),
    "t2r_scratch": TableRow("t2r", 4, 32, from_scratch=True),
    "elu": TableRow("elu"),
    "rfa": TableRow("rfa", 4, 32),
    "t2r": TableRow("t2r", 4, 32),
    "softmax": TableRow(""),  # not in the paper: the same finetuning without a conversion, as a control
}


def translation_row(config: ConfigDict, name: str) -> TableRow:
    """Looks a row up and sets the config's conversion to it."""
    if name not in ROWS:
        raise InputError(f"unknown row {name!r}: choose one of {', '.join(ROWS)}")
    row = ROWS[name]
    config.convert.update(feature_map=row.feature_map, features=row.features, cross_features=row.cross_features)
    return row

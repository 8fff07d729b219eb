"""The rows of the paper's Table 2 (machine translation): each model's feature map and where its training starts."""

from typing import NamedTuple

from ml_collections import ConfigDict

from t2r.errors import InputError, unknown


class TableRow(NamedTuple):
    """One model of the table."""

    feature_map: str  # "": softmax
    features: int = 0  # feature size of causal attention; 0: the feature map's default
    cross_features: int = 0  # feature size of cross attention; 0: the feature map's default
    from_scratch: bool = False  # random initialisation; else a pretrained transformer is converted
    keep: str = "none"  # layers of the decoder that keep softmax


ROWS = {
    "transformer": TableRow("", from_scratch=True),
    "elu_scratch": TableRow("elu", from_scratch=True),
    "rfa_scratch": TableRow("rfa", 4, 32, from_scratch=True),
    "t2r_scratch": TableRow("t2r", 4, 32, from_scratch=True),
    "elu": TableRow("elu"),
    "rfa": TableRow("rfa", 4, 32),
    "t2r": TableRow("t2r", 4, 32),
    # Not in the paper's Table 2:
    "t2r_75": TableRow("t2r", 4, 32, keep="every_4th"),
    "performer": TableRow("performer", 4, 32),
    "softmax": TableRow(""),  # a control: the same finetuning without a conversion
}


def translation_row(config: ConfigDict, name: str) -> TableRow:
    """The row of this name; sets config.convert to its feature map and sizes."""
    if name not in ROWS:
        raise InputError(unknown("row", name, ROWS))
    row = ROWS[name]
    config.convert.update(feature_map=row.feature_map, features=row.features, cross_features=row.cross_features)
    config.convert.keep = row.keep
    return row

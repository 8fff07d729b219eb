"""Tables for people have one format of numbers."""

import pytest

from t2r.console import short, table


@pytest.mark.parametrize(
    "value, text",
    [
        (0.0, "0"), (1.5, "1.500"), (67.9123, "67.91"), (0.012345, "0.01235"), (1.234e-5, "1.234e-05"),
        (999.96, "1,000"), (249188.4, "249,188"), (1234567.8, "1,234,568"), (-12.5, "-12.50"), (2048, "2,048"),
        (float("nan"), "nan"), (float("inf"), "inf"), (True, "True"), ("98%", "98%"), (None, "None"),
    ],
)  # fmt: skip
def test_numbers_have_four_digits_and_separators(value, text):
    assert short(value) == text


def test_columns_are_aligned():
    lines = table(["model", "tokens/s"], [("t2r", 249188.4), ("transformer", 7370.2)]).splitlines()
    assert lines == ["model        tokens/s", "-----------  --------", "t2r           249,188", "transformer     7,370"]

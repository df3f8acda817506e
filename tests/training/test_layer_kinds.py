"""Kinds of layers: each trains as in PyTorch or is refused with a reason, as the docs say."""

import re
from itertools import product
from pathlib import Path

import pytest

from tests.support.grids import grid
from tests.support.layer_kinds import ALIKE, KINDS, WAYS

PAGE = (Path(__file__).parents[2] / "docs" / "layers.md").read_text(encoding="utf-8")
DAILY = {
    "Embedding with max_norm",
    "Embedding with sparse=True",
    "BatchNorm",
    "Dropout",
    "GroupNorm over features",
    "a parameter of one number",
    "experts, of which each example takes one",
    "a model of bfloat16",
    "features of float64, a model of float32",
    "complex parameters",
}


def documented(kind, way):
    """Return the cell of the page; for a refusal, its words."""
    header, *rows = (
        [cell.strip() for cell in line.strip("|\n").split(" | ")]
        for line in PAGE.splitlines()
        if line.startswith("| ")
    )
    (row,) = (row for row in rows if kind in row[0].split("; "))
    cell = row[header.index(way)]
    if numbered := re.fullmatch(r"refused \((\d+)\)", cell):
        return re.search(rf"^{numbered[1]}\. (.*)$", PAGE, re.MULTILINE)[1]
    return cell


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize(
    ("kind", "way"), grid(product(KINDS, WAYS), lambda case: case[0] in DAILY), ids=str
)
def test_each_layer_matches_pytorch_or_is_refused_as_documented(kind, way):
    cell = WAYS[way](KINDS[kind])
    assert cell.off <= ALIKE
    how = "run python -m tests.support.layer_kinds docs/layers.md"
    assert documented(kind, way) == cell.how, how

"""Records survive JSON as they are; what is no such record is refused."""

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

import pytest

from flower_ext.errors import InvalidValue
from flower_ext.json_record import NOT_WRITTEN, JsonRecord


class Colour(Enum):
    RED = "red"


@dataclass(frozen=True)
class Circle(JsonRecord):
    kind = "circle"

    radius: float


@dataclass(frozen=True)
class Square(JsonRecord):
    kind = "square"

    side: int


@dataclass(frozen=True)
class Drawing(JsonRecord):
    shape: Circle | Square
    colour: Colour = Colour.RED
    basis: Literal["oil", "ink"] = "oil"
    key: bytes = b"\x00\xff"
    sizes: tuple[int, ...] = (1, 2)
    names: list[str] = field(default_factory=lambda: ["a"])
    by_number: Mapping[int, bytes] = field(default_factory=lambda: {3: b"x"})
    seen: Counter[int] = field(default_factory=lambda: Counter({7: 2}))
    within: Circle | None = None
    limit: float = math.inf
    is_signed: bool = True
    note: str = field(default="", metadata=NOT_WRITTEN)


def changed(**changes):
    return {**Drawing(Square(2)).to_dict(), **changes}


@pytest.mark.parametrize("shape", [Circle(0.5), Square(2)])
@pytest.mark.parametrize("within", [None, Circle(1.0)])
def test_a_record_survives_json(shape, within):
    drawing = Drawing(shape, within=within)
    again = Drawing.from_bytes(drawing.to_bytes())
    assert again == drawing
    assert isinstance(again.seen, Counter)
    assert json.loads(drawing.to_bytes())["limit"] is None  # strict JSON has no infinity


def test_a_field_that_is_not_written_has_its_default_again():
    again = Drawing.from_dict(Drawing(Square(2), note="secret").to_dict())
    assert again.note == ""
    with pytest.raises(InvalidValue, match="unknown or missing field 'note'"):
        Drawing.from_dict(changed(note="secret"))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"more": 1}, "unknown or missing field 'more'"),
        ({"kind": "circle"}, "unknown or missing field 'kind'"),
        ({"shape": {"kind": "line", "side": 1}}, "kind='line': expected one of circle, square"),
        ({"shape": {"kind": "square", "side": True}}, "Square: expected"),
        ({"within": {"kind": "square", "side": 1}}, "Circle .* missing field 'radius'"),
        (
            {"within": {"kind": "square", "radius": 1}},
            "Circle: expected kind='circle', got 'square'",
        ),
        ({"colour": "blue"}, "Drawing: expected"),
        ({"basis": "water"}, "Drawing: expected"),
        ({"key": "xy"}, "Drawing: expected"),
        ({"sizes": "12"}, "Drawing: expected"),
        ({"sizes": [1.0]}, "Drawing: expected"),
        ({"names": [None]}, "Drawing: expected"),
        ({"by_number": {"three": ""}}, "Drawing: expected"),
        ({"by_number": []}, "Drawing: expected"),
        ({"limit": "1"}, "Drawing: expected"),
        ({"limit": True}, "Drawing: expected"),
        ({"is_signed": 1}, "Drawing: expected"),
        ({"shape": None}, "Drawing: expected"),
    ],
)
def test_values_that_are_no_record_are_refused(changes, expected):
    assert Drawing.from_dict(changed()) == Drawing(Square(2))
    with pytest.raises(InvalidValue, match=expected):
        Drawing.from_dict(changed(**changes))


@pytest.mark.parametrize("data", [b"", b"[]", b"null", b"{", b"\xff", b"[" * 100_000])
def test_bytes_that_are_no_record_are_refused(data):
    with pytest.raises(InvalidValue, match="Drawing: expected"):
        Drawing.from_bytes(data)

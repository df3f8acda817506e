"""Rows of numbers as machine code: the sums of NumPy, and the bound of every clipped update."""

import math
import pickle
from fractions import Fraction

import numpy as np
import pytest
import torch

from flower_ext.privacy.mechanisms.bounds import sum_clipped
from flower_ext.privacy.mechanisms.updates import NonFiniteUpdate, Row, l2_norm, layout_of, total
from flower_ext.training.batched import network, rows
from flower_ext.training.batched.rows import CompiledRow, row_of

SIZE = 2_011
LIKE = {"a": np.zeros((SIZE - 12, 1), np.float32), "b": np.zeros((3, 4), np.float32)}
LAYOUT = layout_of(LIKE)


@pytest.fixture(autouse=True)
def _loaded():
    if network._library() is None:
        pytest.skip("no machine code here")


def made(values):
    row = row_of(torch.from_numpy(values), LAYOUT)
    assert type(row) is CompiledRow
    return row


def normal(number, scale=1.0):
    drawn = np.random.default_rng(number).standard_normal(SIZE)
    return (scale * drawn).astype(np.float32)


@pytest.mark.parametrize("factor", [1.0, 0.3, -1e-30, 7e200])
def test_sums_are_those_of_numpy_to_the_last_bit(factor):
    ours, theirs = np.linspace(-1, 1, SIZE), np.linspace(-1, 1, SIZE)
    for number in range(3):
        made(normal(number)).add_to(ours, factor)
        theirs += normal(number).astype(np.float64) * factor
    assert ours.tobytes() == theirs.tobytes()


@pytest.mark.parametrize("scale", [1e-44, 1e-20, 1.0, 1e37])
def test_lengths_are_exact_where_squares_of_the_precision_vanish_or_overflow(scale):
    values = normal(1, scale)
    expected = math.hypot(*map(float, values))
    assert made(values).length() == pytest.approx(expected, rel=1e-13)
    assert l2_norm(made(values)) == pytest.approx(l2_norm(dict(made(values))), rel=1e-13)


@pytest.mark.parametrize("scale", [0.0, 1e-44, 1e-3, 1.0, 1e37])
def test_no_row_moves_a_clipped_sum_by_more_than_the_bound_in_exact_arithmetic(scale):
    bound = 0.7
    value = sum_clipped([made(normal(2, scale))], bound, like=LIKE).value
    square = sum(Fraction(float(x)) ** 2 for array in value.values() for x in array.flat)
    assert square <= Fraction(bound) ** 2
    if scale >= 1:
        assert math.sqrt(square) == pytest.approx(bound, rel=1e-8)


def test_a_wrong_length_would_break_the_bound(monkeypatch):
    """A planted fault: what the test above sees if the length leaves out half of the numbers."""
    right = CompiledRow.length

    def of_half(row):
        return right(made(np.where(np.arange(SIZE) % 2, row.numbers, np.float32(0))))

    monkeypatch.setattr(CompiledRow, "length", of_half)
    value = sum_clipped([made(normal(2))], 0.7, like=LIKE).value
    assert math.sqrt(sum(float(np.vdot(a, a)) for a in value.values())) > 0.9


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_one_number_that_is_not_finite_is_refused_by_the_name_of_its_array(bad):
    values = normal(3)
    values[-1] = bad
    with pytest.raises(NonFiniteUpdate, match="'b'"):
        sum_clipped([made(values)], 1.0, like=LIKE)
    with pytest.raises(NonFiniteUpdate, match="'b'"):
        l2_norm(made(values))


def test_a_length_is_that_of_the_numbers_now():
    values = normal(4)
    row = made(values)
    before = row.length()
    values *= 2
    assert row.length() == pytest.approx(2 * before)


@pytest.mark.parametrize("wrong", [np.zeros(SIZE - 1), np.zeros(SIZE, np.float32), np.zeros(())])
def test_a_total_of_another_size_or_type_is_refused(wrong):
    with pytest.raises(TypeError, match="expected float64"):
        made(normal(5)).add_to(wrong)


def test_a_total_that_cannot_be_written_in_order_is_refused():
    with pytest.raises(TypeError, match="contiguous"):
        made(normal(5)).add_to(np.zeros(2 * SIZE)[::2])
    fixed = np.zeros(SIZE)
    fixed.flags.writeable = False
    with pytest.raises(TypeError, match="writable"):
        made(normal(5)).add_to(fixed)


def test_another_process_gets_a_plain_row():
    row = made(normal(8))
    there = pickle.loads(pickle.dumps(row))
    assert type(there) is Row
    assert there.numbers.tobytes() == row.numbers.tobytes()
    assert there.layout == LAYOUT


def test_other_rows_stay_with_numpy(monkeypatch):
    assert type(row_of(torch.ones(SIZE, dtype=torch.float64), LAYOUT)) is Row
    assert type(row_of(torch.ones(2 * SIZE)[::2], LAYOUT)) is Row
    monkeypatch.setattr(rows, "loaded", lambda: None)
    assert type(row_of(torch.ones(SIZE), LAYOUT)) is Row


def test_sums_mix_rows_with_other_updates():
    plain = {name: np.ones_like(array) for name, array in LIKE.items()}
    value, count = total([made(normal(6)), plain, Row(normal(7), LAYOUT)], like=LIKE)
    expected = normal(6).astype(np.float64) + 1.0 + normal(7)
    assert count == 3
    assert np.concatenate([value["a"].ravel(), value["b"].ravel()]).tobytes() == expected.tobytes()

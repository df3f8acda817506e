"""Clipping bounds the norm of updates, rows and scores in every precision."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from flower_ext.privacy import NeighboringRelation, NonFiniteUpdate, clip
from flower_ext.privacy.mechanisms.bounds import clip_each_row, sum_clipped_rows
from flower_ext.privacy.mechanisms.updates import RunningSum, l2_norm
from tests.support.arrays import FLOATS, array_of
from tests.support.grids import grid
from tests.support.sums import added, sum_clipped

ADD_OR_REMOVE = NeighboringRelation.ADD_OR_REMOVE_ONE
REPLACE = NeighboringRelation.REPLACE_ONE


def exact_norm(update) -> float:
    """Return the norm in extended precision, by an algorithm other than the code's."""
    parts = [np.asarray(torch.as_tensor(a).double()).ravel() for a in update.values()]
    return float(np.sqrt(np.sum(np.concatenate(parts).astype(np.longdouble) ** 2)))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_clipping_bounds_the_norm_over_all_arrays_in_every_precision(dtype):
    rng = np.random.default_rng(0)
    for scale in (1e-3, 1.0, 30.0):
        update = {
            "a": array_of(scale * rng.standard_normal((50, 20)), dtype),
            "b": array_of(scale * rng.standard_normal(7), dtype),
        }
        for bound in (1e-2, 0.3, 5.0):
            clipped = clip(update, bound)
            assert exact_norm(clipped.value) <= bound
            assert all(clipped.value[n].dtype == update[n].dtype for n in update)
            if exact_norm(update) > bound:
                assert exact_norm(clipped.value) > 0.9 * bound


def test_an_update_inside_the_ball_is_unchanged():
    update = {"a": np.array([0.3, -0.4], np.float32)}
    assert clip(update, 0.51).value["a"] is update["a"]


def test_clipping_keeps_the_direction():
    update = {"a": np.array([3.0, 0.0]), "b": np.array(4.0)}
    clipped = clip(update, 1.0).value
    np.testing.assert_allclose(clipped["a"], [0.6, 0.0])
    np.testing.assert_allclose(clipped["b"], 0.8)


def test_a_zero_update_stays_zero():
    clipped = clip({"a": np.zeros(3, np.float32)}, 0.1)
    assert not clipped.value["a"].any()


@pytest.mark.parametrize(
    "huge",
    [
        np.full(1000, 1e300),
        np.full(1000, 3e38, np.float32),
        np.full(1000, 6e4, np.float16),
        np.array(np.finfo(np.float64).max),
        torch.full((1000,), 3e38),
        torch.full((1000,), 1e300, dtype=torch.float64),
        torch.full((1000,), 3e38, dtype=torch.bfloat16),
    ],
)
def test_huge_values_are_clipped_not_overflowed(huge):
    clipped = clip({"a": huge}, 0.5)
    assert 0.4 < exact_norm(clipped.value) <= 0.5


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_non_finite_values_are_refused_by_name(value, dtype):
    update = {"fine": array_of([1.0], dtype), "broken": array_of([1.0, value], dtype)}
    with pytest.raises(NonFiniteUpdate, match="'broken'"):
        clip(update, 1.0)
    with pytest.raises(NonFiniteUpdate, match="'broken'"):
        l2_norm(update)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_zero_dimensional_arrays_are_clipped(dtype):
    clipped = clip({"a": array_of(7.0, dtype)}, 0.5)
    assert float(clipped.value["a"]) == pytest.approx(0.5, rel=1e-2)
    assert exact_norm(clipped.value) <= 0.5


def test_empty_arrays_pass_beside_others_but_not_alone():
    clipped = clip({"none": np.zeros((0, 4)), "a": np.array([2.0])}, 1.0)
    assert clipped.value["none"].shape == (0, 4)
    assert float(clipped.value["a"][0]) == pytest.approx(1.0)
    for update in ({}, {"none": np.zeros(0)}):
        with pytest.raises(ValueError, match="no numbers"):
            clip(update, 1.0)


@pytest.mark.parametrize("bound", [0.0, -1.0, math.nan, math.inf])
@pytest.mark.parametrize(
    "clipped",
    [
        clip,
        lambda update, bound: sum_clipped([], bound, like=update),
        lambda update, bound: sum_clipped([update], bound, like=update),
        lambda update, bound: sum_clipped_rows({"a": update["a"][None]}, bound, [1.0]),
        lambda update, bound: clip_each_row({"a": update["a"][None]}, bound),
    ],
)
def test_unfit_clipping_norms_are_refused(clipped, bound):
    with pytest.raises(ValueError, match="clipping_norm"):
        clipped({"a": np.ones(1)}, bound)


def test_rows_that_are_not_real_floats_are_refused_by_name():
    rows = {"count": np.arange(6).reshape(2, 3)}
    with pytest.raises(TypeError, match="'count' has dtype"):
        clip_each_row(rows, 1.0)
    with pytest.raises(TypeError, match="'count' has dtype"):
        sum_clipped_rows(rows, 1.0, [1.0, 1.0])


@pytest.mark.parametrize(
    ("numbers", "value"),
    grid([(10**6, 1 / 3), (10**7, 1 / 3), (10**7, 0.7123)], lambda case: case[0] == 10**6),
)
def test_millions_of_numbers_are_inside_their_ball_in_exact_arithmetic(numbers, value):
    """The error of a sum of that many squares exceeds the last bit of a norm."""
    update = {"a": np.full(numbers, value)}
    clipped = clip(update, 1.0).value, sum_clipped([update], 1.0, like=update).value
    rows = sum_clipped_rows({"a": update["a"][None]}, 1.0, [1.0]).value
    for one in (*clipped, rows):
        assert (one["a"] == one["a"][0]).all()
        assert Fraction(float(one["a"][0])) ** 2 * numbers <= 1


@pytest.mark.parametrize("scale", [0.0, 1e-44, 1e-3, 1.0, 1e37])
def test_an_update_moves_a_clipped_sum_within_the_bound_in_exact_arithmetic(scale):
    bound, like = 0.7, {"a": np.zeros((1_999, 1), np.float32), "b": np.zeros((3, 4), np.float32)}
    rng = np.random.default_rng(2)
    update = {n: (scale * rng.standard_normal(a.shape)).astype(a.dtype) for n, a in like.items()}
    value = sum_clipped([update], bound, like=like).value
    square = sum(Fraction(float(x)) ** 2 for array in value.values() for x in array.flat)
    assert square <= Fraction(bound) ** 2
    if scale >= 1:
        assert math.sqrt(square) == pytest.approx(bound, rel=1e-8)


@pytest.mark.parametrize("trials", grid([2_000, 6_000], lambda trials: trials == 2_000))
def test_measured_sensitivity_never_exceeds_the_reported_one(trials):
    """Two pairs of neighbours a trial: random ones, or ones that are as far apart as allowed."""
    rng = np.random.default_rng(1)
    for trial in range(trials):
        units, size = int(rng.integers(1, 5)), int(rng.integers(1, 6))
        bound = float(10 ** rng.uniform(-3, 2))
        dtype = rng.choice([np.float16, np.float32, np.float64])
        raw = rng.standard_normal((units + 1, size)) * 10 ** rng.uniform(-2, 2)
        if trial % 2:  # adversarial: the replacing unit is the replaced one's opposite, both huge
            raw[-1] = raw[0] = 1e3 * raw[0] / max(np.abs(raw[0]).max(), 1e-9)
            raw[-1] *= -1
        updates = [{"a": row.astype(dtype)} for row in raw]
        like = {"a": raw[0]}
        with_it = sum_clipped(updates[:units], bound, like=like)
        without = sum_clipped(updates[1:units], bound, like=like)
        replaced = sum_clipped([updates[-1], *updates[1:units]], bound, like=like)
        moved = exact_norm({"a": with_it.value["a"] - without.value["a"]})
        assert moved <= with_it.bound * ADD_OR_REMOVE.sensitivity_factor
        moved = exact_norm({"a": with_it.value["a"] - replaced.value["a"]})
        assert moved <= with_it.bound * REPLACE.sensitivity_factor
        if trial % 2 and dtype is np.float64:
            assert moved > 1.99 * bound  # the pairs do reach the bound, so the test can fail


def test_an_empty_sum_is_zero_and_replacement_has_twice_the_bound():
    like = {"a": np.ones(3, np.float32)}
    empty = sum_clipped([], 0.7, like=like)
    assert empty.count == 0
    assert not empty.value["a"].any()
    one = sum_clipped([like], 0.7, like=like)
    assert one.bound * ADD_OR_REMOVE.sensitivity_factor == 0.7
    assert one.bound * NeighboringRelation.REPLACE_SPECIAL.sensitivity_factor == 0.7
    assert one.bound * REPLACE.sensitivity_factor == 1.4


@pytest.mark.parametrize("size", [2.0, 2e200])
def test_a_sum_leaves_its_updates_as_they_are(size):
    updates = [{"a": np.full(3, size)} for _ in range(2)]
    sum_clipped(updates, 1.0, like=updates[0])
    assert all((update["a"] == size).all() for update in updates)


@pytest.mark.parametrize("kind", [np.asarray, torch.asarray], ids=["NumPy", "torch"])
def test_sums_of_arrays_of_any_layout_equal_those_of_single_updates(kind):
    rng = np.random.default_rng(2)
    shapes = {"turned": (3, 4), "single": (), "nothing": (0, 2), "image": (2, 3, 2)}

    def update():
        made = {name: kind(rng.standard_normal(shape)) for name, shape in shapes.items()}
        return {**made, "turned": made["turned"].T}

    updates, like = [update() for _ in range(4)], update()
    each = [clip(one, 2.0).value for one in updates]
    for summed, parts in (
        (added(RunningSum(like), updates).value, updates),
        (sum_clipped(updates, 2.0, like=like).value, each),
    ):
        assert list(summed) == list(like)
        for name, array in summed.items():
            expected = sum(np.asarray(part[name]) for part in parts)
            assert type(array) is type(like[name])
            np.testing.assert_allclose(np.asarray(array), expected, rtol=1e-9, atol=1e-12)


def test_sums_of_unlike_updates_are_refused():
    like = {"a": np.ones(3)}
    with pytest.raises(ValueError, match="at least one array"):
        sum_clipped([], 1.0, like={})
    with pytest.raises(ValueError, match="names differ"):
        sum_clipped([{"b": np.ones(3)}], 1.0, like=like)
    with pytest.raises(ValueError, match="shape"):
        sum_clipped([{"a": np.ones(2)}], 1.0, like=like)
    with pytest.raises(ValueError, match="shape"):  # as many numbers, in another shape
        sum_clipped([{"a": np.ones((3, 1))}], 1.0, like=like)


def rows_of(values, kind):
    """Return numbers as rows of two arrays, of NumPy or PyTorch."""
    stacked = {
        "a": np.asarray(values, np.float32)[:, :3],
        "b": np.asarray(values, np.float32)[:, 3],
    }
    return {n: torch.from_numpy(a) for n, a in stacked.items()} if kind == "torch" else stacked


def one_by_one(rows, bound, weights):
    """Return the weighted sum of rows that are clipped one by one."""
    total = {name: np.zeros(array.shape[1:]) for name, array in rows.items()}
    for number, weight in enumerate(weights):
        row = clip({name: array[number] for name, array in rows.items()}, bound).value
        total = {name: total[name] + weight * np.asarray(a, float) for name, a in row.items()}
    return total


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_rows_are_clipped_and_weighted_as_one_by_one(kind, scale):
    rng = np.random.default_rng(0)
    values = scale * rng.standard_normal((5, 4)) * 10.0 ** np.arange(-2, 3)[:, None]
    values[1] = 0.0  # a zero update stays zero
    rows, weights = rows_of(values, kind), rng.random(5)
    ours = sum_clipped_rows(rows, 0.7, weights)
    theirs = one_by_one({n: np.asarray(a) for n, a in rows.items()}, 0.7, weights)
    assert (ours.bound, ours.count) == (0.7, 5)
    for name, array in theirs.items():
        assert str(ours.value[name].dtype).endswith("float64")
        np.testing.assert_allclose(np.asarray(ours.value[name]), array, rtol=1e-5, atol=1e-40)
    assert l2_norm(sum_clipped_rows({n: a[:1] for n, a in rows.items()}, 0.7, [1.0]).value) <= 0.7


@pytest.mark.parametrize("kind", [np.asarray, torch.asarray], ids=["numpy", "torch"])
@pytest.mark.parametrize("scale", [1e-250, 1e250])
def test_rows_whose_squares_vanish_or_overflow_are_still_clipped_and_weighted(kind, scale):
    rows = {"a": kind(np.array([[3 * scale, 0.0], [0.3, 0.4], [0.0, 0.0]]))}
    rows["zero"] = kind(np.zeros((3, 2)))
    summed = sum_clipped_rows(rows, 0.5, [0.5, 1.0, 1.0])
    expected = [0.3 + 0.5 * min(3 * scale, 0.5), 0.4]
    np.testing.assert_allclose(np.asarray(summed.value["a"]), expected, rtol=1e-6)


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("scale", [1e-300, 1e-30, 1.0, 1e30, 1e300])
def test_rows_that_stay_apart_are_clipped_as_one_by_one(kind, scale):
    rng = np.random.default_rng(0)
    values = scale * rng.standard_normal((5, 4)) * 10.0 ** np.arange(-2, 3)[:, None]
    values[1] = 0.0
    rows = {"a": values[:, :3].reshape(5, 3, 1), "b": values[:, 3:]}
    if kind == "torch":
        rows = {name: torch.from_numpy(array) for name, array in rows.items()}
    ours = clip_each_row(rows, 0.7)
    for number in range(5):
        row = {name: np.asarray(array)[number] for name, array in ours.items()}
        theirs = clip({name: np.asarray(array)[number] for name, array in rows.items()}, 0.7)
        assert l2_norm(row) <= 0.7
        for name, array in theirs.value.items():
            assert row[name].shape == array.shape
            np.testing.assert_allclose(row[name], array, rtol=1e-10)


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_is_refused_with_any_weight(kind, value):
    values = np.ones((3, 4))
    values[1, 2] = value
    with pytest.raises(NonFiniteUpdate, match="NaN or infinite"):
        sum_clipped_rows(rows_of(values, kind), 1.0, [1.0, 0.0, 1.0])
    with pytest.raises(NonFiniteUpdate, match="NaN or infinite"):
        clip_each_row(rows_of(values, kind), 1.0)


@pytest.mark.parametrize("weights", [[1.0], [1.0, 1.1], [-0.1, 1.0], [1.0, math.nan]])
def test_weights_that_are_no_shares_are_refused(weights):
    with pytest.raises(ValueError, match=r"expected 2 numbers in \[0, 1\]"):
        sum_clipped_rows(rows_of(np.ones((2, 4)), "numpy"), 1.0, weights)

"""Vectors of bounded norm from any data, and estimates whose intervals cover the exact numbers."""

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from flower_ext.data import Examples
from flower_ext.errors import InvalidValue, is_tellable
from flower_ext_consortium.statistics import JointStatistics, Mean, Quantiles, read_statistics
from flower_ext_consortium.statistics.statistic import LABEL, columns_of

ALL = (
    "count; mean age 20:90; variance age 20:90; histogram age 20:90:7; "
    "table sex 0:2:2 age 20:90:3; quantiles age 20:90 0.1,0.5; survival days event 0:100:10"
)
JOINT = read_statistics(ALL)
STDDEV = 7.0
ANY = st.floats(allow_nan=True, allow_infinity=True, width=64)
ANY_ROW = st.tuples(ANY, ANY, ANY, ANY)


def patients(count, rng):
    """Return columns with ties, missing values and values beyond every bound."""
    age = rng.normal(54, 9, count).round()
    age[rng.random(count) < 0.05] = np.nan
    days = rng.exponential(60, count)
    return {
        "age": age,
        "sex": rng.integers(0, 2, count).astype(float),
        "days": days,
        "event": (rng.random(count) < 0.4).astype(float),
    }


def examples(columns):
    count = len(next(iter(columns.values())))
    return Examples({k: torch.tensor(v) for k, v in columns.items()}, torch.zeros(count).long())


@given(st.lists(ANY_ROW, min_size=1, max_size=5))
def test_no_record_makes_a_part_longer_than_one(rows):
    columns = dict(zip(("age", "sex", "days", "event"), np.array(rows).T, strict=True))
    part = JOINT.part(examples(columns))
    assert part.shape == (JOINT.size,)
    assert np.linalg.norm(part) <= 1 + 1e-12  # false for NaN
    for statistic in JOINT.statistics:
        vectors = statistic.vectors(columns)
        assert (np.linalg.norm(vectors, axis=1) <= statistic.norm + 1e-12).all()


FINITE = st.floats(allow_nan=False, allow_infinity=False)


@given(FINITE, FINITE, ANY)
@example(0.0, 5e-324, 0.0)
@example(-1e308, 1e308, 1.0)
@example(-9.0, 9.0, 1e308)
def test_bounds_are_refused_or_give_every_value_a_finite_vector(lower, upper, value):
    bounds = f"age {lower!r}:{upper!r}"
    kinds = "mean {0}; variance {0}; histogram {0}:7; table {0}:3 sex 0:2:2; quantiles {0}"
    try:
        joint = read_statistics(kinds.format(bounds))
    except InvalidValue:
        return
    part = joint.part(examples({"age": np.array([value, upper]), "sex": np.zeros(2)}))
    assert np.linalg.norm(part) <= 1 + 1e-12  # false for NaN


@given(st.lists(st.lists(ANY_ROW, min_size=1, max_size=3), min_size=1, max_size=3))
def test_no_bit_of_a_units_part_depends_on_other_units(units):
    names = ("age", "sex", "days", "event")
    tables = [examples(dict(zip(names, np.array(rows).T, strict=True))) for rows in units]
    for part, table in zip(JOINT.parts(tables), tables, strict=True):
        np.testing.assert_array_equal(part, JOINT.part(table))


@given(ANY_ROW)
def test_a_record_changes_only_its_row(odd):
    columns = patients(4, np.random.default_rng(0))
    changed = {k: np.concatenate([v, [x]]) for (k, v), x in zip(columns.items(), odd, strict=True)}
    for statistic in JOINT.statistics:
        alone, beside = statistic.vectors(columns), statistic.vectors(changed)
        np.testing.assert_array_equal(alone, beside[:4])


@pytest.mark.parametrize(
    "statistic",
    [
        Quantiles("age", 20, 90, (0.1, 0.5), depth=5) if isinstance(each, Quantiles) else each
        for each in JOINT.statistics
    ],
    ids=lambda each: type(each).__name__,
)
def test_intervals_of_95_percent_cover_the_exact_numbers_that_often(statistic):
    rng = np.random.default_rng(5)
    total = statistic.vectors(patients(740, rng)).sum(axis=0)
    exact = statistic.estimate(total[np.newaxis])[0]
    stddev, runs = STDDEV * statistic.norm, 200
    covered = np.zeros(len(exact))
    for _ in range(runs):
        noised = total + stddev * rng.standard_normal(statistic.size)
        estimates = statistic.estimates(noised, stddev, rng)
        ends = np.array([(each.lower, each.upper) for each in estimates])
        covered += (ends[:, 0] <= exact) & (exact <= ends[:, 1])
    # Five standard deviations of 200 draws at 0.95, and one point for what is not normal.
    assert (np.abs(covered / runs - 0.95) < 5 * (0.95 * 0.05 / runs) ** 0.5 + 0.01).all()


def test_without_noise_the_estimates_are_the_statistics_of_the_records():
    columns = patients(500, np.random.default_rng(3))
    joint = read_statistics("count; variance age 0:200; histogram sex 0:2:2; quantiles age 0:128")
    total = 500 * joint.part(examples(columns))
    results = joint.estimates(total, 1e-12, np.random.default_rng(0))
    values = [[each.value for each in estimates] for estimates in results.values()]
    age = columns["age"][~np.isnan(columns["age"])]
    np.testing.assert_allclose(values[0], [500])
    np.testing.assert_allclose(values[1], [len(age), age.mean(), age.var()])
    np.testing.assert_allclose(
        values[2], [sum(columns["sex"] == 0), sum(columns["sex"] == 1), 0, 0, 0], atol=1e-9
    )
    quartiles = np.quantile(age, [0.25, 0.5, 0.75])  # bins are one year wide
    assert (np.abs(np.array(values[3]) - quartiles) <= 1).all()


def test_the_survival_curve_is_kaplan_and_meiers_at_the_ends_of_intervals():
    days = np.array([5, 15, 15, 25, 35, 95, 200, 50], dtype=float)
    event = np.array([1, 1, 0, 1, 0, 1, 1, 0], dtype=float)
    joint = read_statistics("survival days event 0:100:10")
    total = 8 * joint.part(examples({"days": days, "event": event}))
    (estimates,) = joint.estimates(total, 1e-12, np.random.default_rng(0)).values()
    survival = [each.value for each in estimates]
    expected = []
    for end in np.arange(10, 101, 10):
        product = 1.0
        for time in np.unique(days[(event == 1) & (days < end)]):
            dead = ((days == time) & (event == 1)).sum()
            product *= 1 - dead / (days >= time).sum()
        expected.append(product)
    np.testing.assert_allclose(survival, expected)


def test_a_mean_that_the_noise_hides_is_not_shown():
    mean = Mean("age", 20, 90)
    estimates = mean.estimates(np.array([3.0, 1.0]), 10.0, np.random.default_rng(0))
    assert np.isnan(estimates[1].value)
    assert np.isnan(estimates[1].lower)
    assert estimates[0].value == 3.0


def test_a_missing_column_is_named_in_a_public_error():
    with pytest.raises(InvalidValue, match="no column weight") as refused:
        read_statistics("mean weight 0:200").require_columns(examples({"age": np.array([])}))
    assert is_tellable(refused.value)


def test_columns_of_tables_and_tensors_have_names():
    table = Examples(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([0, 1]))
    columns = columns_of(table)
    assert list(columns) == ["x0", "x1", LABEL]
    np.testing.assert_array_equal(columns["x1"], [2, 4])
    assert list(columns_of(Examples(torch.zeros(2, 1, 8, 8), torch.tensor([0, 1])))) == [LABEL]


@pytest.mark.parametrize(
    "kind", [torch.bfloat16, torch.float16, torch.int8, torch.bool, torch.float64]
)
def test_a_column_of_every_real_type_has_its_values(kind):
    column = torch.tensor([0, 1, 1]).to(kind)
    features = {"sex": torch.nn.Parameter(column, False)}
    columns = columns_of(Examples(features, torch.zeros(3).long()))
    assert columns["sex"].tolist() == [0.0, 1.0, 1.0]
    assert columns["sex"].dtype == np.float64


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "at least one"),
        ("median age 0:1", "expected one of count, mean"),
        ("mean age", "expected mean COLUMN LOWER:UPPER"),
        ("mean age 0:x", "expected mean COLUMN LOWER:UPPER"),
        ("mean age 9:1", "the smaller one first"),
        ("mean age 0:inf", "two finite numbers"),
        ("mean age 0:1e-200", "a distance from 1e-100 to 1e100"),
        ("histogram age 0:9", "LOWER:UPPER:BINS"),
        ("histogram age 0:9:0", "count=0: expected an integer >= 1"),
        ("quantiles age 0:9 1.5", r"expected numbers in \(0, 1\)"),
        ("survival days 0:9:3", "survival TIME EVENT"),
        ("count count", "expected count"),
        ("count; mean age 20:90; count", "'count': expected each statistic once"),
        ("mean age 20:90; mean  age 20:90", "expected each statistic once.*leave the repetition"),
    ],
)
def test_a_text_of_another_form_is_refused_with_the_form(text, message):
    with pytest.raises(InvalidValue, match=message):
        read_statistics(text)


def test_statistics_share_the_privacy_equally():
    part = JointStatistics((Mean("age", 0, 1), Mean("age", 0, 1))).part(
        examples({"age": np.array([1.0])})
    )
    np.testing.assert_allclose(part, [0.5] * 4)

"""Numbers of the wrong type or size are refused by the name of their setting."""

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import Literal

import numpy as np
import pytest

import flower_ext.algorithms
import flower_ext.federation.configured
from flower_ext import checks
from flower_ext.errors import InvalidValue
from flower_ext.privacy import (
    AdaptiveClipping,
    Budget,
    ClippedSteps,
    DpSgd,
    FixedSizeSampling,
    FullParticipation,
    ObjectivePerturbation,
    OutputPerturbation,
    PoissonSampling,
    ReleasePlan,
    SecureScores,
    SecureSum,
)
from flower_ext.training import LocalTraining
from tests.support.plans import mechanism_of

plan = partial(
    ReleasePlan,
    sampling=FullParticipation(6),
    clipping_norm=0.5,
    noise_multiplier=1.0,
    rounds=3,
    delta=1e-5,
)
sizes = partial(FixedSizeSampling, population=6, size=2)
coin = partial(PoissonSampling, population=6, rate=0.5)
budget = partial(Budget, epsilon=1.0, delta=1e-5)
scores = partial(SecureScores, noise_multiplier=1.0, times=2)

COUNTS = [2.5, 2.0, True, "2", None, 0, -1, math.nan, math.inf]
NUMBERS = ["0.5", True, None, 1j, math.nan, -1.0]


@pytest.mark.parametrize("value", COUNTS)
@pytest.mark.parametrize(
    ("make", "name"),
    [
        (plan, "rounds"),
        (FullParticipation, "population"),
        (coin, "population"),
        (sizes, "population"),
        (sizes, "size"),
        (scores, "times"),
        (LocalTraining, "batch_size"),
    ],
)
def test_counts_are_integers_of_one_or_more(make, name, value):
    with pytest.raises(InvalidValue, match=rf"{name}=.*: expected an integer"):
        make(**{name: value})


@pytest.mark.parametrize("value", [2.5, True, "2", -1, math.inf])
@pytest.mark.parametrize("name", ["epochs", "steps"])
def test_passes_are_integers_of_zero_or_more(name, value):
    with pytest.raises(InvalidValue, match=rf"{name}=.*: expected an integer >= 0"):
        LocalTraining(**{name: value})


@pytest.mark.parametrize("value", NUMBERS)
@pytest.mark.parametrize(
    ("make", "name"),
    [
        (plan, "clipping_norm"),
        (plan, "noise_multiplier"),
        (plan, "delta"),
        (partial(mechanism_of, plan()), "approximation_error"),
        (coin, "rate"),
        (budget, "epsilon"),
        (budget, "delta"),
        (scores, "noise_multiplier"),
        (SecureSum, "colluding"),
        (LocalTraining, "learning_rate"),
        (LocalTraining, "momentum"),
    ],
)
def test_numbers_are_numbers_in_their_range(make, name, value):
    with pytest.raises(InvalidValue, match=f"{name}="):
        make(**{name: value})


def test_bounds_of_scores_are_numbers():
    with pytest.raises(InvalidValue, match="bounds of 'loss': expected two finite numbers"):
        scores(bounds=(("loss", "0", "4"),))


def test_numbers_of_numpy_are_numbers():
    assert plan(rounds=np.int64(3), clipping_norm=np.float32(0.5), delta=np.float64(1e-5))
    checks.require_count("steps", np.uint8(0))
    checks.require_rate("rate", np.int32(1))


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.longdouble, np.int8, Fraction])
def test_checked_numbers_are_those_of_python(kind):
    """Arithmetic with a short type would round ε, and overflow."""
    chosen = plan(clipping_norm=kind(2), noise_multiplier=kind(3), rounds=np.int8(100))
    values = chosen.clipping_norm, chosen.noise_multiplier, chosen.rounds
    assert values == (2, 3, 100)
    assert all(type(value) in (int, float) for value in values)


@pytest.mark.parametrize("value", [0.0, 1e-300, 1e-31, 1e31, 1e300, 10**400, math.inf])
@pytest.mark.parametrize(
    ("make", "name"),
    [
        (plan, "clipping_norm"),
        (plan, "noise_multiplier"),
        (scores, "noise_multiplier"),
        (AdaptiveClipping, "max_norm"),
        (AdaptiveClipping, "count_noise_stddev"),
        (partial(OutputPerturbation, clipping_norm=1.0, noise_stddev=1.0), "clipping_norm"),
        (partial(OutputPerturbation, clipping_norm=1.0, noise_stddev=1.0), "noise_stddev"),
        (ObjectivePerturbation, "rate"),
        (partial(ClippedSteps, gradient_clipping_norm=1.0, num_examples=9), "learning_rate"),
        (partial(ClippedSteps, learning_rate=1.0, num_examples=9), "gradient_clipping_norm"),
        (partial(DpSgd, sampling_rate=0.1, steps=1), "noise_multiplier"),
    ],
)
def test_no_bound_or_noise_of_a_plan_overflows_later(make, name, value):
    with pytest.raises(InvalidValue, match=rf"^{name}=.*: expected a number from 1e-30 to 1e30"):
        make(**{name: value})


@dataclass(frozen=True, kw_only=True)
class Rates(checks.Checked):
    rate: checks.Fraction
    rounds: checks.Count | None = None


@dataclass(frozen=True, kw_only=True)
class MoreRates(Rates):
    noise: checks.Positive = 1.0
    rate: float = 1.0  # the rule of the base class holds
    label: str = ""


@pytest.mark.parametrize("field", [{"rate": None}, {"rate": 2}, {"rounds": 0}, {"noise": 0.0}])
def test_fields_are_checked_by_their_types_in_subclasses_too(field):
    (name,) = field
    with pytest.raises(InvalidValue, match=f"^{name}=.*: expected a"):
        MoreRates(**{"rate": 0.5, **field})
    assert MoreRates(rate=0.5, label="any").rounds is None


@dataclass(frozen=True, kw_only=True)
class Words(checks.Checked):
    """Fields whose types are words, and a type that only a type checker could import."""

    colour: Literal["red", "green"]
    other: "OnlyForTypeCheckers"  # noqa: F821


def test_a_literal_accepts_its_words_and_an_unknown_type_everything():
    Words(colour="red", other=object())
    with pytest.raises(InvalidValue, match="colour='blue': expected red or green"):
        Words(colour="blue", other=None)


def test_each_checked_fields_type_is_known_when_it_is_checked():
    """`Checked` reads no rule of a type that a module imports for type checkers alone."""
    unknown, kinds = [], {*_descendants(checks.Checked)}
    for kind in (kind for kind in kinds if kind.__module__.startswith("flower_ext")):
        hints = vars(kind).get("__annotations__", {})
        for name, hint in hints.items():
            if not isinstance(hint, str):
                continue
            try:
                eval(hint, vars(sys.modules[kind.__module__]))
            except NameError:
                if not hint.startswith("ClassVar"):
                    unknown.append(f"{kind.__name__}.{name}: {hint}")
    assert not unknown
    assert {flower_ext.algorithms.DPFedAvg, ReleasePlan, Budget, LocalTraining} <= kinds


def _descendants(kind: type) -> Iterator[type]:
    for child in kind.__subclasses__():
        yield child
        yield from _descendants(child)

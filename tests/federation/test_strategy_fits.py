"""Plan, sum and method fit together, or a strategy refuses them before anything is spent."""

from dataclasses import dataclass
from functools import partial

import pytest
from flwr.serverapp.strategy import FedAvg

from flower_ext.algorithms import DPFedAvg, Hosted, Scaffold
from flower_ext.algorithms.uldp import UldpAvg, weighted_sum
from flower_ext.errors import InvalidValue
from flower_ext.federation import FederatedStrategy
from flower_ext.federation.sums.masked import MaskedSum
from flower_ext.federation.sums.plain import PlainSum
from flower_ext.federation.sums.summation import Summation
from flower_ext.privacy import (
    AdaptiveClipping,
    CorrelatedNoise,
    DpSgd,
    FullParticipation,
    GroupPlan,
    NonPrivatePlan,
    OutputPerturbation,
    PerturbationPlan,
    RecordLevelPlan,
    SecureSum,
    SpacedSampling,
)
from tests.support.plans import release_plan

CLIENTS = 4
EVERYONE = FullParticipation(CLIENTS)
release = partial(release_plan, CLIENTS, clipping_norm=1.0, rounds=2, delta=1e-5)
SPACED = {
    "sampling": SpacedSampling(CLIENTS, 1, 2, 1),
    "noise_placement": "server",
}
MASKED = {"noise_placement": SecureSum(colluding=0.0, dropouts=0.25)}
PLANS = {
    "without privacy": NonPrivatePlan(sampling=EVERYONE),
    "noise on models": PerturbationPlan(
        sampling=EVERYONE,
        perturbation=OutputPerturbation(clipping_norm=1.0, noise_stddev=1.0),
        delta=1e-5,
    ),
    "noise on uploads": RecordLevelPlan(
        sampling=EVERYONE, clipping_norm=1.0, noise_stddev=1.0, num_examples=9, rounds=2, delta=1e-5
    ),
    "noise by silos": GroupPlan(
        sampling=EVERYONE,
        one_round=DpSgd(noise_multiplier=5.0, sampling_rate=0.05, steps=20),
        delta=1e-5,
    ),
    "noise by clients": release(),
    "noise by the server": release(noise_placement="server"),
    "an adaptive norm": release(clipping_norm=AdaptiveClipping(initial_norm=1.0)),
    "turns": release(**SPACED),
    "correlated noise": release(correlation=CorrelatedNoise(), **SPACED),
    "secure sums": release(**MASKED),
    "an adaptive norm in secure sums": release(
        clipping_norm=AdaptiveClipping(initial_norm=1.0), **MASKED
    ),
}


class SumOfAUser(Summation):
    """A sum that is neither plain, masked nor weighted."""

    def open(self, opening):
        raise NotImplementedError


class MaskedSumOfAUser(SumOfAUser):
    """A sum of masked contributions by another protocol."""

    masks = True


SUMS = {
    "plain": PlainSum,
    "a user's": SumOfAUser,
    "a user's masked": MaskedSumOfAUser,
    "masked": MaskedSum,
    "weighted": weighted_sum(),
}
SECURE = {(p, s) for p in PLANS if "secure sums" in p for s in ("masked", "a user's masked")}
FIT = {
    "clients": (
        DPFedAvg(),
        SECURE | {(p, s) for p in PLANS if "secure sums" not in p for s in ("plain", "a user's")},
    ),
    "users": (
        UldpAvg(num_silos=CLIENTS, weighting="by-records"),
        SECURE
        | {("noise by clients", "plain"), ("an adaptive norm", "plain")}
        | {("noise by clients", "a user's"), ("an adaptive norm", "a user's")}
        | {("noise by clients", "weighted")},
    ),
}
"""By the units of a method: the method, and the pairs of plan and sum that fit it."""


@pytest.mark.parametrize("units", FIT)
@pytest.mark.parametrize("sum", SUMS)
@pytest.mark.parametrize("plan", PLANS)
def test_a_sum_that_does_not_fit_the_plan_is_refused_with_alternatives(plan, sum, units):
    method, fitting = FIT[units]
    if (plan, sum) in fitting:
        FederatedStrategy(method, PLANS[plan], sum=SUMS[sum])
    else:
        with pytest.raises(InvalidValue, match="expected"):
            FederatedStrategy(method, PLANS[plan], sum=SUMS[sum])


class WithoutSizes(NonPrivatePlan):
    """A plan under which clients send nothing but updates."""

    tells_sizes = False


@dataclass(frozen=True, kw_only=True)
class Counting(DPFedAvg):
    """A method of another project whose server needs a number of each client."""

    needs_metrics = True


@pytest.mark.parametrize("plan", [WithoutSizes(sampling=EVERYONE), PLANS["noise by silos"]])
@pytest.mark.parametrize("method", [Scaffold(), Hosted(FedAvg()), Counting()])
def test_a_method_that_needs_unsent_metrics_is_refused_before_a_round(method, plan):
    with pytest.raises(InvalidValue, match=f"plan={type(plan).__name__}: .*tells_sizes=True"):
        FederatedStrategy(method, plan)
    FederatedStrategy(method, PLANS["without privacy"])
    FederatedStrategy(DPFedAvg(), plan)

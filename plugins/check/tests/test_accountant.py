"""This package's accountant behind Flower's protocol: alone, and in runs of Flower's strategies."""

import json
import math

import numpy as np
import pytest
from flwr.serverapp import (
    GaussianPrivacyEvent,
    NeighboringRelation,
    PrivacyAccountant,
    RdpAccountant,
)

from flower_ext import privacy
from flower_ext.privacy import Budget, Guarantee, Ledger, gaussian_loss
from flower_ext.privacy.ledger import LedgerCorrupt
from flower_ext_check.accountant import PldAccountant
from plugins.check.tests.flower_noise import DELTA, POPULATION, config
from tests.support.losses import privacy_loss


def accountant(**more) -> PldAccountant:
    return PldAccountant(config(**more))


def event(noise=1.0, sample=10, population=POPULATION) -> GaussianPrivacyEvent:
    return GaussianPrivacyEvent(noise, sample, population)


def gaussian_delta(noise: float, releases: int, epsilon: float) -> float:
    """Return δ by Balle and Wang's formula."""
    shift = math.sqrt(releases) / noise

    def below(x: float) -> float:
        return 0.5 * math.erfc(-x / math.sqrt(2))

    return below(shift / 2 - epsilon / shift) - math.exp(epsilon) * below(
        -shift / 2 - epsilon / shift
    )


def test_the_accountant_has_every_method_of_flowers_protocol():
    names = [n for n in vars(PrivacyAccountant) if not n.startswith("_")]
    assert len(names) == 9
    assert all(hasattr(PldAccountant, name) for name in names)


def test_epsilon_equals_that_of_this_packages_accounting():
    ours = accountant()
    ours.compose(event(), 3)
    ours.compose(event())
    expected = privacy_loss(
        sampling=privacy.FullParticipation(POPULATION),
        noise_multiplier=1.0,
        rounds=4,
        delta=DELTA,
        relation=privacy.NeighboringRelation.REPLACE_SPECIAL,
    )
    spent = ours.get_privacy_spent()
    assert (spent.epsilon, spent.delta) == (expected.epsilon, DELTA)
    assert spent.accounting_method == expected.accountant
    assert spent.num_releases == ours.num_releases == 4
    assert ours.get_epsilon(DELTA) == expected.epsilon
    assert ours.get_privacy_spent(1e-3).epsilon < expected.epsilon


@pytest.mark.parametrize("noise", [0.4, 1.0, 5.0])
@pytest.mark.parametrize("releases", [1, 7, 100])
def test_epsilon_lies_between_what_holds_and_what_flower_reports(releases, noise):
    ours, flowers = accountant(), RdpAccountant(config())
    for each in (ours, flowers):
        each.compose(event(noise), releases)
    epsilon = ours.get_epsilon(DELTA)
    assert epsilon <= flowers.get_epsilon(DELTA)
    assert gaussian_delta(noise, releases, epsilon) == pytest.approx(DELTA, rel=1e-4)
    assert gaussian_delta(noise, releases, epsilon) <= DELTA


def test_replacing_one_of_all_costs_twice_the_shift_unlike_in_flowers_accountant():
    """All clients take part, so the exact ε is known: a replaced client moves the sum by 2C."""
    flowers = RdpAccountant(config("without-replacement"))
    flowers.compose(event(2.0, sample=POPULATION))
    exact = gaussian_loss(1.0, releases=1, delta=DELTA).epsilon
    assert flowers.get_epsilon(DELTA) < 0.8 * exact


def test_two_neighbours_refute_flowers_accountant_for_sampled_replacement():
    """Other clients send zeros; one, drawn with probability 1/10, sends C or −C."""
    noise, rate = 4.0, 0.1
    seen = np.linspace(-60.0, 60.0, 1_000_001)

    def density(sent):
        own_density, nothing = (np.exp(-((seen - at) ** 2) / (2 * noise**2)) for at in (sent, 0.0))
        return (rate * own_density + (1 - rate) * nothing) / (noise * math.sqrt(2 * math.pi))

    gap = density(1.0) - math.exp(0.171) * density(-1.0)
    assert np.maximum(gap, 0).sum() * (seen[1] - seen[0]) > DELTA  # so that ε > 0.171
    flowers = RdpAccountant(config("without-replacement"))
    flowers.compose(event(noise))
    plan = privacy_loss(
        sampling=privacy.FixedSizeSampling(POPULATION, 10),
        noise_multiplier=noise,
        rounds=1,
        delta=DELTA,
        relation=privacy.NeighboringRelation.REPLACE_ONE,
    )
    assert flowers.get_epsilon(DELTA) < 0.17 < 0.171 < plan.epsilon


@pytest.mark.parametrize("epsilon", [0.0, 0.5, 3.0, 40.0])
def test_delta_is_the_least_at_which_epsilon_holds(epsilon):
    ours = accountant()
    assert ours.get_delta(epsilon) == 0.0
    ours.compose(event(1.5), 4)
    exact = gaussian_delta(1.5, 4, epsilon)
    assert ours.get_delta(epsilon) == pytest.approx(exact, rel=1e-5)
    assert ours.get_delta(epsilon) >= exact * (1 - 1e-9)


def test_nothing_is_spent_before_the_first_release():
    spent = accountant().get_privacy_spent()
    assert (spent.epsilon, spent.num_releases) == (0.0, 0)


def test_would_exceed_asks_and_changes_nothing():
    limit = gaussian_loss(1.0, releases=3, delta=DELTA).epsilon
    ours = accountant(max_epsilon=limit)
    ours.compose(event(), 2)
    assert not ours.would_exceed(event())
    assert ours.would_exceed(event(), count=2)
    assert ours.would_exceed(event(0.9))
    assert ours.would_exceed(event(), limit * 0.99)
    assert not ours.would_exceed(event(), limit * 2, count=2)
    assert ours.num_releases == 2


@pytest.mark.parametrize("kind", ["poisson", "without-replacement"])
def test_amplification_by_cohorts_that_are_not_secret_is_refused(kind):
    with pytest.raises(ValueError, match=f"sampling_method='{kind}': expected 'no-ampl"):
        PldAccountant(config(kind))


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda a: a.compose(event(population=50)), "population_size=50"),
        (lambda a: a.would_exceed(event(population=50), 1.0), "population_size=50"),
        (lambda a: a.compose(event(), 0), "count=0"),
        (lambda a: a.compose(event(), True), "count=True"),
        (lambda a: a.would_exceed(event(), 1.0, count=1.5), "count=1.5"),
        (lambda a: a.would_exceed(event()), "max_epsilon=None"),
        (lambda a: a.would_exceed(event(), math.nan), "max_epsilon=nan"),
        (lambda a: a.would_exceed(event(), 0.0), "max_epsilon=0.0"),
        (lambda a: a.get_epsilon(0.0), "delta=0.0"),
        (lambda a: a.get_epsilon(1.0), "delta=1.0"),
        (lambda a: a.get_delta(-1.0), "epsilon=-1.0"),
    ],
)
def test_meaningless_arguments_are_refused_at_no_charge(act, message):
    ours = accountant()
    with pytest.raises(ValueError, match=message):
        act(ours)
    assert ours.num_releases == 0


def test_a_ledger_with_a_separate_budget_is_refused(tmp_path):
    ledger = Ledger(tmp_path / "l", budget=Budget(epsilon=1.0, delta=DELTA))
    with pytest.raises(ValueError, match="max_epsilon"):
        PldAccountant(config(), ledger=ledger)


def filled() -> PldAccountant:
    ours = accountant()
    ours.compose(event(1.5, 20), 2)
    ours.compose(event(0.7))
    return ours


def test_a_state_that_went_through_json_holds_all_that_was_spent():
    before, after = filled(), accountant()
    after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    assert after.get_privacy_spent() == before.get_privacy_spent()
    assert after.state_dict() == before.state_dict()


OTHER = privacy.Release(
    sampling=privacy.PoissonSampling(POPULATION, 0.1),
    noise_multiplier=1.0,
    relation=privacy.NeighboringRelation.ADD_OR_REMOVE_ONE,
)


def changed(**facts):
    first, *others = filled().state_dict()["releases"]
    return {"releases": [{**first, **facts}, *others]}


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({}, "releases"),
        ({"releases": None}, "state of the accountant"),
        ({"releases": [{"release": {}, "count": 1}]}, "state of the accountant"),
        (RdpAccountant(config()).state_dict(), "releases"),
        (changed(count=0), "count=0"),
        (changed(release=OTHER.to_dict()), "of another configuration"),
    ],
)
def test_a_state_of_something_else_is_refused_and_changes_nothing(state, message):
    ours = filled()
    before = ours.state_dict()
    with pytest.raises(ValueError, match=message):
        ours.load_state_dict(state)
    assert ours.state_dict() == before


def test_releases_on_the_ledger_count_after_a_restart(tmp_path):
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(path)
    first = PldAccountant(config(), ledger=ledger)
    first.compose(event(1.5), 2)
    saved = first.state_dict()
    first.compose(event(0.7))
    ledger.close()
    assert [e["kind"] for e in Ledger.read(path)] == ["reserve", "commit"] * 3
    again = PldAccountant(config(), ledger=Ledger(path))
    again.load_state_dict(saved)  # saved before the last release, which stays spent
    assert again.get_privacy_spent() == first.get_privacy_spent()


def test_a_ledger_that_misses_releases_or_holds_others_is_refused(tmp_path):
    ours = PldAccountant(config(), ledger=Ledger(tmp_path / "empty"))
    with pytest.raises(LedgerCorrupt, match="holds 0 releases"):
        ours.load_state_dict(filled().state_dict())
    other = Ledger(tmp_path / "other")
    with other.reserve(OTHER, server_round=1):
        pass
    with pytest.raises(ValueError, match="of another configuration"):
        PldAccountant(config(), ledger=other)


def test_the_guarantee_names_all_that_it_rests_on():
    ours = filled()
    guarantee = ours.guarantee()
    assert guarantee.relation is privacy.NeighboringRelation.REPLACE_SPECIAL  # what holds, not what
    assert ours.config.neighboring_relation is NeighboringRelation.ADD_OR_REMOVE_ONE  # is claimed
    text = guarantee.statement()
    for word in ("one client", "released models", "not cryptographic", "equal", "metrics", "1e-05"):
        assert word in text
    assert Guarantee.from_dict(json.loads(json.dumps(guarantee.to_dict()))) == guarantee

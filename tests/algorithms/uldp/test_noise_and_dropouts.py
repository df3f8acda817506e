"""Silos of ULDP-AVG that drop out, and the noise that the remaining uploads carry."""

import math
from dataclasses import replace

import pytest
from flwr.app import ArrayRecord

from flower_ext.algorithms.uldp import (
    UldpNaive,
)
from flower_ext.algorithms.uldp.averaging import UldpAvg
from flower_ext.federation import InProcessGrid
from flower_ext.federation.server.run_guarantees import spent_by
from flower_ext.privacy import (
    AdversaryView,
    Ledger,
    PoissonSampling,
    PrivacyUnit,
    gaussian_loss,
    privacy_loss_of,
)
from flower_ext.privacy.run_summary import RunSummary
from flower_ext.privacy.theorems.uldp_theorem import uldp_avg_guarantees, uldp_closed_form
from tests.support.plans import mechanism_of
from tests.support.run_summary import run_summary
from tests.support.silos import (
    COMMON,
    LOCAL,
    ROUNDS,
    SEED,
    SILOS,
    USERS,
    plan,
    task,
)
from tests.support.strategies import strategy_of
from tests.support.uldp_runs import run


class Absent(InProcessGrid):
    """A grid in which silo 2 does not answer in rounds 1 and 3."""

    def send_and_receive(self, messages, *, timeout=None):
        replies = super().send_and_receive(messages, timeout=timeout)
        return [
            reply
            for reply in replies
            if not (
                reply.metadata.message_type.startswith("train")
                and reply.metadata.group_id in ("1", "3")
                and reply.metadata.src_node_id == 1_002
            )
        ]


def with_absence(tmp_path, method=UldpAvg):
    """Run with silos that drop out; return the strategy, the ledger's entries, and the ledger."""
    ledger = Ledger(tmp_path / "ledger.jsonl")
    strategy = strategy_of(method, plan=plan(), local=LOCAL, ledger=ledger, **COMMON)
    grid = Absent(method.client_app(task(), allow_seeded_noise=True), num_clients=SILOS)
    strategy.start(grid, ArrayRecord(task().initial_params(SEED)), num_rounds=ROUNDS)
    return strategy, Ledger.read(tmp_path / "ledger.jsonl"), ledger


def test_naive_leaves_the_given_plan_unchanged_and_accounts_by_its_silos():
    given = plan(noise_multiplier=5.0)
    strategy = strategy_of(UldpNaive, plan=given, local=LOCAL, **COMMON)
    assert strategy.run.plan is given
    assert strategy.run.mechanism.noise_multiplier == 5.0 * SILOS
    assert strategy.run.mechanism.sensitivity == 2.0 * SILOS
    assert strategy.run.mechanism.sampling.population == SILOS


@pytest.mark.parametrize(("method", "scale"), [(UldpAvg, 1.0), (UldpNaive, SILOS)])
def test_a_lost_silos_noise_is_topped_up_and_the_ledger_says_so(method, scale, tmp_path):
    strategy, entries, _ = with_absence(tmp_path, method)
    commits = [e["notes"] for e in entries if e["kind"] == "commit"]
    assert [e["answered"] for e in commits] == [2, 3, 2]
    missing = strategy.run.mechanism.noise_stddev * math.sqrt(1 / 3)
    assert missing == pytest.approx(0.4 * 0.3 * scale * math.sqrt(1 / 3))
    assert [e["topped_up_stddev"] for e in commits] == pytest.approx([missing, 0, missing])


def test_an_adversary_that_sees_sums_of_fewer_silos_sees_less_noise(tmp_path):
    strategy, _, _ = with_absence(tmp_path)
    assert strategy.participations.in_sums == pytest.approx(1.5 + 1 + 1.5)
    views = {g.view: g.epsilon for g in strategy.guarantees() if g.basis == "provable"}
    expected = gaussian_loss(0.4, releases=4.0, delta=1e-5).epsilon
    assert views[AdversaryView.SUM_ONLY] == pytest.approx(expected)
    models = gaussian_loss(0.4, releases=3, delta=1e-5).epsilon
    assert views[AdversaryView.RELEASED_MODELS] == pytest.approx(models)


def test_rounds_whose_uploads_all_came_too_late_still_count():
    class Silent(InProcessGrid):
        def send_and_receive(self, messages, *, timeout=None):
            replies = super().send_and_receive(messages, timeout=timeout)
            return [r for r in replies if not r.metadata.message_type.startswith("train")]

    strategy = strategy_of(UldpAvg, plan=plan(), local=LOCAL, **COMMON)
    grid = Silent(UldpAvg.client_app(task(), allow_seeded_noise=True), num_clients=SILOS)
    strategy.start(grid, ArrayRecord(task().initial_params(SEED)), num_rounds=ROUNDS)
    views = {g.view: g.epsilon for g in strategy.guarantees() if g.basis == "provable"}
    expected = gaussian_loss(0.4, releases=ROUNDS, delta=1e-5).epsilon
    assert views[AdversaryView.EACH_UPLOAD] == pytest.approx(expected)


def test_guarantees_match_the_plan_and_the_log_has_both_epsilons():
    sampling = PoissonSampling(USERS, 0.4)
    strategy = strategy_of(
        UldpAvg, plan=plan(sampling), weighting="by-records", local=LOCAL, **COMMON
    )
    run(strategy)
    facts = RunSummary(
        method=strategy.method.traits,
        participations=strategy.participations,
        secure_noise=False,
        secure_cohorts=False,
    )
    sums = mechanism_of(plan(sampling), silos=SILOS)
    expected = uldp_avg_guarantees(sums, facts)
    ours = strategy.guarantees()
    assert [g.epsilon for g in ours] == [g.epsilon for g in expected]
    assert all(g.unit is PrivacyUnit.USER for g in ours[1:])
    spent = spent_by(strategy.run)
    assert spent["epsilon_published"] == ours[0].epsilon
    assert spent["epsilon_provable"] == ours[1].epsilon
    assert any("how many records each user has" in text for text in ours[1].not_covered)
    equal = strategy_of(UldpAvg, plan=plan(sampling), local=LOCAL, **COMMON)
    run(equal)
    assert not any("how many records" in text for text in equal.guarantees()[1].not_covered)


def test_naive_spends_on_the_ledger_what_is_provable_not_what_is_published(tmp_path):
    ledger = Ledger(tmp_path / "ledger.jsonl")
    strategy = strategy_of(
        UldpNaive, plan=plan(noise_multiplier=5.0), local=LOCAL, ledger=ledger, **COMMON
    )
    run(strategy)
    published, provable = strategy.guarantees()
    assert published.epsilon == uldp_closed_form(noise_multiplier=5.0, rounds=3, delta=1e-5)
    assert provable.epsilon == pytest.approx(ledger.spent(1e-5).epsilon)
    assert provable.epsilon == pytest.approx(gaussian_loss(2.5, releases=3, delta=1e-5).epsilon)
    assert privacy_loss_of(
        {strategy.run.mechanism.release: 3}, delta=1e-5
    ).epsilon == pytest.approx(provable.epsilon)


def test_naive_claims_only_the_noise_that_the_rounds_had():
    method, seen = UldpNaive(num_silos=SILOS), run_summary(rounds=ROUNDS)
    planned = method.mechanism(plan())
    used = replace(planned, noise_multiplier=planned.noise_multiplier / 2)
    less = method.claims(seen, planned)
    more = method.claims(seen, used)
    assert all(a.epsilon < b.epsilon for a, b in zip(less, more, strict=True))

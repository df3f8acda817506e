"""One account of a population, from which recorded, resumed and bare runs spend."""

import math
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from flwr.app import ArrayRecord

from flower_ext.algorithms import DPDitto, DPFedAvg
from flower_ext.federation import FederatedStrategy, InProcessGrid
from flower_ext.federation.server.spending import Spending
from flower_ext.privacy import (
    AdversaryView,
    Budget,
    FullParticipation,
    Ledger,
    NonPrivatePlan,
    RecordLevelPlan,
    ReleasePlan,
    calibrate_noise_multiplier,
    privacy_loss_of,
)
from flower_ext.privacy.accounting.events import PrivacyLoss
from flower_ext.privacy.accounting.gaussian import gaussian_loss
from flower_ext.privacy.base_plan import PlainAverage
from flower_ext.privacy.study_composition import spent_by_run, study_guarantees, total_spent
from flower_ext.privacy.theorems.claims import Claims
from flower_ext.privacy.units import PrivacyUnit
from flower_ext.runs import RunWriter
from flower_ext.runs.report import account_text
from tests.support.strategies import strategy_of
from tests.support.worlds import task

CLIENTS, DELTA = 3, 0.1
PLAN = ReleasePlan(
    sampling=FullParticipation(CLIENTS),
    clipping_norm=0.5,
    noise_multiplier=3.0,
    rounds=9,
    delta=DELTA,
)


def run_of(folder: Path, budget: Budget, *, rounds=2, plan=PLAN, method=DPFedAvg, **options):
    """Start or resume a run for ``rounds`` rounds in total."""
    begun = (folder / "run.json").exists()
    run = RunWriter.resume(folder) if begun else RunWriter.create(folder, config={})
    try:
        strategy = strategy_of(
            method, plan=plan, budget=budget, directory=run, timeout=5.0, **options
        )
        grid = InProcessGrid(method.client_app(task()), num_clients=CLIENTS)
        strategy.start(grid, ArrayRecord(task().initial_params(0)), num_rounds=rounds)
    finally:
        run.close()
    return strategy


def epsilon(rounds: int) -> float:
    return privacy_loss_of({PLAN.mechanism().release: rounds}, delta=DELTA).epsilon


def account(tmp_path, rounds: float) -> Budget:
    return Budget(epsilon=epsilon(rounds) * 1.001, delta=DELTA, ledger=tmp_path / "people.jsonl")


def test_runs_in_several_folders_spend_one_budget_and_end_at_it(tmp_path):
    budget = account(tmp_path, 5)
    first = run_of(tmp_path / "a", budget, rounds=3)
    second = run_of(tmp_path / "b", budget, rounds=3)
    assert first.stopped is None
    assert second.participations.rounds == 2
    assert "2 runs spent" in second.stopped
    entries = Ledger.read(budget.ledger)
    assert total_spent(entries, DELTA) == pytest.approx(epsilon(5))
    assert [(run.label, run.rounds) for run in spent_by_run(entries)] == [("a", 3), ("b", 2)]


def test_a_resumed_run_is_charged_for_its_new_rounds_alone(tmp_path):
    budget = account(tmp_path, 9)
    run_of(tmp_path / "a", budget, rounds=2)
    run_of(tmp_path / "a", budget, rounds=2)
    assert total_spent(Ledger.read(budget.ledger), DELTA) == pytest.approx(epsilon(2))
    run_of(tmp_path / "a", budget, rounds=3)
    assert total_spent(Ledger.read(budget.ledger), DELTA) == pytest.approx(epsilon(3))


def test_a_round_is_charged_before_anybody_is_asked(tmp_path):
    budget = account(tmp_path, 9)

    class Watching(InProcessGrid):
        def send_and_receive(self, messages, **how):
            messages = list(messages)
            if any(message.metadata.message_type.startswith("train") for message in messages):
                seen.append(sum(e["kind"] == "charge" for e in Ledger.read(budget.ledger)))
            return super().send_and_receive(messages, **how)

    seen: list[int] = []
    strategy = FederatedStrategy(DPFedAvg(), PLAN, budget=budget, timeout=5.0)
    grid = Watching(DPFedAvg.client_app(task()), num_clients=CLIENTS)
    strategy.start(grid, ArrayRecord(task().initial_params(0)), num_rounds=2)
    assert seen == [1, 2]


def test_records_are_counted_by_epsilon_and_never_with_clients(tmp_path):
    plan = RecordLevelPlan.for_target(
        epsilon=4.0,
        delta=0.01,
        sampling=FullParticipation(CLIENTS),
        num_examples=30,
        rounds=2,
        clipping_norm=1.0,
        basis="provable",
    )
    path = tmp_path / "people.jsonl"
    budget = Budget(epsilon=6.0, delta=0.02, ledger=path)
    for name in ("a", "b"):
        assert run_of(tmp_path / name, budget, plan=plan, method=DPDitto).stopped is None
    sigma = calibrate_noise_multiplier(
        epsilon=4.0, delta=0.01, sampling=FullParticipation(1), rounds=2
    )
    both = gaussian_loss(sigma, releases=4, delta=0.02).epsilon
    assert both < 6 < 2 * 4
    assert total_spent(Ledger.read(path), 0.02) == pytest.approx(both, rel=1e-3)
    assert run_of(tmp_path / "c", budget, plan=plan, method=DPDitto).stopped is not None
    with pytest.raises(ValueError, match="no single ε covers both"):
        run_of(tmp_path / "d", Budget(epsilon=8.0, delta=DELTA, ledger=path))


def by_view(budget: Budget) -> dict:
    return {each.view: each for each in study_guarantees(_of(budget), DELTA)}


def test_a_study_has_one_exact_epsilon_for_each_adversary(tmp_path):
    budget, sigma = account(tmp_path, 9), PLAN.noise_multiplier
    for name in ("a", "b"):
        run_of(tmp_path / name, budget, rounds=2)
    study, entries = by_view(budget), _of(budget)
    models, sums = study[AdversaryView.RELEASED_MODELS], study[AdversaryView.SUM_ONLY]
    assert models.epsilon == total_spent(entries, DELTA) == pytest.approx(epsilon(4))
    assert sums.epsilon == pytest.approx(gaussian_loss(sigma, releases=4, delta=DELTA).epsilon)
    # Each upload has one client's share of the noise.
    uploads = gaussian_loss(sigma, releases=4 * CLIENTS, delta=DELTA).epsilon
    assert study[AdversaryView.EACH_UPLOAD].epsilon == pytest.approx(uploads)
    # Adding up the runs' ε, each at half of δ, is worse.
    assert sums.epsilon < 2 * gaussian_loss(sigma, releases=2, delta=DELTA / 2).epsilon
    assert [*spent_by_run(entries)[0].epsilons] == [*study]
    assert any("operating system" in text for text in models.assumptions)


def test_one_run_without_promise_to_an_adversary_voids_the_studys_promise(tmp_path):
    budget = account(tmp_path, 9)
    run_of(tmp_path / "a", budget)
    run_of(tmp_path / "trusting", budget, plan=replace(PLAN, noise_placement="server"))
    study = by_view(budget)
    assert study[AdversaryView.RELEASED_MODELS].epsilon == pytest.approx(epsilon(4))
    for view in (AdversaryView.SUM_ONLY, AdversaryView.EACH_UPLOAD):
        assert math.isinf(study[view].epsilon)
        assert "nothing is promised by trusting" in study[view].source
    run_of(tmp_path / "bare", budget, plan=NonPrivatePlan(sampling=FullParticipation(CLIENTS)))
    assert all(
        math.isinf(each.epsilon) and "bare" in each.source for each in by_view(budget).values()
    )


def test_dropouts_of_the_last_round_count_against_a_server_that_sees_sums(tmp_path):
    budget = account(tmp_path, 9)

    class Lossy(InProcessGrid):
        def send_and_receive(self, messages, **how):
            replies = [*super().send_and_receive(messages, **how)]
            kind = replies[0].metadata.message_type
            return replies[1:] if kind.startswith("train") else replies

    strategy = FederatedStrategy(DPFedAvg(), PLAN, budget=budget, timeout=5.0, evaluate_every=0)
    grid = Lossy(DPFedAvg.client_app(task()), num_clients=CLIENTS)
    strategy.start(grid, ArrayRecord(task().initial_params(0)), num_rounds=2)
    claims = {each.view: each.epsilon for each in strategy.guarantees()}
    complete = gaussian_loss(PLAN.noise_multiplier, releases=2, delta=DELTA).epsilon
    sums = by_view(budget)[AdversaryView.SUM_ONLY].epsilon
    assert sums == pytest.approx(claims[AdversaryView.SUM_ONLY])
    assert sums > complete


def test_a_run_without_noise_and_a_pilot_are_named_as_such(tmp_path):
    budget = account(tmp_path, 9)
    bare = NonPrivatePlan(sampling=FullParticipation(CLIENTS))
    run_of(tmp_path / "a", budget, plan=bare)
    run_of(tmp_path / "b", budget, disclosures=["a pilot run without noise"])
    runs = {(run.label, run.epsilon is None, run.what) for run in spent_by_run(_of(budget))}
    assert runs == {
        ("a", True, "training without noise"),
        ("b", True, "a pilot run without noise"),
        ("b", False, ""),
    }


def test_a_ledger_or_budget_that_does_not_fit_the_plan_is_refused(tmp_path):
    bare = NonPrivatePlan(sampling=FullParticipation(CLIENTS))
    ledger = Ledger(tmp_path / "ledger.jsonl")

    def check(plan, **given):
        Spending(**{"ledger": None, "budget": None, "disclosures": (), **given}).check_plan(plan)

    sums = PLAN.mechanism()

    check(bare)
    check(sums, ledger=ledger, budget=Budget(epsilon=1.0, delta=DELTA))
    with pytest.raises(ValueError, match="ledger= with a NonPrivatePlan"):
        check(bare, ledger=ledger)
    with pytest.raises(ValueError, match="expected the δ of the plan"):
        check(sums, budget=Budget(epsilon=1.0, delta=2 * DELTA))
    with pytest.raises(ValueError, match="expected budget=None, because the plan promises"):
        check(bare, budget=Budget(epsilon=1.0, delta=DELTA))
    shared = tmp_path / "people.jsonl"
    check(bare, budget=Budget(epsilon=1.0, delta=DELTA, ledger=shared))
    check(sums, budget=Budget(epsilon=1.0, delta=2 * DELTA, ledger=shared))
    with pytest.raises(ValueError, match="expected at least the δ of the plan"):
        check(sums, budget=Budget(epsilon=1.0, delta=DELTA / 2, ledger=shared))


@dataclass(frozen=True, kw_only=True)
class Pure(PlainAverage):
    """A plan whose uploads are each (1/2, 0)-differentially private."""

    delta = 0.0

    def describe(self):
        return "pure"

    def guarantees(self, run):
        claims = Claims(unit=PrivacyUnit.CLIENT, relation=PLAN.relation, delta=0.0)
        uploads = max(run.participations.uploads.values(), default=0)
        loss = PrivacyLoss(epsilon=uploads / 2, delta=0.0, accountant="basic composition")
        return [claims.provable(AdversaryView.EACH_UPLOAD, loss, "uploads")]


PURE = Pure(sampling=FullParticipation(CLIENTS))


@pytest.mark.parametrize("delta", [0.0, DELTA])
def test_an_epsilon_without_delta_ends_at_a_budget_of_any_delta(delta, tmp_path):
    shared = tmp_path / "people.jsonl"
    alone = Budget(epsilon=1.6, delta=delta)
    assert run_of(tmp_path / "alone", alone, plan=PURE, rounds=9).participations.rounds == 3
    budget = replace(alone, ledger=shared)
    assert run_of(tmp_path / "a", budget, plan=PURE, rounds=2).stopped is None
    assert run_of(tmp_path / "b", budget, plan=PURE, rounds=9).participations.rounds == 1
    assert total_spent(Ledger.read(shared), 0.0) == pytest.approx(1.5)
    # Of two randomised responses with ε = 1 and 1/2, only the most likely outcome counts here.
    likely, unlikely = (1 / ((1 + math.exp(-s)) * (1 + math.exp(-s / 2))) for s in (1, -1))
    joint = math.log((likely - DELTA) / unlikely)
    assert total_spent(Ledger.read(shared), DELTA) == pytest.approx(joint, rel=2e-3)
    statement = {0.0: "at δ = 0: **ε = 1.5**", DELTA: "at δ = 0.1: **ε = 1.26**"}[delta]
    assert statement in account_text(shared)
    # Noised sums have no ε at δ = 0, so a budget with δ = 0 covers none of them.
    if delta == 0.0:
        with pytest.raises(ValueError, match="expected at least the δ of the plan, 0.1"):
            run_of(tmp_path / "c", budget)
        with pytest.raises(ValueError, match="expected the δ of the plan, 0.1"):
            run_of(tmp_path / "d", alone)
        with pytest.raises(ValueError, match=r"delta=0.0: expected a number in \(0, 1\)"):
            Ledger(tmp_path / "ledger.jsonl", budget=alone)
        with pytest.raises(ValueError, match=r"delta=0.*expected a number in \(0, 1\)"):
            privacy_loss_of({PLAN.mechanism().release: 1}, delta=0.0)
    else:
        sums = replace(PLAN, delta=DELTA)
        run_of(tmp_path / "c", replace(budget, epsilon=1.4 + epsilon(1)), plan=sums, rounds=9)
        run_of(tmp_path / "e", replace(budget, epsilon=1.51 + epsilon(1)), plan=sums, rounds=1)
        assert total_spent(Ledger.read(shared), DELTA) <= 1.5 + epsilon(1) + 1e-9
        assert math.isinf(total_spent(Ledger.read(shared), 0.0))


def _of(budget: Budget):
    return Ledger.read(budget.ledger)

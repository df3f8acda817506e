import json
import math
import multiprocessing
from dataclasses import replace

import pytest

from flower_ext.privacy import (
    AdversaryView,
    Budget,
    BudgetExhausted,
    Guarantee,
    Ledger,
    LedgerCorrupt,
    NeighboringRelation,
    PoissonSampling,
    PrivacyUnit,
    Release,
    privacy_loss_of,
)
from flower_ext.privacy.shared_ledger import Charge, DoesNotCompose, charge, note_disclosure
from flower_ext.privacy.study_composition import spent_by_run, total_spent

ADD_OR_REMOVE = NeighboringRelation.ADD_OR_REMOVE_ONE
DELTA = 1e-3


def release(noise_multiplier=1.0) -> Release:
    return Release(
        sampling=PoissonSampling(100, 0.1),
        noise_multiplier=noise_multiplier,
        relation=ADD_OR_REMOVE,
    )


def sampled(run: str, training: int, noise_multiplier=1.0, **more) -> Charge:
    one = release(noise_multiplier)
    facts = {
        "run": run,
        "method": "DPFedAvg",
        "training": training,
        "unit": PrivacyUnit.CLIENT,
        "population": 100,
        "relation": ADD_OR_REMOVE,
        "epsilon": privacy_loss_of({one: training}, delta=DELTA).epsilon,
        "delta": DELTA,
        "release": one,
    }
    return Charge(**{**facts, **more})


def summed(run: str, training: int, epsilon: float, delta=1e-4, **more) -> Charge:
    return sampled(run, training, epsilon=epsilon, delta=delta, release=None, **more)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "people.jsonl"


def spent(path, delta=DELTA):
    return total_spent(Ledger.read(path), delta)


def test_rounds_of_all_runs_compose_exactly_and_none_exceeds_the_budget(path):
    epsilon = privacy_loss_of({release(1.0): 3, release(2.0): 2}, delta=DELTA).epsilon
    budget = Budget(epsilon=epsilon * 1.0001, delta=DELTA, ledger=path)
    for run, training, sigma in (("a", 1, 1.0), ("b", 1, 2.0), ("a", 2, 1.0), ("b", 2, 2.0)):
        charge(path, sampled(run, training, sigma), budget)
    charge(path, sampled("c", 1), budget)
    assert spent(path) == pytest.approx(epsilon)
    before = path.read_bytes()
    with pytest.raises(BudgetExhausted, match="3 runs spent"):
        charge(path, sampled("d", 1), budget)
    assert path.read_bytes() == before


def test_a_cost_known_only_by_epsilon_counts_with_its_delta(path):
    budget = Budget(epsilon=5.0, delta=DELTA, ledger=path)
    for training, epsilon in ((1, 0.5), (2, 0.8), (3, 1.0)):
        charge(path, summed("a", training, epsilon), budget)
    charge(path, summed("b", 1, 0.7), budget)
    # The last charge of a run covers all its rounds; optimal composition may save a little.
    assert 1.69 < spent(path) <= 1.7
    charge(path, sampled("c", 1), budget)
    rest = privacy_loss_of({release(): 1}, delta=DELTA - 2e-4).epsilon
    assert 1.7 < spent(path) <= 1.7 + rest
    assert math.isinf(spent(path, 1e-4))
    with pytest.raises(BudgetExhausted, match="ε = inf"):
        charge(path, summed("d", 1, 0.1, delta=9e-4), budget)


@pytest.mark.parametrize("kind", [sampled, lambda run, n, **how: summed(run, n, 0.5, **how)])
def test_a_repeated_round_counts_again_unless_it_is_the_same_bitwise(path, kind):
    budget = Budget(epsilon=50.0, delta=DELTA, ledger=path)
    charge(path, kind("a", 1, repeatable=True), budget)
    once = spent(path)
    charge(path, kind("a", 1, repeatable=True), budget)
    assert spent(path) == once
    charge(path, kind("b", 1), budget)
    two = spent(path)
    charge(path, kind("b", 1), budget)  # both copies of a copied folder continued
    assert once < two < spent(path)


def test_a_resumed_run_is_charged_for_its_further_rounds_alone(path):
    budget = Budget(epsilon=50.0, delta=DELTA, ledger=path)
    for training in (1, 2, 3):
        charge(path, summed("a", training, 0.4 * training), budget)
    assert spent(path) == pytest.approx(1.2)
    charge(path, summed("a", 4, 1.6), budget)
    assert spent(path) == pytest.approx(1.6)


@pytest.mark.parametrize(
    "other",
    [
        {"unit": PrivacyUnit.RECORD},
        {"relation": NeighboringRelation.REPLACE_ONE, "release": None},
    ],
)
def test_another_unit_or_relation_is_refused_rather_than_total_counts(path, other):
    budget = Budget(epsilon=50.0, delta=DELTA, ledger=path)
    charge(path, sampled("a", 1), budget)
    with pytest.raises(DoesNotCompose, match="keep a separate account for each"):
        charge(path, replace(sampled("b", 1), **other), budget)
    assert len(Ledger.read(path)) == 1


def test_a_run_without_a_guarantee_shows_the_delta_of_its_charges(path):
    nothing = Guarantee(
        unit=PrivacyUnit.CLIENT,
        relation=ADD_OR_REMOVE,
        view=AdversaryView.RELEASED_MODELS,
        epsilon=math.inf,
        delta=1e-4,
        basis="provable",
        accountant="none",
        source="a run that promises nothing",
    )
    budget = Budget(epsilon=math.inf, delta=DELTA, ledger=path)
    charge(path, summed("a", 1, math.inf, claims=[nothing]), budget)
    (run,) = spent_by_run(Ledger.read(path))
    assert (run.epsilon, run.delta) == (math.inf, 1e-4)


def test_what_no_epsilon_covers_is_listed_once_and_counts_nothing(path):
    charge(path, sampled("a", 1), Budget(epsilon=50.0, delta=DELTA, ledger=path))
    once = spent(path)
    for _ in range(2):
        note_disclosure(path, run="p", method="DPDitto", what="a pilot without noise")
    assert spent(path) == once
    assert [(run.what, run.epsilon) for run in spent_by_run(Ledger.read(path))[1:]] == [
        ("a pilot without noise", None)
    ]


def test_a_torn_line_is_forgotten_and_a_changed_one_refused(path):
    budget = Budget(epsilon=50.0, delta=DELTA, ledger=path)
    charge(path, sampled("a", 1), budget)
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"seq": 1, "kind"')
    charge(path, sampled("a", 2), budget)
    assert [entry["training"] for entry in Ledger.read(path)] == [1, 2]
    first, second = path.read_bytes().splitlines()
    entry = json.loads(first)
    path.write_bytes(json.dumps({**entry, "epsilon": 0.0}).encode() + b"\n" + second + b"\n")
    with pytest.raises(LedgerCorrupt, match="line 1"):
        charge(path, sampled("a", 3), budget)
    assert path.stat().st_mode & 0o077 == 0


def _charging(path, run):
    budget = Budget(epsilon=privacy_loss_of({release(): 20}, delta=DELTA).epsilon, delta=DELTA)
    made = 0
    for training in range(1, 16):
        try:
            charge(path, sampled(run, training), budget)
        except BudgetExhausted:
            break
        made += 1
    return made


def test_runs_at_the_same_time_spend_one_budget_together(path):
    with multiprocessing.get_context("fork").Pool(2) as pool:
        made = pool.starmap(_charging, [(path, "a"), (path, "b")])
    assert sum(made) == len(Ledger.read(path)) == 20


def test_nothing_is_released_where_the_charge_cannot_be_written(path, monkeypatch):
    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        charge(path, sampled("a", 1), Budget(epsilon=50.0, delta=DELTA))


def test_a_single_runs_ledger_refuses_the_budget_of_a_population(path, tmp_path):
    with pytest.raises(ValueError, match="a Ledger counts one run"):
        Ledger(tmp_path / "own.jsonl", budget=Budget(epsilon=1.0, delta=DELTA, ledger=path))


def test_a_refusal_names_the_training_round_or_the_answer_to_a_query(path):
    budget = Budget(epsilon=1e-3, delta=DELTA, ledger=path)
    with pytest.raises(BudgetExhausted, match="^training round 1 would raise"):
        charge(path, sampled("a", 1), budget)
    with pytest.raises(BudgetExhausted, match="^answer 1 to histogram would raise"):
        charge(path, sampled("a", 1, query="histogram"), budget)

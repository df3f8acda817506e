"""The report of a run that shares an account with others has one ε for all of them."""

from flower_ext.privacy import (
    AdversaryView,
    Budget,
    FullParticipation,
    Guarantee,
    Ledger,
    NeighboringRelation,
    PrivacyUnit,
    Release,
    epsilon_text,
)
from flower_ext.privacy.shared_ledger import Charge, charge, note_claims, note_disclosure
from flower_ext.privacy.study_composition import study_guarantees
from flower_ext.runs import RunWriter, write_report
from flower_ext.runs.report import account_text
from tests.support.commands import call

DELTA = 1e-6
ADD_OR_REMOVE = NeighboringRelation.ADD_OR_REMOVE_ONE


def claim(view: AdversaryView, epsilon: float, relation=ADD_OR_REMOVE) -> Guarantee:
    return Guarantee(
        unit=PrivacyUnit.USER,
        relation=relation,
        view=view,
        epsilon=epsilon,
        delta=1e-7,
        basis="provable",
        accountant="PLD",
        source="two rounds",
        assumptions=(f"silos add noise for {epsilon}",),
    )


def spend(path, run: str, *claims: Guarantee) -> None:
    release = Release(sampling=FullParticipation(100), noise_multiplier=5.0, relation=ADD_OR_REMOVE)
    new = Charge(
        run=run,
        method="UldpAvg",
        name=run,
        start=run,
        training=1,
        unit=PrivacyUnit.USER,
        population=100,
        relation=ADD_OR_REMOVE,
        epsilon=0.5,
        delta=1e-7,
        release=release,
        claims=claims,
    )
    charge(path, new, Budget(epsilon=3.0, delta=DELTA))
    note_claims(path, claims, run=run, method="UldpAvg", name=run, start=run)


def test_the_table_of_runs_has_a_column_for_each_adversary(tmp_path):
    path = tmp_path / "study.jsonl"
    spend(path, "training", claim(AdversaryView.SUM_ONLY, 0.25))
    (header,) = (line for line in account_text(path).splitlines() if line.startswith("| run |"))
    columns = [cell.strip() for cell in header.split("|")]
    assert sorted(columns[5:-1]) == sorted(f"ε: {view.value}" for view in AdversaryView)


def test_the_last_report_has_all_runs_epsilon_as_the_ledger_does(tmp_path):
    path = tmp_path / "study.jsonl"
    spend(path, "statistics", claim(AdversaryView.SUM_ONLY, 0.25))
    spend(path, "training", claim(AdversaryView.SUM_ONLY, 0.5))
    note_disclosure(path, run="training", method="UldpAvg", name="training", what="a pilot")
    account = {
        "budget-ledger": str(path),
        "population-epsilon": 3.0,
        "population-delta": DELTA,
    }
    run = RunWriter.create(tmp_path / "run", config=account)
    run.finish("completed")
    write_report(run)
    report = (tmp_path / "run" / "report.md").read_text()
    ledger = " ".join(call("ledger", str(path)).output.split())
    for guarantee in study_guarantees(Ledger.read(path), DELTA):
        epsilon = epsilon_text(guarantee.epsilon)
        assert f"**ε = {epsilon}** for one user under add-or-remove-one" in report
        assert f"ε = {epsilon} for one user under add-or-remove-one" in ledger
    # A line that not all runs assume names its run.
    assert "assumes: silos add noise for 0.25 (of statistics)" in report
    assert "not covered: a pilot (training)" in report
    run.close()


def test_a_report_without_an_account_says_nothing_of_a_study(tmp_path):
    run = RunWriter.create(tmp_path / "run", config={"budget-ledger": ""})
    run.finish("completed")
    write_report(run)
    assert "whole study" not in (tmp_path / "run" / "report.md").read_text()
    run.close()


def test_runs_under_other_relations_are_named_and_not_summed(tmp_path):
    path, view = tmp_path / "study.jsonl", AdversaryView.EACH_UPLOAD
    spend(path, "a", claim(view, 0.25))
    spend(path, "b", claim(view, 0.5, NeighboringRelation.REPLACE_SPECIAL))
    spend(path, "c", claim(view, 0.5, NeighboringRelation.REPLACE_SPECIAL))
    study = [each for each in study_guarantees(Ledger.read(path), DELTA) if each.view is view]
    first, second = study
    assert (first.relation, first.epsilon) == (ADD_OR_REMOVE, 0.25)
    assert 0.5 < second.epsilon <= 1.0
    assert "the runs under add-or-remove-one: a" in first.source
    assert "the runs under replace-special: b, c" in second.source

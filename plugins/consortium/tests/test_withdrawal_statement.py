"""A statement about a study's models, for a person that withdrew: what it counts and claims."""

import json
from pathlib import Path

import pytest

from flower_ext.errors import InvalidValue
from flower_ext.privacy import (
    AdversaryView,
    Budget,
    FullParticipation,
    Guarantee,
    Ledger,
    NeighboringRelation,
    PoissonSampling,
    PrivacyUnit,
    Release,
    epsilon_text,
    privacy_loss_of,
    withdrawal,
)
from flower_ext.privacy.accounting.gaussian import gaussian_loss
from flower_ext.privacy.accounting.group_privacy import DpSgd, group_loss
from flower_ext.privacy.shared_ledger import Charge, charge, note_claims, note_disclosure
from flower_ext_consortium import withdrawal_statement
from tests.support.commands import call
from tests.support.grids import grid

DELTA, RELATION = 1e-5, NeighboringRelation.ADD_OR_REMOVE_ONE
USER = PrivacyUnit.USER


def release(sigma=5.0, rate=1.0) -> Release:
    sampling = FullParticipation(100) if rate == 1 else PoissonSampling(100, rate)
    return Release(sampling=sampling, noise_multiplier=sigma, relation=RELATION)


def spend(path: Path, run: str, rounds=1, start=1, unit=USER, **changes) -> None:
    for training in range(start, start + rounds):
        new = {
            "run": run,
            "name": run,
            "method": "UldpAvg",
            "training": training,
            "unit": unit,
            "population": 100,
            "relation": RELATION,
            "epsilon": 1.0,
            "delta": DELTA,
            "release": release(),
        }
        charge(path, Charge(**{**new, **changes}), Budget(epsilon=1e4, delta=DELTA))


@pytest.fixture
def path(tmp_path):
    return tmp_path / "study.jsonl"


def test_a_statement_counts_what_was_charged_before_the_withdrawal_and_nothing_after(path):
    spend(path, "a", rounds=3)
    withdrawal.withdraw(path, USER, [7])
    spend(path, "a", rounds=2, start=4)
    spend(path, "b")
    said = withdrawal_statement.statement(path, USER, [7])
    (line,) = said["runs"]
    expected = gaussian_loss(5.0, releases=3, delta=DELTA).epsilon
    assert (line["name"], line["releases"]) == ("a", 3)
    assert line["epsilon"] == pytest.approx(expected)
    assert said["all runs together"].startswith(f"ε = {epsilon_text(expected)}")


def test_a_run_without_guarantee_has_a_statement_that_claims_nothing(path):
    spend(path, "a")
    note_disclosure(path, run="b", method="FedAvg", name="b", what="training without noise")
    withdrawal.withdraw(path, USER, [7])
    said = withdrawal_statement.statement(path, USER, [7])
    by_run = {line["name"]: line["claim"] for line in said["runs"]}
    assert by_run["b"] == said["all runs together"] == "nothing can be claimed"
    assert by_run["a"].startswith("ε = ")
    assert "training without noise" in said["not claimed"]


def claim(epsilon: float) -> Guarantee:
    return Guarantee(
        unit=USER,
        relation=RELATION,
        view=AdversaryView.RELEASED_MODELS,
        epsilon=epsilon,
        delta=DELTA,
        basis="provable",
        accountant="PLD",
        source="a run",
        assumptions=("silos add noise",),
    )


def test_a_statement_has_the_assumptions_of_each_run(path):
    spend(path, "a", start=1)
    note_claims(path, [claim(0.5)], run="a", method="UldpAvg", name="a", start="")
    withdrawal.withdraw(path, USER, [7])
    assert withdrawal_statement.statement(path, USER, [7])["runs"][0]["assumptions"] == [
        "silos add noise"
    ]


@pytest.mark.parametrize("rate", grid([1.0, 0.1], (1.0).__eq__))
def test_two_numbers_of_one_person_are_a_group_of_two(path, rate):
    spend(path, "a", rounds=20, release=release(rate=rate))
    withdrawal.withdraw(path, USER, [7])
    withdrawal.withdraw(path, USER, [7, 9])
    (line,) = withdrawal_statement.statement(path, USER, [7, 9])["runs"]
    rounds = DpSgd(noise_multiplier=5.0, sampling_rate=rate, steps=20)
    assert line["epsilon"] == pytest.approx(group_loss(rounds, group_size=2, delta=DELTA).epsilon)
    assert line["epsilon"] > 1.5 * privacy_loss_of({release(rate=rate): 20}, delta=DELTA).epsilon
    assert len([e for e in Ledger.read(path) if e["kind"] == "withdrawn"]) == 2


def test_clients_in_a_study_of_records_get_no_claim_for_all_records(path):
    spend(path, "a", unit=PrivacyUnit.RECORD)
    withdrawal.withdraw(path, PrivacyUnit.CLIENT, [3])
    said = withdrawal_statement.statement(path, PrivacyUnit.CLIENT, [3])
    assert said["runs"][0]["claim"].startswith("nothing can be claimed")
    assert said["all runs together"] == "nothing can be claimed"


def test_a_statement_is_not_verified_without_a_public_key(tmp_path):
    (file := tmp_path / "statement.json").write_text('{"public key": "00"}')
    refused = call("withdraw", "--verify", str(file))
    assert refused.exit_code == 2
    assert "--public-key is missing" in " ".join(refused.stderr.split())


def test_only_a_withdrawn_person_gets_a_statement(path):
    spend(path, "a")
    with pytest.raises(InvalidValue, match="user=7 has not withdrawn"):
        withdrawal_statement.statement(path, USER, [7])


def test_the_command_line_verifies_a_signed_statement_and_refuses_a_changed_one(path):
    spend(path, "a")
    file = path.with_name("statement.json")
    done = call("withdraw", "--user", "7", "--ledger", str(path), "-o", str(file))
    assert done.exit_code == 0, done.output
    said = json.loads(file.read_text())
    assert "unlearn" not in file.read_text() + done.output
    key = said["public key"]
    assert key in "".join(done.output.split())
    good = call("withdraw", "--verify", str(file), "--public-key", key)
    assert "The signature holds" in good.output
    assert call("ledger", str(path)).exit_code == 0
    other = call("withdraw", "--verify", str(file), "--public-key", "00" * 32)
    assert other.exit_code == 2
    assert "another key" in " ".join(other.stderr.split())
    said["runs"][0]["epsilon"] /= 2
    file.write_text(json.dumps(said))
    changed = call("withdraw", "--verify", str(file), "--public-key", key)
    assert changed.exit_code == 2
    assert "signature" in changed.stderr
    for text in ("[]", "no JSON"):
        file.write_text(text)
        unreadable = call("withdraw", "--verify", str(file), "--public-key", key)
        assert unreadable.exit_code == 2
        assert "expected a statement" in " ".join(unreadable.stderr.split())
    assert path.with_name("study.jsonl.key").stat().st_mode & 0o077 == 0
    again = call("withdraw", "--user", "7", "--ledger", str(path), "-o", str(file))
    assert json.loads(file.read_text())["public key"] == key
    assert again.exit_code == 0


@pytest.mark.parametrize(
    ("unit", "options"),
    [(USER, ["--user", "0"]), (PrivacyUnit.CLIENT, ["--client", "0"])],
)
def test_number_0_withdraws_only_if_it_is_given(path, unit, options):
    spend(path, "a", unit=unit)
    for wrong in ([], ["--user", "0", "--client", "0"]):
        refused = call("withdraw", "--ledger", str(path), *wrong)
        assert refused.exit_code == 2
        assert "either --user or --client" in " ".join(refused.stderr.split())
        assert withdrawal.withdrawn(Ledger.read(path)) == set()
    assert call("withdraw", "--ledger", str(path), *options).exit_code == 0
    assert withdrawal.withdrawn(Ledger.read(path)) == {0}

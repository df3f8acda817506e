"""The verdict as JSON, which CI reads, and as the report of the command."""

from dataclasses import fields

import pytest

from flower_ext.runs.page import to_markdown
from flower_ext_check.claims import Claim
from flower_ext_check.findings import Finding
from flower_ext_check.measured import MeasuredEpsilon
from flower_ext_check.verdict import ConditionalEpsilon, JudgedClaim, ProvableEpsilon, Verdict

CLAIM = Claim(source="setting epsilon", epsilon=8.0, delta=1e-5, rounds=5)
FINDING = Finding(code="no-noise", text="no noise", remedy="add it", refutes=True, place="a.py:3")


@pytest.fixture
def verdict():
    """Return a function that makes a verdict with changed fields."""

    def make(**changes):
        values = {
            "strategies": ["FedAvg (flwr)"],
            "mods": [],
            "protection": "clip 1, noise 2 in each upload",
            "rounds": 2,
            "planned_rounds": 5,
            "clients": 6,
            "provable": [ProvableEpsilon(unit="client", epsilon=8.0, delta=1e-5, text="proved")],
            "measured": None,
            "unmeasured": "",
            "conditional": None,
            "claims": [JudgedClaim(claim=CLAIM, provable=True)],
            "findings": [],
            "messages": [],
            "diff": "",
        }
        return Verdict(**{**values, **changes})

    return make


def test_the_json_has_every_field_under_its_name(verdict):
    written = verdict().to_dict()
    assert written.keys() == {field.name for field in fields(Verdict)} | {"unproven"}
    assert written["conditional"] == {}
    assert written["measured"] is None
    assert written["provable"][0]["epsilon"] == 8.0
    assert written["claims"] == [
        {"source": "setting epsilon", "epsilon": 8.0, "delta": 1e-5, "rounds": 5, "provable": True}
    ]


def test_a_verdict_is_unproven_if_any_claim_is(verdict):
    failed = JudgedClaim(claim=CLAIM, provable=False)
    assert not verdict().unproven
    assert not verdict(claims=[], findings=[FINDING]).unproven
    assert verdict(claims=[JudgedClaim(claim=CLAIM, provable=True), failed]).unproven


def test_the_report_shows_what_the_json_has(verdict):
    measured = MeasuredEpsilon(epsilon=9.0, low=8.5, high=9.5, stated=8.0, text="noise of 1")
    conditional = ConditionalEpsilon(delta=1e-5, one_release=3.25, all_rounds=7.5)
    written = verdict(measured=measured, conditional=conditional, findings=[FINDING]).to_dict()
    assert written["conditional"] == {"delta": 1e-5, "one release": 3.25, "all rounds": 7.5}
    assert written["measured"]["agrees"] is False
    report = to_markdown("check", "flower_ext_check", **written)
    for text in ("CONTRADICTS the app's 8", "3.25 for one release and 7.5 for 5", "a.py:3: add it"):
        assert text in report

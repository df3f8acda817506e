"""Studies: the settings of their stages, and the account that the stages share."""

import pytest

from flower_ext.errors import InvalidValue
from flower_ext_consortium.commands.study import Study

FILE = """
app = "../app"

[settings]
epsilon = 1.0
population-epsilon = 3.0
population-delta = 1e-7
data-folder = "tables"

[[stage]]
name = "first"
settings = { epsilon = 0.5 }

[[stage]]
name = "second"
uses = ["first/scales.toml"]
settings = { rounds = 9 }
"""


BUDGET = "population-epsilon = 3.0\npopulation-delta = 1e-7\n"
DEFAULTS = {"population-epsilon": 0.0, "population-delta": 0.0, "budget-ledger": ""}
"""Settings of an app that can keep an account."""


@pytest.fixture
def read(tmp_path):
    """Return a function that reads a study with changes to its file."""

    def reading(*changes):
        text = FILE
        for old, new in changes:
            assert old in text
            text = text.replace(old, new)
        (tmp_path / "study.toml").write_text(text)
        return Study.read(tmp_path / "study.toml")

    return reading


@pytest.fixture
def study(read):
    return read()


def test_stages_share_an_account_and_override_the_settings_of_the_study(study, tmp_path):
    folder = tmp_path / "runs"
    account = study.account(folder, DEFAULTS)
    assert study.settings_of(study.stage[0], folder, account) == {
        "run-directory": str(folder / "first"),
        "budget-ledger": str(folder / "account.jsonl"),
        "data-folder": str(tmp_path / "tables"),
        "epsilon": 0.5,
        "population-epsilon": 3.0,
        "population-delta": 1e-7,
    }


def in_stage(*settings):
    """Return a change that adds settings to the first stage."""
    return ("{ epsilon = 0.5 }", "{ " + ", ".join(("epsilon = 0.5", *settings)) + " }")


def test_a_budget_in_one_stage_holds_for_all_stages(read, study, tmp_path):
    same = read((BUDGET, ""), in_stage("population-epsilon = 3", "population-delta = 1e-7"))
    assert same.account(tmp_path, DEFAULTS) == study.account(tmp_path, DEFAULTS)
    (tmp_path / "first").mkdir()
    (tmp_path / "first" / "scales.toml").write_text("[settings]\npopulation-epsilon = 9\n")
    for stage in same.stage:
        settings = same.settings_of(stage, tmp_path, same.account(tmp_path, DEFAULTS))
        assert settings["budget-ledger"] == str(tmp_path / "account.jsonl")
        assert settings["population-epsilon"] == 3


def test_a_study_keeps_the_account_that_its_settings_name(read, tmp_path):
    study = read((BUDGET, BUDGET + 'budget-ledger = "/data/account.jsonl"\n'))
    account = study.account(tmp_path, DEFAULTS)
    assert account["budget-ledger"] == "/data/account.jsonl"
    assert read((BUDGET, BUDGET + 'budget-ledger = ""\n')).account(tmp_path, DEFAULTS)[
        "budget-ledger"
    ] == str(tmp_path / "account.jsonl")


def test_a_stage_may_have_a_separate_account(read, tmp_path):
    lines = ('budget-ledger = "/data/a.jsonl"', "population-epsilon = 9")
    study = read(in_stage(*lines))
    account = study.account(tmp_path, DEFAULTS)
    assert account["population-epsilon"] == 3
    settings = study.settings_of(study.stage[0], tmp_path, account)
    assert settings["budget-ledger"] == "/data/a.jsonl"
    assert settings["population-epsilon"] == 9


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ([(BUDGET, "")], r"no population-epsilon.* = 0, the stages share no account"),
        ([(BUDGET, 'budget-ledger = "/a"\n')], "no population-epsilon"),
        ([in_stage("population-epsilon = 2")], r"3\.0 in \[settings\], 2 in stage first: .* one"),
        ([in_stage("population-epsilon = 0")], r"3\.0 in \[settings\], 0 in stage first"),
        ([in_stage("population-delta = 1e-5")], "population-delta is 1e-07 in "),
        ([("population-delta = 1e-7\n", "")], "expected population-delta > 0"),
    ],
)
def test_stages_without_one_common_budget_are_refused(read, tmp_path, changes, message):
    with pytest.raises(InvalidValue, match=message):
        read(*changes).account(tmp_path, DEFAULTS)


def test_stages_share_no_account_if_the_file_or_the_app_has_none(read, tmp_path):
    assert read((BUDGET, "population-epsilon = 0\n")).account(tmp_path, DEFAULTS) == {}
    assert read((BUDGET, "")).account(tmp_path, {}) == {}
    defaults = {"population-epsilon": 2.0, "population-delta": 1e-6}
    assert read((BUDGET, "")).account(tmp_path, defaults) == {
        "budget-ledger": str(tmp_path / "account.jsonl"),
        **defaults,
    }


def test_a_stage_uses_the_files_that_earlier_stages_wrote(study, tmp_path):
    second = study.stage[1]
    with pytest.raises(InvalidValue, match="no earlier stage has written"):
        study.settings_of(second, tmp_path, {})
    (tmp_path / "first").mkdir()
    (tmp_path / "first" / "scales.toml").write_text("[settings]\nscale = 2\nrounds = 1\n")
    settings = study.settings_of(second, tmp_path, {})
    assert (settings["scale"], settings["rounds"], settings["epsilon"]) == (2, 9, 1.0)


def test_two_stages_of_one_name_are_refused(tmp_path):
    (tmp_path / "study.toml").write_text(FILE.replace('"second"', '"first"'))
    with pytest.raises(InvalidValue, match="each with a different name"):
        Study.read(tmp_path / "study.toml")

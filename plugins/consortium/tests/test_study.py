"""Studies: the settings of their stages."""

import pytest

from flower_ext.errors import InvalidValue
from flower_ext_consortium.commands.study import Study

FILE = """
app = "../app"

[settings]
epsilon = 1.0
population-epsilon = 3.0
data-folder = "tables"

[[stage]]
name = "first"
settings = { epsilon = 0.5 }

[[stage]]
name = "second"
uses = ["first/scales.toml"]
settings = { rounds = 9 }
"""


@pytest.fixture
def study(tmp_path):
    (tmp_path / "study.toml").write_text(FILE)
    return Study.read(tmp_path / "study.toml")


def test_stages_share_an_account_and_override_the_settings_of_the_study(study, tmp_path):
    folder = tmp_path / "runs"
    assert study.settings_of(study.stage[0], folder) == {
        "run-directory": str(folder / "first"),
        "budget-ledger": str(folder / "account.jsonl"),
        "data-folder": str(tmp_path / "tables"),
        "epsilon": 0.5,
        "population-epsilon": 3.0,
    }


def test_a_stage_uses_the_files_that_earlier_stages_wrote(study, tmp_path):
    second = study.stage[1]
    with pytest.raises(InvalidValue, match="no earlier stage has written"):
        study.settings_of(second, tmp_path)
    (tmp_path / "first").mkdir()
    (tmp_path / "first" / "scales.toml").write_text("[settings]\nscale = 2\nrounds = 1\n")
    settings = study.settings_of(second, tmp_path)
    assert (settings["scale"], settings["rounds"], settings["epsilon"]) == (2, 9, 1.0)


def test_two_stages_of_one_name_are_refused(tmp_path):
    (tmp_path / "study.toml").write_text(FILE.replace('"second"', '"first"'))
    with pytest.raises(InvalidValue, match="each with a different name"):
        Study.read(tmp_path / "study.toml")

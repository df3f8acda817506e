"""The program for a run in one process reports why the run ended."""

from io import StringIO

import pytest

from flower_ext.data import DataNotFound
from flower_ext.federation import FederationNotReady
from flower_ext.federation.engines import run_app as module
from flower_ext.files import InUse
from flower_ext.privacy import LedgerCorrupt
from flower_ext.runs import NotARun
from flower_ext.runs.settings import UnfitSetting
from flower_ext.training import Proximal


def ended_by(error: BaseException, monkeypatch) -> object:
    def fail(*_, **__):
        raise error

    return ended(fail, monkeypatch)


def ended(fail, monkeypatch) -> object:
    """Return the exit status of a process whose run fails."""
    monkeypatch.setattr(module, "run_app", fail)
    monkeypatch.setattr(module.sys, "argv", ["run_app", "somewhere", "1", "3"])
    monkeypatch.setattr(module.sys, "stdin", StringIO("{}"))
    with pytest.raises(SystemExit) as end:
        module.main()
    return end.value.code


@pytest.mark.parametrize(
    "kind", [UnfitSetting, NotARun, DataNotFound, InUse, LedgerCorrupt, FederationNotReady]
)
def test_errors_that_a_user_can_fix_take_one_line(kind, monkeypatch):
    assert ended_by(kind("do this"), monkeypatch) == "Error: do this"


def test_ctrl_c_is_no_error_to_look_into(monkeypatch):
    assert ended_by(KeyboardInterrupt(), monkeypatch) == "Error: interrupted"


def test_other_errors_show_where_they_were_found(monkeypatch):
    with pytest.raises(ZeroDivisionError):
        ended_by(ZeroDivisionError(), monkeypatch)


def test_a_value_that_this_package_refuses_is_one_line(monkeypatch):
    def run(*_, **__):
        Proximal(anchor={}, weight=-1.0)

    line = ended(run, monkeypatch)
    assert line.startswith("Error: weight=-1.0: ")
    assert "\n" not in line


def test_an_error_of_another_library_shows_its_place(monkeypatch):
    """Its message is not written for users, so the traceback is needed."""
    monkeypatch.setattr(module.sys, "argv", ["run_app", "somewhere", "seven", "3"])
    monkeypatch.setattr(module.sys, "stdin", StringIO("{}"))
    with pytest.raises(ValueError, match="invalid literal"):
        module.main()


def test_a_value_that_another_library_refuses_shows_its_place(monkeypatch):
    with pytest.raises(ValueError, match="of an app"):
        ended_by(ValueError("of an app"), monkeypatch)

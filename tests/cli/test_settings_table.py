"""The table that lists an app's settings, with their types, choices and meanings."""

import tomllib
from importlib import import_module
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flower_ext.cli.main import app
from flower_ext.cli.settings_table import rows_of
from flower_ext.runs.app_settings import checked_settings
from tests.support.apps import APPS

FOLDERS = sorted(path.parent for path in APPS.glob("*/pyproject.toml"))
HEAD = "[tool.flwr.app.config]\n"


def call(*arguments: object):
    return CliRunner().invoke(app, ["settings", *map(str, arguments)], env={"COLUMNS": "200"})


def project(folder: Path, text: str) -> Path:
    (folder / "pyproject.toml").write_text(text)
    return folder


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_every_setting_of_an_app_says_what_it_means(folder):
    rows = rows_of(folder)
    assert [name for name, (_, _, meaning) in rows.items() if not meaning] == []


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_an_app_declares_every_default_and_needs_no_other_setting(folder, monkeypatch):
    defaults, _ = checked_settings(folder, ())
    named = tomllib.loads((folder / "pyproject.toml").read_text())["tool"]["flower-ext"]["app"]
    module, _, kind = named["settings"].partition(":")
    monkeypatch.syspath_prepend(str(folder))
    settings = getattr(import_module(module), kind)
    assert settings.of(defaults).rounds == defaults["rounds"]


def test_the_settings_of_any_flower_app_have_the_types_of_their_defaults(tmp_path):
    text = HEAD + 'drawn = "by #1"\nrounds = 3\nnoise = true\n\n[tool.other]\nrounds = 4\n'
    rows = rows_of(project(tmp_path, text))
    assert list(rows) == ["drawn", "rounds", "noise"]
    assert rows["drawn"] == ("by #1", "", "")
    assert rows["noise"] == ("true", "true | false", "")
    shown = call(tmp_path)
    assert shown.exit_code == 0
    for word in ("drawn", "by #1", "rounds", "true | false"):
        assert word in shown.output


DECLARED = """from dataclasses import dataclass
from typing import Literal
from flower_ext.runs.settings import Settings as Base, setting

@dataclass(frozen=True, kw_only=True)
class Settings(Base):
    x: Literal["one", "two"] = setting("{meaning} [of some]")
    y: float = setting("half", default=0.5)
"""


def declaring(folder: Path, config: str, meaning: str) -> Path:
    (folder / "package").mkdir(parents=True)
    (folder / "package" / "settings.py").write_text(DECLARED.replace("{meaning}", meaning))
    named = '[tool.flower-ext.app]\nsettings = "package.settings:Settings"\n'
    return project(folder, f"{named}{HEAD}{config}")


def test_a_class_of_settings_tells_choices_and_meanings(tmp_path):
    folder = declaring(tmp_path / "a", 'x = "one"\n', "first")
    assert rows_of(folder) == {"x": ("one", "one | two", "first [of some]")}
    assert "first [of some]" in call(folder).output


def test_a_class_that_is_not_there_is_refused_by_name(tmp_path):
    named = '[tool.flower-ext.app]\nsettings = "nowhere.settings:Settings"\n'
    done = call(project(tmp_path, f"{named}{HEAD}x = 1\n"))
    assert done.exit_code == 2
    assert "nowhere.settings:Settings" in done.output


def test_a_folder_without_settings_is_refused(tmp_path):
    done = call(project(tmp_path, "[project]\n"))
    assert done.exit_code == 2
    assert "add [tool.flwr.app.config]" in done.output

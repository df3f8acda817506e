from pathlib import Path

import pytest
from typer.testing import CliRunner

from flower_ext.cli.main import app
from flower_ext.cli.settings import settings_of
from tests.support.apps import APPS

DOCUMENTED = APPS.parent / "docs" / "settings.md"
FOLDERS = sorted(path.parent for path in APPS.glob("*/pyproject.toml"))
HEAD = "[tool.flwr.app.config]\n"


def call(*arguments: object):
    return CliRunner().invoke(app, ["settings", *map(str, arguments)], env={"COLUMNS": "200"})


def project(folder: Path, text: str) -> Path:
    (folder / "pyproject.toml").write_text(text)
    return folder


def test_the_table_in_docs_is_what_the_apps_say(tmp_path):
    assert call(*FOLDERS, "--markdown", tmp_path / "now.md").exit_code == 0
    assert (tmp_path / "now.md").read_text() == DOCUMENTED.read_text(), (
        "docs/settings.md is stale: run flower-ext settings apps/* --markdown docs/settings.md"
    )


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_every_setting_of_an_app_says_what_it_means(folder):
    silent = [name for name, row in settings_of(folder).items() if not (row.choices or row.meaning)]
    assert not silent, f"{folder}/pyproject.toml: add a comment behind {', '.join(silent)}"


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_a_default_is_among_the_choices(folder):
    rows = settings_of(folder).values()
    assert all(row.default in row.choices.split(" | ") for row in rows if row.choices)
    assert any(row.choices for row in rows)


def test_a_comment_is_read_as_choices_and_meaning_over_several_lines(tmp_path):
    text = (
        '[project]\nname = "toy" # no setting\n\n' + HEAD + "# A heading\n"
        'drawn = "by #1"  # one | two-2\n'
        "                 # | three: of [some] 4 | 5\n"
        "rounds = 3\n"
        "noise = true # added\n\n[tool.other]\nrounds = 4 # elsewhere\n"
    )
    rows = settings_of(project(tmp_path, text))
    assert list(rows) == ["drawn", "rounds", "noise"]
    assert rows["drawn"].default == "by #1"
    assert rows["drawn"].choices == "one | two-2 | three"
    assert rows["drawn"].meaning == "of [some] 4 | 5"
    assert (rows["rounds"].default, rows["rounds"].meaning) == ("3", "")
    assert (rows["noise"].choices, rows["noise"].meaning) == ("true | false", "added")
    shown = call(tmp_path)
    assert shown.exit_code == 0
    for word in ("drawn", "by #1", "one | two-2 | three", "of [some] 4 | 5", "true | false"):
        assert word in shown.output


def test_what_differs_between_apps_is_told_of_each(tmp_path):
    for name, text in (("a", "x = 1 # first"), ("b", "x = 2 # second"), ("c", "x = 2 # first")):
        (tmp_path / name).mkdir()
        project(tmp_path / name, f"{HEAD}{text}\n")
    project(tmp_path / "c", f"{HEAD}x = 2 # first\ny = 0.5 # half\n")
    table = tmp_path / "table.md"
    assert call(*(tmp_path / name for name in "cab"), "--markdown", table).exit_code == 0
    assert table.read_text().splitlines()[-2:] == [
        "| `x` | `1` | `2` | `2` |  | *a, c*: first<br>*b*: second |",
        "| `y` | – | – | `0.5` |  | half |",
    ]


def test_a_folder_without_settings_is_refused(tmp_path):
    done = call(project(tmp_path, "[project]\n"))
    assert done.exit_code == 2
    assert "add [tool.flwr.app.config]" in done.output

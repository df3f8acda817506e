"""New apps copied from those of the package, in a checkout and in a wheel."""

import re
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flower_ext.cli.main import app
from flower_ext.cli.new import copy, templates
from flower_ext.federation import run_in_process
from flower_ext.federation.engines.run_app import load_app
from flower_ext.runs import RunDirectory
from tests.support.apps import APPS, DP2_FEDSAM

FOLDERS = sorted(path.parent for path in APPS.glob("*/pyproject.toml"))
every_app = pytest.mark.parametrize("template", FOLDERS, ids=lambda folder: folder.name)


def call(*arguments: object):
    return CliRunner().invoke(app, ["new", *map(str, arguments)], env={"COLUMNS": "200"})


def project(folder: Path):
    return tomllib.loads((folder / "pyproject.toml").read_text())


def flattened(text: str) -> str:
    return " ".join(text.replace("│", " ").split())


def test_the_apps_of_the_checkout_are_those_that_new_knows():
    assert templates() == {folder.name: folder for folder in FOLDERS}
    assert len(FOLDERS) >= 5


@pytest.mark.parametrize(("arguments", "code"), [([], 0), (["dp3-fedsam", "mine"], 2)])
def test_without_an_existing_app_name_each_app_is_listed(arguments, code, tmp_path):
    arguments = [*arguments[:1], *(tmp_path / name for name in arguments[1:])]
    done = call(*arguments)
    assert done.exit_code == code
    lines = done.stdout.splitlines()
    for folder in FOLDERS:
        words = f"{folder.name} {project(folder)['project']['description']}"
        assert words in [flattened(line) for line in lines]
    assert list(tmp_path.iterdir()) == []


@every_app
def test_the_copy_has_the_users_name_and_the_settings_of_the_app(template, tmp_path):
    made = tmp_path / "below" / "my-app"
    done = call(template.name, made)
    assert done.exit_code == 0, done.output
    ours, theirs = project(template), project(made)
    assert theirs["project"] == {**ours["project"], "name": "my-app"}
    app_table, former = theirs["tool"]["flwr"]["app"], ours["tool"]["flwr"]["app"]
    assert app_table["config"] == former["config"]
    assert app_table["components"] == {
        "serverapp": "my_app.server_app:app",
        "clientapp": "my_app.client_app:app",
    }
    modules = {path.stem for path in (made / "my_app").glob("*.py")}
    imported = "".join(path.read_text() for path in (made / "my_app").glob("*.py"))
    assert {"server_app", "client_app", *re.findall(r"my_app\.(\w+)", imported)} <= modules


@every_app
def test_the_copy_does_not_mention_the_place_of_the_app(template, tmp_path):
    made = tmp_path / "my-app"
    copy(template, made)
    was = next(path.parent.name for path in template.glob("*/client_app.py"))
    files = [path for path in made.rglob("*") if path.is_file()]
    text = "\n".join(f"{path}\n{path.read_text()}" for path in files)
    assert not re.findall(rf"\b{was}\b|apps/|\]\(\.\./", text)
    names = {path.relative_to(template).as_posix() for path in template.rglob("*")}
    mine = {path.relative_to(made).as_posix() for path in made.rglob("*")}
    assert mine == {
        n.replace(was, "my_app") for n in names if not re.search("__pycache__|^runs", n)
    }


def test_results_of_runs_are_not_copied(tmp_path):
    template = tmp_path / "template"
    copy(DP2_FEDSAM.folder, template)
    (template / "runs" / "first").mkdir(parents=True)
    (template / "runs" / "first" / "model.safetensors").write_bytes(b"\xff")
    copy(template, tmp_path / "my-app")
    assert not (tmp_path / "my-app" / "runs").exists()


def test_a_folder_that_is_there_is_refused_and_left_alone(tmp_path):
    (made := tmp_path / "mine").mkdir()
    (made / "notes.md").write_text("mine")
    done = call("dp2-fedsam", made)
    assert done.exit_code == 2
    assert "does not exist yet" in flattened(done.output)
    assert [path.name for path in made.iterdir()] == ["notes.md"]


@pytest.mark.parametrize(
    "name", ["my_app", "1st", "an-app-", "a" * 33, "ä", "json", "Torch", "flower-ext", "class"]
)
def test_a_name_that_flower_or_python_would_not_take_is_refused(name, tmp_path):
    done = call("dp2-fedsam", tmp_path / name)
    assert done.exit_code == 2
    assert "expected a name" in flattened(done.output)
    assert list(tmp_path.iterdir()) == []


def test_a_new_app_trains_as_the_app_that_it_came_from(tmp_path):
    made = tmp_path / "trained-like"
    copy(DP2_FEDSAM.folder, made)
    rounds = []
    for name, folder in (("ours", DP2_FEDSAM.folder), ("theirs", made)):
        config = {**DP2_FEDSAM.small_config(), "run-directory": str(tmp_path / name)}
        server, client = load_app(folder)
        run_in_process(server, client, num_clients=config["clients"], run_config=config)
        rounds.append(RunDirectory.open(tmp_path / name).metrics())
    accuracies = [[row["accuracy_mean"] for row in one] for one in rounds]
    assert accuracies[0] == accuracies[1]

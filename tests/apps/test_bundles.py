"""Every app as a bundle (FAB) of Flower's own tools, installed and run in another folder."""

import subprocess
import sys
import tomllib
from contextlib import chdir
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flower_ext.cli.new import copy, templates
from flower_ext.runs import RunDirectory

LARGEST = 10 * 1024**2
"""Largest size in bytes that Flower Hub accepts."""


def flwr(home: Path, *arguments: object) -> str:
    """Run a command of Flower in this process, which must succeed; return its output."""
    (command,) = entry_points(group="console_scripts", name="flwr")
    with chdir(home):
        done = CliRunner().invoke(
            command.load(),
            [*map(str, arguments)],
            env={
                "FLWR_HOME": str(home / "flwr"),
                "FLWR_TELEMETRY_ENABLED": "0",
                "FLWR_DISABLE_UPDATE_CHECK": "1",
            },
        )
    assert done.exit_code == 0, done.output
    return done.output


def bundled(app: Path, home: Path) -> Path:
    """Return the FAB that ``flwr build`` makes of an app."""
    output = flwr(home, "build", "--app", app)
    assert "missing" not in output
    (made,) = home.glob("*.fab")
    return made


def installed(bundle: Path, home: Path) -> Path:
    """Return the folder into which ``flwr install`` puts a bundle."""
    flwr(home, "install", bundle)
    (project,) = (home / "flwr").rglob("pyproject.toml")
    return project.parent


@pytest.mark.parametrize("app", templates().values(), ids=list(templates()))
def test_flower_bundles_each_app_in_its_present_format_and_puts_it_up(app, tmp_path):
    bundle = bundled(app, tmp_path)
    assert bundle.stat().st_size <= LARGEST
    installed_app = installed(bundle, tmp_path)
    facts, ours = (
        tomllib.loads((folder / "pyproject.toml").read_text()) for folder in (installed_app, app)
    )
    assert facts == ours
    assert facts["project"]["name"] == app.name
    assert facts["tool"]["flwr"]["app"]["fab-format-version"] == 1
    for source in [*app.rglob("*.py"), app / "LICENSE"]:
        assert (installed_app / source.relative_to(app)).read_bytes() == source.read_bytes()


def test_every_app_has_the_licence_of_the_package():
    ours = (Path(__file__).parents[2] / "LICENSE").read_bytes()
    assert all((app / "LICENSE").read_bytes() == ours for app in templates().values())


def test_flower_bundles_an_app_of_the_user(tmp_path):
    copy(templates()["uldp-fl"], tmp_path / "made-app")
    assert ".made-app." in bundled(tmp_path / "made-app", tmp_path).name


@pytest.mark.full
def test_a_bundle_runs_where_it_was_put_up(tmp_path):
    folder = installed(bundled(templates()["dp2-fedsam"], tmp_path), tmp_path)
    small = ["--in-process", "--clients", "4", "--set", "rounds=1", "--set", "partition=iid"]
    done = subprocess.run(
        [sys.executable, "-m", "flower_ext.cli.main", "run", ".", *small, "--runs", "made"],
        capture_output=True,
        text=True,
        cwd=folder,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (run,) = (folder / "made").iterdir()
    assert RunDirectory.open(run).status == "completed"
    assert (run / "report.html").is_file()

"""The wheel, built from the source distribution as in a release, works without this checkout."""

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from flower_ext.runs import RunDirectory

pytestmark = pytest.mark.full

CHECKOUT = Path(__file__).parents[1]
FLOWER_EXT = "import sys; from flower_ext.cli.main import main; sys.exit(main())"


def built(folder: Path, target: str, output: Path) -> Path:
    """Return the one file that the build backend makes of a project."""
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "--target", target, "--directory", output],
        cwd=folder,
        check=True,
        capture_output=True,
    )
    (made,) = output.iterdir()
    return made


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """Return a folder with the contents of a wheel and nothing else."""
    work = tmp_path_factory.mktemp("release")
    with tarfile.open(built(CHECKOUT, "sdist", work / "sdist")) as archive:
        archive.extractall(work / "source", filter="data")
    (source,) = (work / "source").iterdir()
    with zipfile.ZipFile(built(source, "wheel", work / "wheel")) as archive:
        archive.extractall(work / "installed")
    return work / "installed"


def python(installed: Path, folder: Path, *arguments: object) -> str:
    """Return the output of a Python process that finds the wheel's files before all others."""
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_wheel_holds_every_module_and_every_file_of_the_apps(installed):
    listing = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    tracked = subprocess.run(
        [*listing, "flower_ext", "apps"], cwd=CHECKOUT, capture_output=True, text=True
    ).stdout.split()
    if not tracked:
        pytest.skip("no checkout of Git: nothing says which files there should be")
    templates = "flower_ext/cli/templates/"
    expected = {name.replace("apps/", templates, 1) for name in tracked}
    installed_files = {str(p.relative_to(installed)) for p in installed.rglob("*") if p.is_file()}
    assert len(expected) > 200
    assert expected <= installed_files
    assert all(name in expected or ".dist-info/" in name for name in installed_files)


@pytest.mark.parametrize("project", [*CHECKOUT.glob("plugins/*/pyproject.toml")], ids=str)
def test_the_wheel_of_a_plugin_holds_every_file_of_its_package(project, tmp_path):
    folder = project.parent
    (package,) = folder.glob("flower_ext_*")
    expected = {
        str(path.relative_to(folder))
        for path in package.rglob("*")
        if path.is_file() and path.parent.name != "__pycache__"
    }
    with zipfile.ZipFile(built(folder, "wheel", tmp_path)) as archive:
        assert expected - {*archive.namelist()} == set()


def test_an_app_made_from_the_wheel_runs_away_from_the_checkout(installed, tmp_path):
    where = python(installed, tmp_path, "-c", "import flower_ext; print(flower_ext.__file__)")
    assert Path(where.strip()).is_relative_to(installed)
    python(installed, tmp_path, "-c", FLOWER_EXT, "new", "dp2-fedsam", "my-app")
    small = ["--set", "rounds=2", "--set", "evaluate-every=0"]
    python(
        installed,
        tmp_path / "my-app",
        "-c",
        FLOWER_EXT,
        "run",
        ".",
        "--in-process",
        "--clients",
        "12",
        *small,
    )
    (path,) = (tmp_path / "my-app" / "runs").iterdir()
    run = RunDirectory.open(path)
    assert run.status == "completed"
    assert [g.basis for g in run.guarantees()].count("provable") == 3
    assert (path / "report.html").exists()

"""``flower-ext check`` as a newcomer types it."""

import json
import zipfile
from pathlib import Path

from check_apps import PUBLIC, write_app
from click.testing import Result

from tests.support.commands import call


def _typed(*words: object) -> Result:
    """Type the command in this process; the app runs in a process of the command."""
    return call("check", *map(str, words))


def test_a_fab_with_an_unprovable_claim_exits_with_3_and_json(tmp_path):
    app = write_app(tmp_path / "flip", **PUBLIC["flip"])
    with zipfile.ZipFile(fab := tmp_path / "flip.fab", "w") as archive:
        for path in app.rglob("*.*"):
            archive.write(path, path.relative_to(app))
    done = _typed(fab, "--clients", 4, "--rounds", 1, "--json")
    assert done.exit_code == 3, done.stderr
    result = json.loads(done.stdout)
    assert result["unproven"]
    assert (result["clients"], result["rounds"], result["planned_rounds"]) == (4, 1, 5)


def test_a_folder_without_an_app_exits_with_status_2(tmp_path):
    done = _typed(tmp_path)
    assert done.exit_code == 2
    assert "pyproject.toml" in done.stderr


def test_an_app_that_fails_exits_with_1_and_keeps_its_folder(tmp_path):
    app = write_app(tmp_path / "raising", server_code="open('made', 'w')\nraise OSError('private')")
    before = sorted(app.rglob("*"))
    done = _typed(app, "--log", log := tmp_path / "log")
    assert done.exit_code == 1
    assert "OSError at somebodys/server_app.py" in done.stderr
    assert "private" not in done.stderr
    assert "private" in Path(log).read_text()
    assert sorted(app.rglob("*")) == before

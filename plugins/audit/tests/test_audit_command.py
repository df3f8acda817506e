"""``flower-ext audit``: its output, its files and its exit status."""

import json
import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flower_ext.cli import main
from flower_ext.errors import InvalidValue
from flower_ext_audit import command

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
PROJECT = tomllib.loads((HERE.parent / "pyproject.toml").read_text())["project"]


def flower_ext(*arguments, cwd=HERE):
    env = {**os.environ, "COLUMNS": "200"}
    return subprocess.run(
        [sys.executable, "-m", "flower_ext.cli.main", "audit", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        env=env,
        cwd=cwd,
    )


@pytest.mark.full
def test_a_foreign_strategy_is_flagged_only_if_its_noise_is_too_small(tmp_path):
    status = {}
    for target in ("wrong", "experiment"):
        done = flower_ext(
            f"foreign_experiment:{target}",
            *("--trials", 200, "--confidence", 0.9999, "--output", tmp_path / target),
        )
        summary = json.loads((tmp_path / target / "audit.json").read_text())
        status[target] = (done.returncode, summary["broken"], "EXCEEDED" in done.stdout)
        (view,) = summary["views"]
        assert view["view"] == "released-models"
        assert view["ratio"] == view["lower_bound"] / view["reported_epsilon"]
        assert summary["joint_confidence"] == 0.9999
    assert status == {"wrong": (1, True, True), "experiment": (0, False, False)}


@pytest.mark.full
def test_the_example_of_the_guide_runs_and_its_fault_is_found(tmp_path):
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/audit.md").read_text(), re.S)
    (tmp_path / "mine.py").write_text(example)
    done = flower_ext(
        "mine:experiment", "--trials", 100, "--output", tmp_path / "out", cwd=tmp_path
    )
    assert done.returncode == 1, done.stderr
    assert json.loads((tmp_path / "out" / "audit.json").read_text())["broken"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing"], "expected module:function, or one of client-noise"),
        (["foreign_experiment:nothing"], "nothing"),
        (["no_such_module:nothing"], "no_such_module"),
        (["foreign_experiment:client_app"], "canary"),
        (["client-noise", "--confidence", "1"], "confidence"),
    ],
)
def test_what_cannot_be_audited_ends_with_2_and_says_why(arguments, message, tmp_path):
    words = ["audit", *arguments]
    done = CliRunner().invoke(
        main.app, [*words, "--output", str(tmp_path / "out")], env={"COLUMNS": "200"}
    )
    assert done.exit_code == 2
    assert message in done.output
    assert not (tmp_path / "out").exists()


def test_the_project_offers_its_command_to_the_group_that_the_core_reads():
    group = "flower_ext.commands"
    ((name, value),) = PROJECT["entry-points"][group].items()
    assert EntryPoint(name=name, value=value, group=group).load() is command.audit
    assert main.PLUGINS[name] == PROJECT["name"]


def test_the_command_knows_the_experiments_of_all_other_plugins():
    offered = {}
    for file in ROOT.glob("plugins/*/pyproject.toml"):
        project = tomllib.loads(file.read_text())["project"]
        for name in project.get("entry-points", {}).get("flower_ext.experiments", ()):
            offered[name] = project["name"]
    assert offered == command.PLUGINS


@pytest.mark.parametrize("target", command.PLUGINS)
def test_an_experiment_of_a_missing_plugin_names_the_package_to_install(target, monkeypatch):
    monkeypatch.setenv("FLOWER_EXT_PLUGINS", "none")
    with pytest.raises(InvalidValue, match=f"pip install {command.PLUGINS[target]}"):
        command.audit(target)

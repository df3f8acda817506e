"""``flower-ext audit``: its output, its files and its exit status."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flower_ext.cli.main import app

ROOT = Path(__file__).parents[2]


def flower_ext(*arguments, cwd=ROOT):
    env = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    return subprocess.run(
        [sys.executable, "-m", "flower_ext.cli.main", "audit", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        env=env,
        cwd=cwd,
    )


@pytest.mark.full
def test_a_foreign_strategy_with_too_little_noise_is_found_and_its_correct_twin_is_not(tmp_path):
    status = {}
    for target in ("wrong", "experiment"):
        done = flower_ext(
            f"tests.support.foreign_experiment:{target}",
            *("--trials", 200, "--confidence", 0.9999, "--output", tmp_path / target),
        )
        told = json.loads((tmp_path / target / "audit.json").read_text())
        status[target] = (done.returncode, told["broken"], "EXCEEDED" in done.stdout)
        (view,) = told["views"]
        assert view["view"] == "released-models"
        assert view["ratio"] == view["lower_bound"] / view["reported_epsilon"]
        assert told["joint_confidence"] == 0.9999
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
    ("arguments", "said"),
    [
        (["nothing"], "expected module:function, or one of client-noise"),
        (["tests.support.foreign_experiment:nothing"], "nothing"),
        (["no_such_module:nothing"], "no_such_module"),
        (["tests.support.foreign_experiment:client_app"], "canary"),
        (["client-noise", "--confidence", "1"], "confidence"),
    ],
)
def test_what_cannot_be_audited_ends_with_2_and_says_why(arguments, said, tmp_path):
    words = ["audit", *arguments]
    done = CliRunner().invoke(
        app, [*words, "--output", str(tmp_path / "out")], env={"COLUMNS": "200"}
    )
    assert done.exit_code == 2
    assert said in done.output
    assert not (tmp_path / "out").exists()

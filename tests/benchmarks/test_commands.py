"""``python -m benchmarks NAME``: every experiment is listed, and pages name experiments alone."""

import re
import sys

import pytest

from benchmarks import __main__ as command
from tests.support.pages import ROOT

PAGES = [
    *ROOT.glob("*.md"),
    *(ROOT / "docs").rglob("*.md"),
    *ROOT.glob("*/*/README.md"),
    *(ROOT / "benchmarks").rglob("*.py"),
    ROOT / "Makefile",
]
CONTENDERS = {"benchmarks.speed.ours"}
"""Modules that pages start by themselves: contenders of an experiment."""


def test_every_experiment_runs_and_describes_its_measurement_in_one_line():
    for module in command.EXPERIMENTS.values():
        assert "def main(" in command.path_of(module).read_text(encoding="utf-8")
        assert len(command.purpose(module)) > 20
        assert command.purpose(module).endswith(".")


def test_a_name_starts_its_experiment_with_its_options(monkeypatch):
    started = []
    monkeypatch.setattr(
        command.runpy, "run_module", lambda name, **_: started.append((name, sys.argv[1:]))
    )
    monkeypatch.setattr(sys, "argv", ["benchmarks", "dp-ditto", "3", "--seeds", "1"])
    command.main()
    assert started == [("benchmarks.ditto", ["3", "--seeds", "1"])]


@pytest.mark.parametrize(("words", "error"), [([], None), (["ditto"], "'ditto'")])
def test_without_a_known_name_the_experiments_are_listed(words, error, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["benchmarks", *words])
    if error is None:
        command.main()
    else:
        with pytest.raises(SystemExit, match=error):
            command.main()
    assert {line.split()[0] for line in capsys.readouterr().out.splitlines()} == set(
        command.EXPERIMENTS
    )


def test_every_command_of_a_page_names_an_experiment():
    text = "\n".join(path.read_text(encoding="utf-8") for path in PAGES)
    named = set(re.findall(r"python\s+-m\s+benchmarks ([a-z0-9-]+)", text))
    assert named - {"--help"} == set(command.EXPERIMENTS)
    assert set(re.findall(r"-m\s+(benchmarks\.[a-z_.]*[a-z])", text)) <= CONTENDERS

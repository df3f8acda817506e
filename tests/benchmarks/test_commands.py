"""``python -m benchmarks NAME``: every experiment is listed, and pages name experiments alone."""

import re
import sys
from importlib import import_module

import pytest

from benchmarks import __main__ as command
from benchmarks.speed import growth
from benchmarks.speed.contest import Contender
from benchmarks.speed.turns import Measured
from tests.support.grids import grid
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
SMALLEST = {
    "uldp-fl": ("--figures 2", "figure-2.md", "| k |"),
    "upcycled-fl": (
        "--parts accuracy --datasets synthetic-iid --methods fedavg --learning-rates 0.03 "
        "--training-rounds 2 --search-rounds 2",
        "stragglers-0.9.md",
        "| iid | FedAvg |",
    ),
    "dp-ditto": (
        "3 clients=5 --worlds digits --no-search --rounds 1 --seeds 1",
        "figure-3.md",
        "| DP-APPLE |",
    ),
    "private-weighting": ("digits protocol=lattice rounds=1 num-users=3", "digits.md", "| 1 |"),
    "speed": ("--only lr --contender vectorised --rounds 2 --turns 1", "speed.md", "| registered"),
}
"""Options with which an experiment runs in some seconds, its page, and the start of a row there."""
DAILY = {"upcycled-fl", "dp-ditto"}


def start(monkeypatch, name, options):
    """Call an experiment's ``main`` with these options."""
    module = command.path_of(command.EXPERIMENTS[name]).relative_to(ROOT).with_suffix("")
    monkeypatch.setattr(sys, "argv", [f"python -m benchmarks {name}", *options])
    import_module(".".join(module.parts)).main()


def test_every_experiment_has_a_command_and_says_what_it_measures():
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


@pytest.mark.parametrize("name", grid(SMALLEST, DAILY.__contains__))
def test_an_experiment_runs_from_its_command_to_its_page(name, monkeypatch, offline, tmp_path):
    import dp_accounting.pld  # noqa: F401  (otherwise each process that runs an app imports it)

    monkeypatch.setattr(growth, "CLIENTS", (100,))
    monkeypatch.setattr(growth, "COHORTS", ())
    monkeypatch.setattr(growth, "HIDDEN", ())
    options, page, row = SMALLEST[name]
    start(monkeypatch, name, [*options.split(), "--output", str(tmp_path)])
    lines = (tmp_path / page).read_text(encoding="utf-8").splitlines()
    rows = [line for line in lines if line.startswith(row)]
    assert rows
    assert not any("nan" in line for line in rows)


def test_all_tables_of_speed_take_the_turns_and_rounds_of_the_command(monkeypatch, tmp_path):
    runs = []

    def run(contender, workload, *, timeout):
        runs.append((contender.name, workload.rounds, timeout))
        return Measured(1.0, 2.0)

    monkeypatch.setattr(Contender, "run", run)
    options = "--full --contender bare --only lr --turns 3 --rounds 5 --timeout 7"
    start(monkeypatch, "speed", [*options.split(), "--output", str(tmp_path)])
    assert {(rounds, timeout) for _, rounds, timeout in runs} == {(5, 7.0)}
    assert all(runs.count(run) % 3 == 0 for run in runs)
    page = (tmp_path / "speed.md").read_text(encoding="utf-8")
    assert "3 turns of 5 rounds" in page
    assert "1,000 of 10,000 clients a round" in page

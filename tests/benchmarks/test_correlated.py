"""The experiment on correlated noise writes its tables for any number of seeds."""

import sys

import pytest

from benchmarks import correlated
from benchmarks.report.rows import read_rows
from benchmarks.runs import Experiment


@pytest.mark.parametrize(("seeds", "accuracy"), [(1, "0.500"), (2, "0.500 ± 0.000")])
def test_accuracies_of_one_seed_and_of_several_have_a_row(seeds, accuracy, tmp_path, monkeypatch):
    """No run trains, and the experiment computes no ratios."""

    def grouped(self, cases, seeds, title):
        return {name: [*seeds] for name in cases}

    monkeypatch.setattr(Experiment, "grouped", grouped)
    monkeypatch.setattr(correlated, "last_value", lambda run, metric: 0.5)
    monkeypatch.setattr(correlated, "POPULATIONS", ())
    options = ["--datasets", "digits", "--seeds", str(seeds), "--output", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["correlated", *options])
    correlated.main()
    rows = read_rows("correlated", folder=tmp_path)
    assert len(rows) == seeds * len(correlated.CASES)
    page = (tmp_path / "correlated.md").read_text(encoding="utf-8")
    assert f"| digits | 2 | Poisson | {accuracy} |" in page

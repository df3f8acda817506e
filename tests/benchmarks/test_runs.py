"""Test the command-line settings of experiments, and the choice that a search makes."""

import argparse
import math
from dataclasses import dataclass

import pytest

from benchmarks.command_line import (
    changed_scale,
    command_parser,
    experiment_parser,
    parse_overrides,
)
from benchmarks.runs import Experiment, mean_and_error, mean_and_std


def test_an_override_has_the_type_of_the_default_of_its_app():
    parser = experiment_parser(None)
    texts = ["clients=10", "epsilon=4", "seeded-noise=true", "model=mnist-cnn"]
    assert parse_overrides(parser, "dp2-fedsam", texts) == {
        "clients": 10,
        "epsilon": 4.0,
        "seeded-noise": True,
        "model": "mnist-cnn",
    }


@pytest.mark.parametrize(
    ("text", "error"),
    [("client=10", "did you mean clients"), ("clients=ten", "clients='ten': expected")],
)
def test_an_override_that_the_app_cannot_read_fails_the_command(text, error, capsys):
    with pytest.raises(SystemExit):
        parse_overrides(experiment_parser(None), "dp2-fedsam", [text])
    assert error in capsys.readouterr().err


@dataclass(frozen=True)
class Scale:
    rounds: int = 5
    methods: tuple[str, ...] = ("a", "b")
    search: bool = True


@pytest.mark.parametrize(
    ("options", "scale"),
    [
        ([], Scale()),
        (["--methods", "b", "--output", "x"], Scale(methods=("b",))),
        (["--rounds", "0", "--no-search"], Scale(rounds=0, search=False)),
    ],
)
def test_a_scale_changes_in_the_fields_that_the_command_line_gives(options, scale):
    parser = command_parser(None)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--methods", nargs="+")
    parser.add_argument("--search", action=argparse.BooleanOptionalAction)
    parser.add_argument("--output")
    assert changed_scale(Scale(), parser.parse_args(options)) == scale


def test_changes_go_before_options_unless_they_are_none():
    arguments = argparse.Namespace(rounds=3, methods=["a"])
    scale = changed_scale(Scale(), arguments, rounds=range(2), methods=None, search=None)
    assert scale == Scale(rounds=range(2))
    with pytest.raises(TypeError, match="seeds"):
        changed_scale(Scale(), arguments, seeds=1)


def test_a_search_takes_the_best_mean_score_without_diverged_runs(tmp_path, monkeypatch):
    """The runs are numbers: only their scores are tested."""
    scores = {
        ("a", 0.1): [1.0, 2.0],
        ("a", 0.2): [3.0, 1.0],
        ("b", 0.1): [9.0, math.nan],
        ("b", 0.2): [0.0, 0.0],
    }
    tried = []

    def grouped(self, cases, seeds, title):
        tried.extend(cases.values())
        return dict(zip(cases, scores.values(), strict=True)) if len(seeds) == 2 else {}

    monkeypatch.setattr(Experiment, "grouped", grouped)
    experiment = Experiment(app=tmp_path, folder=tmp_path, base={}, workers=1)
    trials = {name: [{"rate": 0.1}, {"rate": 0.2}] for name in "ab"}
    fixed = {name: {"method": name} for name in "ab"}
    best = experiment.best(trials, lambda run: run, "rates", fixed=fixed, seeds=2)
    assert best == {"a": {"rate": 0.2}, "b": {"rate": 0.2}}
    assert tried == [{"method": name, "rate": rate} for name, rate in scores]


def test_a_difference_has_the_standard_error_of_its_mean():
    assert mean_and_error([1.0, 2.0, 3.0], digits=2) == "+2.00 ± 0.58"
    assert mean_and_error([0.5], digits=1) == "+0.5 ± nan"


def test_the_deviation_over_runs_is_the_sample_deviation_of_several_runs():
    assert mean_and_std([0.1, 0.2, 0.3]) == "0.200 ± 0.100"
    assert mean_and_std([0.25]) == "0.250"

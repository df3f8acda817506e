"""Figures have their numbers beside them, and draw only what was measured."""

import csv
import re

import pytest
from matplotlib.axes import Axes

from flower_ext.runs import RunDirectory, RunWriter
from flower_ext.runs.figures import COLOURS, Chart, draw_figures, draw_lines, qualities
from tests.support.finished_runs import finished


def rows_of(path):
    with path.open(newline="", encoding="utf-8") as stream:
        return list(csv.DictReader(stream))


def test_every_drawing_has_its_numbers_beside_it(tmp_path):
    drawn = draw_figures(finished(tmp_path / "run"), tmp_path / "figures")
    for file in drawn:
        svg = tmp_path / "figures" / file
        assert svg.read_text(encoding="utf-8").rstrip().endswith("</svg>")
        assert rows_of(svg.with_suffix(".csv"))


def test_the_numbers_are_those_that_were_logged(tmp_path):
    run = finished(tmp_path / "run", accuracy=0.8)
    draw_figures(run, tmp_path)
    rows = rows_of(tmp_path / "accuracy.csv")
    mean = [float(row["accuracy"]) for row in rows if row["line"] == "mean over clients"]
    worst = [float(row["accuracy"]) for row in rows if row["line"] == "worst tenth of clients"]
    assert mean == run.metrics().series("accuracy_mean")[1]
    assert worst == run.metrics().series("accuracy_worst_decile")[1]
    scores = [float(row["accuracy"]) for row in rows_of(tmp_path / "fairness.csv")]
    assert scores == [row["accuracy"] for row in run.client_metrics()]


def test_traffic_is_cumulative_and_in_megabytes(tmp_path):
    draw_figures(finished(tmp_path / "run"), tmp_path)
    rows = rows_of(tmp_path / "traffic.csv")
    up = [float(r["megabytes, cumulative"]) for r in rows if r["line"] == "from clients"]
    assert up == pytest.approx([2.0, 4.0, 6.0, 8.0])


def test_axes_say_what_they_show_in_words_a_search_finds(tmp_path):
    draw_figures(finished(tmp_path / "run"), tmp_path)
    svg = (tmp_path / "traffic.svg").read_text(encoding="utf-8")
    for word in ("Model arrays sent for training", "round", "megabytes, cumulative", "to clients"):
        assert f">{word}</text>" in svg


def test_what_was_not_measured_is_not_drawn(tmp_path):
    run = RunWriter.create(tmp_path / "run", {})
    assert draw_figures(run, tmp_path / "none") == {}
    run.log(1, accuracy_mean=0.5)
    assert list(draw_figures(run, tmp_path / "one")) == ["accuracy.svg"]


def test_the_spread_of_training_losses_is_drawn_where_it_was_measured(tmp_path):
    run = RunWriter.create(tmp_path / "run", {})
    for number in (1, 2, 3):
        run.log(number, training_loss_std=0.1 * number)
    assert list(draw_figures(run, tmp_path)) == ["training_loss_spread.svg"]
    rows = rows_of(tmp_path / "training_loss_spread.csv")
    assert [float(row["loss"]) for row in rows] == pytest.approx([0.1, 0.2, 0.3])


@pytest.mark.parametrize(("published", "log"), [(1.0, False), (100.0, True)])
def test_epsilons_far_apart_share_a_logarithmic_axis(tmp_path, published, log):
    run = RunWriter.create(tmp_path / "run", {})
    for number in (1, 2, 3):
        run.log(number, epsilon_provable=0.1 * number, epsilon_published=published * number)
    draw_figures(run, tmp_path)
    # Only a logarithmic axis writes its ticks as powers, with raised text in its own span.
    assert ("<tspan" in (tmp_path / "epsilon.svg").read_text(encoding="utf-8")) == log


def test_a_comparison_draws_mean_and_deviation_of_each_group(tmp_path):
    groups = {"a": [([1, 2], [0.0, 0.5]), ([1, 2], [1.0, 0.5])], "b": [([1, 2], [0.3, 0.4])]}
    draw_lines(tmp_path, "c", Chart(title="title", ylabel="accuracy", lines=groups))
    rows = [
        (r["line"], *(float(r[c]) for c in ("round", "accuracy")))
        for r in rows_of(tmp_path / "c.csv")
    ]
    assert rows == [("a", 1, 0.5), ("a", 2, 0.5), ("b", 1, 0.3), ("b", 2, 0.4)]
    deviations = [float(r["std"]) for r in rows_of(tmp_path / "c.csv")]
    assert deviations[0] > 0
    assert deviations[1:] == [0.0, 0.0, 0.0]


def test_a_label_keeps_its_colour_in_figures_that_lack_other_labels(tmp_path):
    line = {"b": [([1, 2], [0.0, 1.0])]}
    draw_lines(
        tmp_path, "c", Chart(title="title", ylabel="accuracy", lines=line, labels=["a", "b"])
    )
    drawn = (tmp_path / "c.svg").read_text(encoding="utf-8").lower()
    assert COLOURS[1].lower() in drawn
    assert COLOURS[0].lower() not in drawn
    draw_lines(tmp_path, "d", Chart(title="title", ylabel="accuracy", lines=line))
    assert len((tmp_path / "d.svg").read_text(encoding="utf-8")) < len(drawn)  # it has no legend


def test_more_groups_than_colours_stay_apart(tmp_path):
    groups = {f"m{n}": [([1, 2], [n / 10, n / 10])] for n in range(9)}
    draw_lines(tmp_path, "c", Chart(title="title", ylabel="accuracy", lines=groups))
    assert len({r["line"] for r in rows_of(tmp_path / "c.csv")}) == 9


def test_record_level_epsilons_are_drawn_for_the_largest_client_and_the_mean(tmp_path):
    run = RunWriter.create(tmp_path / "run", {})
    for number in (1, 2):
        run.log(
            number,
            epsilon_published=0.2 * number,
            epsilon_published_mean=0.1 * number,
            epsilon_provable=4.0 * number,
            epsilon_provable_mean=3.0 * number,
        )
    draw_figures(run, tmp_path)
    last = {row["line"]: float(row["ε"]) for row in rows_of(tmp_path / "epsilon.csv")}
    assert last == {
        "published, each upload, largest of the clients": 0.4,
        "published, each upload, mean of the clients": 0.2,
        "provable, each upload, largest of the clients": 8.0,
        "provable, each upload, mean of the clients": 6.0,
    }


def test_messages_and_seconds_add_up_over_rounds(tmp_path):
    run = RunWriter.create(tmp_path / "run", {})
    for number, messages in enumerate((6, 0, 6, 0), 1):
        run.log(number, messages=messages, training_seconds=0.5, seconds=2.0)
    draw_figures(run, tmp_path)
    sent = [float(row["messages, cumulative"]) for row in rows_of(tmp_path / "messages.csv")]
    assert sent == [6, 6, 12, 12]
    seconds = [float(r["seconds, cumulative"]) for r in rows_of(tmp_path / "time.csv")]
    assert seconds == [0.5, 1.0, 1.5, 2.0, 2.0, 4.0, 6.0, 8.0]


def test_a_comparison_can_stand_against_something_else_than_rounds(tmp_path):
    groups = {"a": [([2, 4], [0.1, 0.5]), ([2, 4], [0.3, 0.5])]}
    cost = {"a": [([1, 2, 3, 4], [5, 10, 15, 20]), ([1, 2, 3, 4], [7, 12, 17, 22])]}
    draw_lines(
        tmp_path,
        "c",
        Chart(title="t", ylabel="accuracy", lines=groups, xlabel="messages", against=cost),
    )
    rows = [(float(r["messages"]), float(r["accuracy"])) for r in rows_of(tmp_path / "c.csv")]
    assert rows == [(11.0, pytest.approx(0.2)), (21.0, 0.5)]


def scored(path, *by_client) -> RunDirectory:
    """Return a run whose clients reported these scores."""
    run = RunWriter.create(path, {"method": "m", "dataset": "digits"})
    scores = [
        {"partition": number, **client_scores} for number, client_scores in enumerate(by_client)
    ]
    run.save_client_metrics(scores)
    run.finish("completed")
    return run


NAMES = (
    "f1/macro",
    "f1_macro",
    "F1_macro",
    "a b",
    "..",
    "../../out",
    "/out",
    "é" * 100,
    "$x_",
    "$$",
)


def test_names_of_metrics_are_no_paths_and_each_has_a_figure(tmp_path):
    run = scored(tmp_path / "run", dict.fromkeys(NAMES, 0.5))
    drawn = draw_figures(run, tmp_path / "in" / "figures")
    assert len(drawn) == len(NAMES)
    assert {path.name for path in (tmp_path / "in" / "figures").glob("*.svg")} == set(drawn)
    assert {path.name for path in tmp_path.iterdir()} == {"run", "in"}
    assert all(re.fullmatch(r"[\w-]+\.svg", file, re.ASCII) for file in drawn)
    assert len({file.lower() for file in drawn}) == len(drawn)


def test_a_metric_that_is_called_as_another_figure_takes_nothing_from_it(tmp_path):
    run = scored(tmp_path / "run", {"epsilon": 0.5})
    for number in (1, 2):
        run.log(number, epsilon_provable=number, epsilon_worst_decile=0.1, epsilon_mean=0.2)
    drawn = draw_figures(run, tmp_path)
    (spent,) = (file for file, title in drawn.items() if title == "Privacy spent")
    rows = rows_of((tmp_path / spent).with_suffix(".csv"))
    assert [float(row["ε"]) for row in rows] == [1, 2]


def test_one_client_alone_cannot_add_a_score(tmp_path):
    run = scored(tmp_path / "run", {"accuracy": 0.5}, {"accuracy": 0.6, "mine": 1.0})
    assert qualities(run.metrics(), run.client_metrics()) == ["accuracy"]


@pytest.mark.parametrize("scores", [(0.25, 0.5), (1.5, 3.0), (-4.0, 0.5), (7.0, 7.0), (1e15, 0.0)])
def test_a_histogram_shows_every_client_under_its_partition(tmp_path, monkeypatch, scores):
    counted = []
    draw = Axes.hist
    monkeypatch.setattr(Axes, "hist", lambda *a, **k: counted.append(draw(*a, **k)[0].sum()))
    run = RunWriter.create(tmp_path / "run", {})
    rows = [{"partition": 3, "x": scores[0]}, {"partition": 7}, {"partition": 8, "x": scores[1]}]
    run.save_client_metrics(rows)
    draw_figures(run, tmp_path)
    assert counted == [2]
    read = [(row["partition"], float(row["x"])) for row in rows_of(tmp_path / "x_spread.csv")]
    assert read == [("3", scores[0]), ("8", scores[1])]


def test_scores_below_zero_are_inside_their_figure(tmp_path, monkeypatch):
    limits = []
    monkeypatch.setattr(Axes, "set_ylim", lambda *_, **given: limits.append(given))
    draw_lines(
        tmp_path,
        "r2",
        Chart(title="title", ylabel="r2", lines={"mean": [([1, 2], [-3.0, 0.5])]}, from_zero=True),
    )
    assert {"bottom": 0} not in limits


def test_a_line_of_one_point_is_a_dot(tmp_path, monkeypatch):
    markers, plot = [], Axes.plot
    monkeypatch.setattr(
        Axes, "plot", lambda axes, *a, **k: markers.append(k["marker"]) or plot(axes, *a, **k)
    )
    draw_lines(
        tmp_path,
        "c",
        Chart(title="title", ylabel="y", lines={"a": [([1], [2.0])], "b": [([1, 2], [2.0, 3.0])]}),
    )
    draw_lines(tmp_path, "d", Chart(title="title", ylabel="accuracy", lines={"a": [([1], [0.5])]}))
    assert markers == ["o", "", "o"]

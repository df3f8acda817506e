import csv

import pytest

from flower_ext.reporting import RunDirectory
from flower_ext.reporting.figures import draw_comparison, draw_figures
from tests.reporting.test_report import finished


def rows_of(path):
    with path.open(newline="") as stream:
        return list(csv.DictReader(stream))


def test_every_drawing_has_its_numbers_beside_it(tmp_path):
    drawn = draw_figures(finished(tmp_path / "run"), tmp_path / "figures")
    for file in drawn.values():
        svg = tmp_path / "figures" / file
        assert svg.read_text().rstrip().endswith("</svg>")
        assert rows_of(svg.with_suffix(".csv"))


def test_the_numbers_are_those_that_were_logged(tmp_path):
    run = finished(tmp_path / "run", accuracy=0.8)
    draw_figures(run, tmp_path)
    rows = rows_of(tmp_path / "accuracy.csv")
    mean = [float(row["accuracy"]) for row in rows if row["line"] == "mean over clients"]
    worst = [float(row["accuracy"]) for row in rows if row["line"] == "worst tenth of clients"]
    assert mean == run.series("accuracy_mean")[1]
    assert worst == run.series("accuracy_worst_decile")[1]
    scores = [float(row["accuracy"]) for row in rows_of(tmp_path / "fairness.csv")]
    assert scores == [row["accuracy"] for row in run.client_metrics()]


def test_traffic_is_cumulative_and_in_megabytes(tmp_path):
    draw_figures(finished(tmp_path / "run"), tmp_path)
    rows = rows_of(tmp_path / "traffic.csv")
    up = [float(r["megabytes, cumulative"]) for r in rows if r["line"] == "from clients"]
    assert up == pytest.approx([2.0, 4.0, 6.0, 8.0])


def test_axes_say_what_they_show_in_words_a_search_finds(tmp_path):
    draw_figures(finished(tmp_path / "run"), tmp_path)
    svg = (tmp_path / "traffic.svg").read_text()
    for word in ("Model arrays sent for training", "round", "megabytes, cumulative", "to clients"):
        assert f">{word}</text>" in svg


def test_what_was_not_measured_is_not_drawn(tmp_path):
    run = RunDirectory.create(tmp_path / "run", {})
    assert draw_figures(run, tmp_path / "none") == {}
    run.log(1, accuracy_mean=0.5)
    assert list(draw_figures(run, tmp_path / "one").values()) == ["accuracy.svg"]


def test_the_spread_of_training_losses_is_drawn_where_it_was_measured(tmp_path):
    run = RunDirectory.create(tmp_path / "run", {})
    for number in (1, 2, 3):
        run.log(number, training_loss_std=0.1 * number)
    assert list(draw_figures(run, tmp_path).values()) == ["training_loss_spread.svg"]
    rows = rows_of(tmp_path / "training_loss_spread.csv")
    assert [float(row["loss"]) for row in rows] == pytest.approx([0.1, 0.2, 0.3])


@pytest.mark.parametrize(("published", "log"), [(1.0, False), (100.0, True)])
def test_epsilons_far_apart_share_a_logarithmic_axis(tmp_path, published, log):
    run = RunDirectory.create(tmp_path / "run", {})
    for number in (1, 2, 3):
        run.log(number, epsilon_provable=0.1 * number, epsilon_published=published * number)
    draw_figures(run, tmp_path)
    # Only a logarithmic axis writes its ticks as powers: raised text, in a span of its own.
    assert ("<tspan" in (tmp_path / "epsilon.svg").read_text()) == log


def test_a_comparison_draws_mean_and_deviation_of_each_group(tmp_path):
    groups = {"a": [([1, 2], [0.0, 0.5]), ([1, 2], [1.0, 0.5])], "b": [([1, 2], [0.3, 0.4])]}
    draw_comparison(tmp_path, "c", "title", "accuracy", groups)
    rows = [
        (r["method"], *(float(r[c]) for c in ("round", "mean")))
        for r in rows_of(tmp_path / "c.csv")
    ]
    assert rows == [("a", 1, 0.5), ("a", 2, 0.5), ("b", 1, 0.3), ("b", 2, 0.4)]
    deviations = [float(r["std"]) for r in rows_of(tmp_path / "c.csv")]
    assert deviations[0] > 0
    assert deviations[1:] == [0.0, 0.0, 0.0]


def test_more_groups_than_colours_stay_apart(tmp_path):
    groups = {f"m{n}": [([1, 2], [n / 10, n / 10])] for n in range(9)}
    draw_comparison(tmp_path, "c", "title", "accuracy", groups)
    assert len({r["method"] for r in rows_of(tmp_path / "c.csv")}) == 9


def test_record_level_epsilons_are_drawn_for_the_largest_client_and_the_mean(tmp_path):
    run = RunDirectory.create(tmp_path / "run", {})
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
    run = RunDirectory.create(tmp_path / "run", {})
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
    draw_comparison(tmp_path, "c", "t", "accuracy", groups, xlabel="messages", against=cost)
    rows = [(float(r["messages"]), float(r["mean"])) for r in rows_of(tmp_path / "c.csv")]
    assert rows == [(11.0, pytest.approx(0.2)), (21.0, 0.5)]

"""Comparisons of runs: one row for each method, over its seeds."""

from dataclasses import replace

import pytest

from flower_ext.privacy import (
    FullParticipation,
    LocalObjective,
    OutputPerturbation,
    PerturbationPlan,
)
from flower_ext.runs import NotARun, RunDirectory, RunWriter, write_comparison
from flower_ext.runs.comparison import mean_and_error
from tests.support.finished_runs import finished
from tests.support.grids import grid
from tests.support.run_summary import run_summary


def test_the_error_of_a_mean_is_the_sample_deviation_over_root_n():
    assert mean_and_error([0.1, 0.2, 0.3]) == "0.200 ± 0.058"
    assert mean_and_error([0.1, 0.2, 0.3], sign="+") == "+0.200 ± 0.058"


def test_a_single_run_claims_no_error():
    assert mean_and_error([0.25]) == "0.250"
    assert mean_and_error([]) == "–"


def test_runs_without_a_method_are_named_by_their_folder(tmp_path):
    run = RunWriter.create(tmp_path / "first", {})
    run.log(1, accuracy_mean=0.5)
    run.save_client_metrics([{"partition": 0, "accuracy": 0.5}])
    run.finish("completed")
    write_comparison([run], tmp_path, title="One")
    assert "| first | 1 | 0.500 |" in (tmp_path / "comparison.md").read_text(encoding="utf-8")


def test_a_method_without_privacy_claims_no_epsilon(tmp_path):
    runs = [finished(tmp_path / "a", method="plain", private=False), finished(tmp_path / "b")]
    write_comparison(runs, tmp_path, title="Both")
    lines = (tmp_path / "comparison.md").read_text(encoding="utf-8").splitlines()
    (plain,) = (line for line in lines if line.startswith("| plain "))
    (private,) = (line for line in lines if line.startswith("| dp2-fedsam "))
    assert "| none | none |" in plain
    assert "none" not in private


@pytest.mark.parametrize("order", grid([1, -1], (-1).__eq__))
def test_methods_stand_in_the_order_given(tmp_path, order):
    runs = [finished(tmp_path / name, method=name) for name in ("a", "b", "c")][::order]
    write_comparison(runs, tmp_path, title="Ordered")
    lines = (tmp_path / "comparison.md").read_text(encoding="utf-8").splitlines()
    named = [line[2] for line in lines if line[:2] == "| " and line[2:4] in ("a ", "b ", "c ")]
    assert named == ["a", "b", "c"][::order]


def test_markup_in_a_title_stays_text(tmp_path):
    run = finished(tmp_path / "run")
    page = write_comparison([run], tmp_path, title="<script>alert(1)</script>").read_text(
        encoding="utf-8"
    )
    assert "<script>" not in page


@pytest.mark.figures
def test_runs_of_unequal_length_are_compared_where_all_measured(tmp_path):
    runs = [finished(tmp_path / name) for name in ("a", "b")]
    runs[1].log(5, accuracy_mean=0.9)
    write_comparison(runs, tmp_path, title="Unequal")
    rounds = (tmp_path / "figures" / "accuracy.csv").read_text(encoding="utf-8").splitlines()[1:]
    assert len(rounds) == 4


def test_one_run_without_privacy_takes_the_epsilon_from_its_method(tmp_path):
    runs = [finished(tmp_path / "a"), finished(tmp_path / "b", private=False)]
    write_comparison(runs, tmp_path, title="Mixed")
    assert "| none | none |" in (tmp_path / "comparison.md").read_text(encoding="utf-8")


def rows(runs, folder):
    """Return the first two cells of each line of the table: the name, and the number of runs."""
    write_comparison(runs, folder, title="Table")
    lines = (folder / "comparison.md").read_text(encoding="utf-8").splitlines()
    cells = [[cell.strip() for cell in line.split("|")[1:3]] for line in lines if line[:1] == "|"]
    return [(name, number) for name, number in cells[2:]]


def test_a_run_that_is_named_twice_counts_once(tmp_path):
    run = finished(tmp_path / "a")
    (tmp_path / "link").symlink_to(run.path)
    again = RunDirectory.open(tmp_path / "link")
    assert rows([run, RunDirectory.open(run.path), again], tmp_path) == [("dp2-fedsam", "1")]


def test_runs_that_differ_in_the_seed_and_in_places_are_repetitions(tmp_path):
    facts = [{"seed": 1, "state-folder": "/a"}, {"seed": 2, "state-folder": "/b"}]
    runs = [finished(tmp_path / str(one["seed"]), **one) for one in facts]
    assert rows(runs, tmp_path) == [("dp2-fedsam", "2")]


def test_runs_that_differ_in_more_are_separate_lines_with_their_differences(tmp_path):
    shared = {"rounds": 4, "momentum": 0.5}
    runs = [
        finished(tmp_path / f"{epsilon}-{seed}", epsilon=epsilon, seed=seed, **shared)
        for epsilon in (1.0, 2.0)
        for seed in (1, 2)
    ]
    runs += [finished(tmp_path / "other", method="centaur", epsilon=8.0, seed=1, **shared)]
    assert rows(runs, tmp_path) == [
        ("dp2-fedsam, epsilon=1.0", "2"),
        ("dp2-fedsam, epsilon=2.0", "2"),
        ("centaur", "1"),
    ]


def cells(runs, folder, column):
    """Return the cells of a column of the table, top down; None if there is no such column."""
    write_comparison(runs, folder, title="Table")
    lines = (folder / "comparison.md").read_text(encoding="utf-8").splitlines()
    table = [[cell.strip() for cell in line.split("|")] for line in lines if line[:1] == "|"]
    if column not in table[0]:
        return None
    return [row[table[0].index(column)] for row in table[2:]]


DIFFERENCE = "difference to the first row"


def test_the_difference_of_two_methods_is_taken_seed_by_seed(tmp_path):
    """Each seed moves both methods alike, so the difference has a far smaller error."""
    accuracies = {
        "dp2-fedsam": {1: 0.5, 2: 0.7, 3: 0.9, 4: 0.6},
        "centaur": {1: 0.52, 2: 0.73, 3: 0.94},
        "dp-fedavg": {3: 0.8, 9: 0.1},
        "fedper": {9: 0.2},
    }
    runs = [
        finished(tmp_path / f"{method}-{seed}", method=method, accuracy=accuracy, seed=seed)
        for method, by_seed in accuracies.items()
        for seed, accuracy in by_seed.items()
    ]
    differences = cells(runs, tmp_path, DIFFERENCE)
    assert differences == ["–", "+0.030 ± 0.006 (3 seeds)", "-0.100 (1 seed)", "–"]
    assert "over the seeds that both rows have" in (tmp_path / "comparison.md").read_text()


@pytest.mark.parametrize("seeds", [(1, 2), (0, 0), (None, None)])
def test_without_a_common_seed_no_difference_is_claimed(tmp_path, seeds):
    """The seed 0 stands for secret draws, which differ from run to run."""
    names = ("dp2-fedsam", "centaur")
    facts = [{} if seed is None else {"seed": seed} for seed in seeds]
    runs = [finished(tmp_path / n, method=n, **f) for n, f in zip(names, facts, strict=True)]
    assert cells(runs, tmp_path, DIFFERENCE) is None
    assert "both rows" not in (tmp_path / "comparison.md").read_text()


def test_a_label_has_only_the_first_sentence_about_the_data(tmp_path):
    sources = ("MNIST. No two clients have the same digit", "scikit-learn's digits. Copies")
    runs = [finished(tmp_path / s[:5], **{"data-source": s}) for s in sources]
    assert [name for name, _ in rows(runs, tmp_path)] == [
        "dp2-fedsam, data-source=MNIST",
        "dp2-fedsam, data-source=scikit-learn's digits",
    ]


def test_a_failed_run_is_not_averaged_in(tmp_path):
    run = finished(tmp_path / "a")
    run.finish("failed", "disk full")
    with pytest.raises(NotARun, match="is failed"):
        write_comparison([run], tmp_path, title="Failed")


def test_a_run_that_its_budget_ended_is_named_below_the_table(tmp_path):
    runs = [finished(tmp_path / name) for name in ("whole", "short")]
    runs[1].finish("budget-exhausted")
    write_comparison(runs, tmp_path, title="Budgets")
    text = (tmp_path / "comparison.md").read_text(encoding="utf-8")
    assert "Stopped early by their budget: short.\n" in text


def record_level(path, *, upcycled, epsilon, provable):
    """Write a run with guarantees for records, and return it."""
    objective = LocalObjective(convex=True, gradient_bound=1.0)
    run = finished(path, method="fedprox", private=False, upcycled=upcycled)
    plan = PerturbationPlan(
        sampling=FullParticipation(2),
        perturbation=OutputPerturbation(clipping_norm=1.0, noise_stddev=1.0),
        objective=objective,
        delta=1e-3,
    )
    guarantees = plan.guarantees(run_summary({0: 2, 1: 2}, num_examples={0: 90, 1: 45}))
    assert {g.basis for g in guarantees} == {"published", "provable"}
    run.save_guarantees(
        [replace(g, epsilon=epsilon if g.basis == "published" else provable) for g in guarantees]
    )
    return run


def test_plain_and_upcycled_runs_are_two_lines_with_their_costs(tmp_path):
    runs = [
        record_level(tmp_path / "a", upcycled=False, epsilon=0.25, provable=9.0),
        record_level(tmp_path / "b", upcycled=True, epsilon=0.125, provable=4.5),
    ]
    write_comparison(runs, tmp_path, title="Both")
    lines = (tmp_path / "comparison.md").read_text(encoding="utf-8").splitlines()
    (plain,) = (line for line in lines if line.startswith("| fedprox |"))
    (upcycled,) = (line for line in lines if line.startswith("| fedprox, upcycled |"))
    assert "| 38 | 12.00 | 1.0 |" in plain  # messages, megabytes, seconds
    view = "record, each-upload, δ = 0.001"
    assert f"| 9 ({view}) | 0.25 ({view}) |" in plain
    assert f"| 4.5 ({view}) | 0.125 ({view}) |" in upcycled


@pytest.mark.figures
def test_costs_are_drawn_against_rounds_and_accuracy_against_messages(tmp_path):
    write_comparison([finished(tmp_path / "a")], tmp_path, title="One")
    drawn = {path.stem for path in (tmp_path / "figures").glob("*.svg")}
    assert drawn == {
        "accuracy",
        "accuracy_by_messages",
        "epsilon",
        "epsilon_published",
        "messages",
        "time",
        "upload",
    }
    rows = (
        (tmp_path / "figures" / "accuracy_by_messages.csv").read_text(encoding="utf-8").splitlines()
    )
    assert [row.split(",")[1] for row in rows[1:]] == ["19.0", "19.0", "38.0", "38.0"]


def test_a_resumed_run_is_no_repetition_of_an_uninterrupted_one(tmp_path):
    runs = [finished(tmp_path / name, rounds=4) for name in ("a", "b", "c")]
    last = max(row["round"] for row in runs[2].metrics())
    runs[2].log(last + 1, accuracy_mean=0.9)
    write_comparison(runs, tmp_path, title="Unequal")
    text = (tmp_path / "comparison.md").read_text(encoding="utf-8")
    assert f"rounds={last} | 2 |" in text
    assert f"rounds={last + 1} | 1 |" in text

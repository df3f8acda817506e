"""The numbers of a round: counting, summary, log and files."""

import numpy as np
import pytest

from flower_ext.federation import progress as module
from flower_ext.federation.progress import Progress
from flower_ext.runs import RunWriter


def lines(logged) -> list[str]:
    return [record.getMessage() for record in logged.records if record.name == "flwr"]


def test_a_new_round_starts_from_zero_training_messages_and_forgets_the_last():
    progress = Progress()
    progress.begin()
    progress.row |= {"messages": 9, "refused": 2, "loss_mean": 1.0}
    progress.begin()
    assert progress.row == {"cohort": 0, "messages": 0, "bytes_down": 0, "bytes_up": 0}


def test_counting_nothing_leaves_a_zero_and_refusals_add_up():
    progress = Progress()
    progress.begin()
    progress.count_messages("evaluate", 0, 0)
    assert progress.row["evaluation_messages"] == 0
    assert "evaluation_bytes_up" not in progress.row
    progress.count_replies("train", 0, 0, ["one", "two"])
    progress.count_replies("evaluate", 0, 0, ["three"])
    assert progress.row["refused"] == 3
    assert progress.row["evaluation_bytes_up"] == 0


def test_of_many_refusals_the_log_quotes_three_and_counts_the_others(logged):
    progress = Progress()
    progress.begin()
    refusals = [f"round 1, node {node}: 'w' holds values above 1e+15" for node in range(50)]
    progress.count_replies("train", 0, 0, refusals)
    quoted = [f"refused reply: {refusal}" for refusal in refusals[:3]]
    last_line = "and 47 more were refused (strategy.refusals has the reasons)"
    assert lines(logged) == [*quoted, last_line]


def test_clients_count_alike_in_scores_and_by_examples_in_pooled_scores():
    progress = Progress()
    progress.begin()
    values, sizes = np.linspace(0.1, 1.0, 20), np.arange(20.0) ** 2 + 1
    clients = [
        {"accuracy": value, "num-examples": size} for value, size in zip(values, sizes, strict=True)
    ]
    summary = progress.scores(clients)
    assert summary == {
        "accuracy_mean": pytest.approx(values.mean()),
        "accuracy_std": pytest.approx(values.std()),
        "accuracy_variance": pytest.approx(values.var()),
        "accuracy_worst_decile": pytest.approx(values[:2].mean()),
        "accuracy_jain": pytest.approx(values.sum() ** 2 / (20 * (values**2).sum())),
        "accuracy_pooled": pytest.approx((values * sizes).sum() / sizes.sum()),
    }
    assert progress.row.items() >= summary.items()


def test_the_worst_tenth_of_losses_is_the_highest_and_unpooled_in_training():
    progress = Progress()
    clients = [{"loss": 1.0 * i, "training_loss": 2.0 * i, "num-examples": 1.0} for i in range(20)]
    summary = progress.scores(clients)
    assert summary["loss_worst_decile"] == 18.5
    assert summary["training_loss_worst_decile"] == 37.0
    assert summary["training_loss_variance"] == pytest.approx(summary["training_loss_std"] ** 2)
    assert "loss_pooled" in summary
    assert "training_loss_pooled" not in summary


@pytest.mark.parametrize("size", [{}, {"num-examples": 0.0}])
def test_scores_are_not_pooled_if_a_client_hides_its_number_of_examples(size):
    clients = [{"loss": 1.0, "num-examples": 3.0}, {"loss": 2.0, **size}]
    summary = Progress().scores(clients)
    assert "loss_pooled" not in summary
    assert summary["loss_mean"] == 1.5


def test_a_missing_score_is_averaged_over_the_others_with_their_number():
    progress = Progress()
    sizes = {"num-examples": 3.0}, {"num-examples": 1.0}, {"num-examples": 6.0}
    scores = {"loss": 1.0, "auc": 0.5}, {"loss": 3.0, "auc": 0.9}, {"loss": 2.0}
    summary = progress.scores({**a, **b} for a, b in zip(scores, sizes, strict=True))
    assert summary["loss_mean"] == 2.0
    assert "loss_clients" not in summary
    assert summary["auc_clients"] == 2
    assert summary["auc_mean"] == pytest.approx(0.7)
    assert summary["auc_pooled"] == pytest.approx(0.6)


def test_a_score_that_most_clients_lack_has_no_mean():
    everyone = [{"loss": 1.0, "auc": 0.5}, {"loss": 2.0}, {"loss": 3.0}]
    assert "auc_mean" not in Progress().scores(everyone)


def test_the_row_of_a_round_is_written_under_its_number(tmp_path):
    run = RunWriter.create(tmp_path / "run", {})
    progress = Progress(run)
    for number in (1, 2):
        progress.begin()
        progress.row["cohort"] = 10 * number
        progress.end(number, 2)
    zeros = {"messages": 0, "bytes_down": 0, "bytes_up": 0}
    assert run.metrics() == [
        {"round": 1, "cohort": 10, **zeros},
        {"round": 2, "cohort": 20, **zeros},
    ]


def test_one_line_says_what_a_round_achieved_and_cost(logged):
    progress = Progress()
    progress.begin()
    progress.row |= {
        "cohort": 8,
        "answered": 5,
        "refused": 3,
        "accuracy_mean": 0.8125,
        "accuracy_worst_decile": 0.25,
        "epsilon_provable": 3.456,
        "epsilon_published": 0.1,
    }
    progress.end(4, 9)
    (line,) = lines(logged)
    for part in (
        "round 4/9",
        "accuracy 0.812 (worst tenth 0.250)",
        "ε 3.46 provable",
        "ε 0.1 published",
        "5 of 8 answered",
        "3 refused",
    ):
        assert part in line


def test_a_noised_mean_is_shown_with_error_and_without_worst_tenth(logged):
    progress = Progress()
    progress.begin()
    progress.row |= {"accuracy_mean": 0.7, "accuracy_mean_error": 0.06, "scored_clients": 8.25}
    progress.end(1, 2)
    (line,) = lines(logged)
    assert "accuracy 0.700 (± 0.06 by noise)" in line
    assert "worst tenth" not in line


def test_the_line_says_that_noise_was_topped_up_or_the_round_discarded(logged):
    for fact in ({"topped_up_stddev": 0.1}, {"topped_up_stddev": 0.0}, {"discarded": 1}):
        progress = Progress()
        progress.begin()
        progress.row |= {"cohort": 3, "answered": 2, **fact}
        progress.end(1, 2)
    topped_up, whole, discarded = lines(logged)
    assert "the server topped up the noise" in topped_up
    assert "topped up" not in whole + discarded
    assert "round discarded" in discarded
    assert "discarded" not in topped_up + whole


def test_the_line_leaves_out_what_was_not_measured(logged):
    progress = Progress()
    progress.begin()
    progress.end(1, 1)
    (line,) = lines(logged)
    assert line == "round 1/1 · no client was asked to train"


def test_the_line_estimates_the_time_left_from_the_mean_so_far(logged, monkeypatch):
    clock = iter([0.0, 0.0, 10.0, 10.0, 40.0, 40.0, 80.0])  # constructor, then each round's ends
    monkeypatch.setattr(module, "monotonic", lambda: next(clock))
    progress = Progress()
    for number in (1, 2, 3):
        progress.begin()
        progress.end(number, 3)
    left = [line.rpartition(" · ")[2] for line in lines(logged)]
    assert left == ["0:00:20 left", "0:00:20 left", "no client was asked to train"]


def test_a_round_ends_without_a_run_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    progress = Progress()
    progress.begin()
    progress.end(1, 1)
    assert list(tmp_path.iterdir()) == []

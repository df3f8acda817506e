"""The report of a run states its guarantees, its quality, and what limits them."""

import csv
import html
import os
import re
from dataclasses import replace

import pytest

from flower_ext.metrics import summarize
from flower_ext.privacy import AdversaryView, epsilon_text
from flower_ext.runs import NotARun, RunWriter, write_comparison, write_report
from flower_ext.runs.page import table, to_html
from tests.support.finished_runs import PLAN, finished
from tests.support.guarantees import client_level
from tests.support.run_summary import worst_case


def test_the_report_states_every_guarantee_with_all_its_words(tmp_path):
    run = finished(tmp_path / "run")
    page = write_report(run).read_text(encoding="utf-8")
    text = (run.path / "report.md").read_text(encoding="utf-8")
    for g in run.guarantees():
        line = next(
            row
            for row in text.splitlines()
            if row.startswith("| **") and f" {g.view.value} " in row and f" {g.basis} " in row
        )
        for word in (epsilon_text(g.epsilon), g.unit.value, g.relation.value, g.accountant, "0.01"):
            assert word in line
        for assumption in g.assumptions:
            assert f"assumes: {assumption}" in text
    assert "✗ not met" in text
    assert "not covered: test scores" in text
    assert "claim of the paper, not a promise" in page


def test_the_report_counts_releases_refusals_and_top_ups(tmp_path):
    run = finished(tmp_path / "run")
    write_report(run)
    text = (run.path / "report.md").read_text(encoding="utf-8")
    assert "| 4 | 4 | 0 | 0 | 1 |" in text  # reserved, committed, discarded, open, topped up
    for fact, value in {
        "rounds": "4",
        "training rounds": "2",
        "clients asked": "40",
        "answered": "36",
        "refused": "4",
        "training messages": "38",
        "MB down": "4.00",
        "MB up": "8.00",
        "training seconds": "1.0",
    }.items():
        assert f"| {fact} | {value} |" in text


@pytest.mark.figures
def test_other_scores_than_accuracy_are_shown_over_the_clients_that_have_them(tmp_path):
    run = RunWriter.create(tmp_path / "run", {"method": "uldp-avg", "dataset": "tcga-brca"})
    run.log(1, concordance_mean=0.7, concordance_worst_decile=0.6, loss_worst_decile=2.0)
    run.save_client_metrics(
        [{"partition": 0, "loss": 2.0, "concordance": 0.8}, {"partition": 1, "loss": 2.5}]
    )
    run.finish("completed")
    write_report(run)
    text = (run.path / "report.md").read_text(encoding="utf-8")
    for line in (
        "| concordance of the clients' models | value |",
        "| clients | 1 |",
        "Reported by half of the clients or fewer: concordance (1 of 2).",
    ):
        assert line in text
    assert "accuracy of" not in text
    assert "loss of the clients' models" not in text
    svgs = sorted(path.stem for path in (run.path / "figures").glob("*.svg"))
    assert svgs == ["concordance", "concordance_spread"]


@pytest.mark.figures
def test_the_first_screen_shows_model_quality_and_what_is_proved(tmp_path):
    run = finished(tmp_path / "run")
    write_report(run)
    text = (run.path / "report.md").read_text(encoding="utf-8")
    first = text[: text.index("![")]
    spread = summarize([row["accuracy"] for row in run.client_metrics()])
    assert f"Accuracy of the clients' models: **{spread.mean:.3f}** on average" in first
    assert f"{spread.worst_decile:.3f} over their worst tenth" in first
    for guarantee in run.guarantees():
        message = (
            f"**ε = {epsilon_text(guarantee.epsilon)}** "
            f"against an adversary who sees {guarantee.view.sees}"
        )
        assert (message in first) == (guarantee.basis == "provable")
        assert f"at δ = {guarantee.delta:.3g}" in first
    titles = [line for line in text.splitlines() if line.startswith("#### ")]
    assert [line.split()[1] for line in titles] == sorted(
        (line.split()[1] for line in titles),
        key="Provable,".__ne__,  # False comes first
    )


def test_the_report_warns_of_a_large_delta_beside_epsilon(tmp_path):
    run = finished(tmp_path / "run")
    run.save_guarantees([replace(one, delta=0.25, units=10) for one in run.guarantees()])
    write_report(run)
    text = (run.path / "report.md").read_text(encoding="utf-8")
    assert re.search(r"> δ = 0.25 is large for 10 clients: it permits publishing", text)


@pytest.mark.figures
def test_a_page_fits_small_screens_and_is_read_aloud(tmp_path):
    page = write_report(finished(tmp_path / "run")).read_text(encoding="utf-8")
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in page
    assert "<th>" not in page
    assert page.count("<table") == page.count('<div class="table"><table') > 0
    assert page.count("<svg") == page.count('<svg role="img" aria-label="') > 0
    assert page.count('<div class="figures">') == 1


def test_what_a_guarantee_rests_on_is_folded_until_it_is_asked_for(tmp_path):
    run = finished(tmp_path / "run")
    page = write_report(run).read_text(encoding="utf-8")
    folded = re.findall(r"<details><summary>(.*?)</summary>(.*?)</details>", page, re.DOTALL)
    assert len(folded) == len(run.guarantees())
    for summary, rest in folded:
        assert summary.split(",")[0] in ("Provable", "Published")
        assert "<h" not in rest
    assert page.count("assumes: ") == sum(rest.count("assumes: ") for _, rest in folded) > 0


@pytest.mark.figures
def test_every_figure_is_inside_the_page_and_beside_its_numbers(tmp_path):
    run = finished(tmp_path / "run")
    page = write_report(run).read_text(encoding="utf-8")
    svgs = sorted(p.stem for p in (run.path / "figures").glob("*.svg"))
    assert svgs == ["accuracy", "epsilon", "fairness", "messages", "time", "traffic"]
    assert page.count("<svg") == len(svgs)
    assert "http://" not in page.replace("http://www.w3.org", "").replace(
        "http://purl.org", ""
    ).replace("http://creativecommons.org", "")
    with (run.path / "figures" / "epsilon.csv").open(encoding="utf-8") as stream:
        rows = list(csv.DictReader(stream))
    assert {row["line"] for row in rows} == {"published", "provable, released models"}
    assert float(rows[-1]["ε"]) == pytest.approx(1.2)


@pytest.mark.figures
def test_the_same_run_draws_the_same_bytes(tmp_path):
    run = finished(tmp_path / "run")
    first = write_report(run).read_bytes()
    assert write_report(run).read_bytes() == first


def test_markup_in_a_configuration_stays_text(tmp_path):
    run = finished(tmp_path / "run", note="<script>alert(1)</script> | a")
    page = write_report(run).read_text(encoding="utf-8")
    assert "<script>" not in page
    assert "&lt;script&gt;" in page


@pytest.mark.figures
@pytest.mark.parametrize(
    "name", ["<script>", "a|b", "![a](https://b/c.svg)", "a](/b.svg)", "`a", "*a*", "&lt;", "a\\|b"]
)
def test_the_name_of_a_metric_stays_text_in_tables_and_titles(tmp_path, name):
    run = RunWriter.create(tmp_path / "run", {"method": "m", "dataset": "digits"})
    run.save_client_metrics([{"partition": 0, name: 0.5}])
    run.finish("completed")
    page = write_report(run).read_text(encoding="utf-8")
    assert f'<th scope="col">{html.escape(f"{name} of the clients")}' in page
    assert page.count("<svg") == 1
    for markup in ("<script", "<img", "<a ", "<em", "<code>a"):
        assert markup not in page
    cells = to_html(table((name, "x"), [(name, 1)]), title="", folder=tmp_path)
    assert cells.count(f">{html.escape(name)}</t") == 2


def test_what_a_client_wrote_cannot_break_the_table_of_missing_answers(tmp_path):
    run = finished(tmp_path / "run")
    run.log_missing(1, "evaluate", [3], ["node 3: a | b\r\nthen ![x](https://y/z.svg)"])
    page = write_report(run).read_text(encoding="utf-8")
    assert ">then ![x](https://y/z.svg)</td>" in page


def test_only_figures_of_the_run_are_put_inside_its_page(tmp_path):
    (tmp_path / "other.svg").write_text("<svg>other</svg>")
    text = f"![a]({tmp_path}/other.svg)\n\n![a](figures/../other.svg)"
    assert "<svg>" not in to_html(text, title="", folder=tmp_path)


def test_a_run_without_privacy_says_so(tmp_path):
    page = write_report(finished(tmp_path / "run", private=False)).read_text(encoding="utf-8")
    assert "No privacy is promised" in page


def test_a_failed_run_says_so_first(tmp_path):
    run = finished(tmp_path / "run")
    run.finish("failed", "out of memory")
    page = write_report(run).read_text(encoding="utf-8")
    assert "This run is failed" in page
    assert "out of memory" in page


def test_a_run_that_made_no_round_still_has_a_report(tmp_path):
    run = RunWriter.create(tmp_path / "run", {"method": "m"})
    assert "No round was completed" in write_report(run).read_text(encoding="utf-8")


@pytest.mark.figures
def test_a_comparison_has_a_line_a_method_with_its_spread_over_runs(tmp_path):
    runs = [
        finished(tmp_path / f"{method}-{seed}", method=method, accuracy=0.8 + 0.02 * seed)
        for method in ("dp2-fedsam", "centaur")
        for seed in range(3)
    ]
    page = write_comparison(runs, tmp_path, title="Both").read_text(encoding="utf-8")
    text = (tmp_path / "comparison.md").read_text(encoding="utf-8")
    # The means over ten clients are 0.755, 0.775 and 0.795: sample deviation 0.02.
    assert "| centaur | 3 | 0.775 ± 0.012 |" in text
    assert "| dp2-fedsam | 3 |" in text
    assert "<svg" in page


def test_runs_without_an_evaluation_cannot_be_compared(tmp_path):
    run = RunWriter.create(tmp_path / "run", {})
    with pytest.raises(NotARun, match="nothing to compare"):
        write_comparison([run], tmp_path, title="Nothing")


@pytest.mark.parametrize(("spent", "printed"), [(0.0004, "0.0004"), (2.00049, "2.01"), (2.0, "2")])
def test_a_printed_epsilon_is_never_less_than_what_was_spent(tmp_path, spent, printed):
    run = finished(tmp_path / "run")
    run.save_guarantees([replace(run.guarantees()[1], epsilon=spent)])
    write_report(run)
    assert f"| **{printed}** | 0.01 |" in (run.path / "report.md").read_text(encoding="utf-8")
    write_comparison([run], tmp_path, title="One")
    assert f"| {printed} (client, released-models, δ = 0.01) |" in (
        tmp_path / "comparison.md"
    ).read_text(encoding="utf-8")


def test_a_run_that_crashed_shows_what_its_ledger_reserved(tmp_path):
    run = finished(tmp_path / "run")
    (run.path / "guarantee.json").unlink()
    with (run.path / "metrics.jsonl").open("a") as stream:
        stream.write('{"round": 5, "acc')
    write_report(run)
    text = (run.path / "report.md").read_text(encoding="utf-8")
    assert "| 4 | 4 | 0 | 0 | 1 |" in text
    assert "No privacy is promised" not in text
    assert len(run.metrics()) == 4


def test_guarantees_that_say_less_than_the_ledger_are_called_out(tmp_path):
    run = finished(tmp_path / "run")
    assert "holds more than this table" not in write_report(run).read_text(encoding="utf-8")
    run.save_guarantees(client_level(PLAN.mechanism(), worst_case(2, 10)))
    assert "holds more than this table" in write_report(run).read_text(encoding="utf-8")


@pytest.mark.parametrize("status", ["running", "failed"])
def test_a_run_without_a_guarantee_yet_is_not_called_non_private(tmp_path, status):
    run = RunWriter.create(tmp_path / "run", {"perturbation": "output"})
    run.log(1, epsilon_published=0.4, epsilon_published_mean=0.2)
    if status == "failed":
        run.finish("failed", "disk full")
    write_report(run)
    text = (run.path / "report.md").read_text(encoding="utf-8")
    assert "No guarantee was recorded" in text
    assert "neither clipped nor noised" not in text
    assert f"This run is {status}" in text


def test_only_a_run_that_accounted_for_all_says_so_where_it_failed(tmp_path):
    run = RunWriter.create(tmp_path / "run", {})
    run.log(1, epsilon_provable=0.4)
    run.save_guarantees(client_level(PLAN.mechanism(), worst_case(1, 10)))
    run.log(2)
    run.finish("failed", "disk full")
    write_report(run)
    assert "covers what clients had been asked for" in (run.path / "report.md").read_text(
        encoding="utf-8"
    )
    RunWriter.open(run.path).finish("failed", "its process is gone")
    write_report(run)
    text = (run.path / "report.md").read_text(encoding="utf-8")
    assert "covers what clients had been asked for" not in text
    assert "written after round 1" in text


def test_scores_of_an_earlier_model_are_said_to_be(tmp_path):
    run = finished(tmp_path / "run")
    run.log(8, evaluation_messages=10)
    write_report(run)
    assert "The scores below" not in (run.path / "report.md").read_text(encoding="utf-8")
    run.log(9)
    write_report(run)
    text = (run.path / "report.md").read_text(encoding="utf-8")
    assert "of the model after round 8; the run ended after round 9" in text


def test_the_worst_tenth_of_a_loss_is_the_largest(tmp_path):
    run = finished(tmp_path / "run")
    rows = [{"partition": i, "accuracy": 0.5, "eval_loss": 1.0 + i} for i in range(10)]
    run.save_client_metrics(rows)
    write_report(run)
    text = (run.path / "report.md").read_text(encoding="utf-8")
    assert "| worst tenth of clients | 10.0000 |" in text


@pytest.mark.figures
def test_all_of_a_run_but_its_model_is_for_its_user_alone(tmp_path):
    """The directory says who was drawn and how many, which amplification needs to be secret."""
    old = os.umask(0o022)
    try:
        run = finished(tmp_path / "run")
        run.log_missing(2, "train", [3], ["round 2, node 7: the client failed"])
        run.forget_rounds(after=3)
        write_report(run)
    finally:
        os.umask(old)
    files = {p for p in run.path.rglob("*") if p.is_file()}
    assert {"run.json", "metrics.jsonl", "missing.jsonl", "ledger.jsonl"} < {p.name for p in files}
    assert {"guarantee.json", "clients.csv", "report.md", "report.html"} < {p.name for p in files}
    assert any(p.suffix == ".svg" for p in files)
    for path in files:
        assert path.stat().st_mode & 0o077 == 0, path


@pytest.mark.parametrize("file", ["metrics.jsonl", "missing.jsonl", "guarantee.json", "report"])
def test_a_guarantee_of_a_secret_draw_names_the_files_revealing_it(tmp_path, file):
    amplified = [
        g
        for g in finished(tmp_path / "run").guarantees()
        if g.basis == "provable" and g.view is AdversaryView.RELEASED_MODELS
    ]
    assert amplified
    for g in amplified:
        (rests,) = [text for text in g.assumptions if "was drawn" in text]
        assert file in rests
        assert "stay with the server" in rests


def secure_run(path, **more):
    """Return a run of three rounds whose second ended with a secure evaluation."""
    run = RunWriter.create(path, {"method": "dp2-fedsam", "rounds": 3, **more})
    run.log(1, evaluation_messages=16)  # too few answered
    scores = {"accuracy_mean": 0.7, "accuracy_mean_error": 0.06}
    scores |= {"loss_mean": 1.5, "loss_mean_error": 0.25}
    run.log(2, evaluation_messages=16, scored_clients=8.25, **scores)
    run.log(3, evaluation_messages=16)
    run.finish("completed")
    return run


@pytest.mark.figures
def test_noised_means_are_reported_with_their_errors_and_their_round(tmp_path):
    run = secure_run(tmp_path / "run")
    write_report(run)
    text = (run.path / "report.md").read_text(encoding="utf-8")
    assert "Accuracy of the clients' models: **0.700 ± 0.06** on average" in text
    assert "the model after round 2; the run ended after round 3" in text
    for fact in ("mean over clients, with noise | 0.7000", "due to noise | 0.0600"):
        assert f"{fact} |" in text
    assert "| standard error due to noise | 0.2500 |" in text  # of the loss
    assert text.count("| clients, with noise | 8.2 |") == 2
    drawn = (run.path / "figures" / "accuracy.csv").read_text(encoding="utf-8")
    assert "mean over clients, with noise" in drawn
    assert "worst tenth" not in text


def test_an_evaluation_that_released_nothing_is_not_called_none(tmp_path):
    run = RunWriter.create(tmp_path / "run", {"method": "dp2-fedsam"})
    run.log(1, evaluation_messages=16)
    run.finish("completed")
    write_report(run)
    text = (run.path / "report.md").read_text(encoding="utf-8")
    assert "No evaluation gave scores" in text
    assert "No client was evaluated" not in text


def test_runs_with_noised_means_are_compared_with_the_error_of_their_mean(tmp_path):
    runs = [secure_run(tmp_path / str(seed), seed=seed) for seed in (1, 2, 3, 4)]
    write_comparison([*runs, finished(tmp_path / "plain", method="fedavg")], tmp_path, title="Both")
    lines = (tmp_path / "comparison.md").read_text(encoding="utf-8").splitlines()
    (secure,) = (line for line in lines if line.startswith("| dp2-fedsam"))
    assert "| 4 | 0.700 ± 0.000 (± 0.03 by noise) |" in secure
    assert "| – | – |" in secure  # no client's score is known
    (plain,) = (line for line in lines if line.startswith("| fedavg"))
    assert "by noise" not in plain


def test_the_newest_answer_to_a_query_is_shown_with_its_error(tmp_path):
    run = secure_run(tmp_path / "run")
    noised = {"label_0": 46.25, "label_0_error": 5.5, "label_1": -2.0, "label_1_error": 5.5}
    run.log(4, **noised, plain=1.0)
    run.log(5, label_0=40.0, label_0_error=4.0)
    write_report(run)
    text = (run.path / "report.md").read_text(encoding="utf-8")
    answers = text[text.index("## Answers to queries") : text.index("## Rounds")]
    lines = [line for line in answers.splitlines() if line.startswith("| ")][2:]
    assert lines == ["| label_0 | 40 | 4 | 5 |", "| label_1 | -2 | 5.5 | 4 |"]  # no score
    assert "Noise can make a small count negative" in answers


def test_a_run_without_queries_has_no_table_of_answers(tmp_path):
    for run in (finished(tmp_path / "plain"), secure_run(tmp_path / "secure")):
        write_report(run)
        text = (run.path / "report.md").read_text(encoding="utf-8")
        assert "Answers to queries" not in text
        assert "## Statistics" not in text


def test_a_long_answer_is_cut_and_the_report_says_where_it_is(tmp_path):
    run = RunWriter.create(tmp_path / "run", {"method": "m"})
    numbers = {f"label_{i}": float(i) for i in range(150)}
    run.log(1, **numbers, **{f"{name}_error": 1.0 for name in numbers})
    run.finish("completed")
    write_report(run)
    text = (run.path / "report.md").read_text(encoding="utf-8")
    assert text.count("| label_") == 100
    assert "the first 100 of 150 numbers; `metrics.jsonl` has all" in text

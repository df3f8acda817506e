"""The whole app in this process: every method, its run directory, and refused settings."""

import json

import pytest
from safetensors.numpy import load_file

from flower_ext.federation import run_in_process
from flower_ext.privacy import AdversaryView, Ledger
from flower_ext.runs import NotARun, RunDirectory
from flower_ext.training import UnshareableModel
from tests.support.apps import DP2_FEDSAM
from tests.support.grids import grid

METHODS = (
    "dp2-fedsam",
    "centaur",
    "dp-fedavg",
    "dp-fedavg-ft",
    "dp-fedsam",
    "dp-fedsam-ft",
    "fedper",
    "fedrep",
    "fedbn",
    "apfl",
    "fedavg",
    "p-fedsam",
)


def run(path, **overrides):
    server, client = DP2_FEDSAM.parts()
    facts = {"clients": 8, "rounds": 3, "sampling_rate": 0.5, "evaluate_every": 2, **overrides}
    settings = DP2_FEDSAM.config(run_directory=str(path), **facts)
    run_in_process(server, client, num_clients=settings["clients"], run_config=settings)
    return RunDirectory.open(path)


@pytest.mark.report
@pytest.mark.figures
@pytest.mark.parametrize("method", grid(METHODS, {"dp2-fedsam", "fedbn", "fedavg"}.__contains__))
def test_every_method_leaves_a_complete_run_directory(method, tmp_path):
    run_ = run(tmp_path / "run", method=method, noise_multiplier=1.0)
    files = {p.name for p in run_.path.iterdir()}
    expected = {"run.json", "metrics.jsonl", "model.safetensors", "clients.csv", "guarantee.json"}
    assert expected | {"report.md", "report.html", "figures"} <= files
    assert run_.status == "completed"
    assert run_.metadata["versions"]["flwr"]
    rows = run_.metrics()
    assert [row["round"] for row in rows] == [1, 2, 3]
    assert "accuracy_mean" in rows[1]
    assert "accuracy_worst_decile" in rows[1]
    private = method not in ("fedavg", "p-fedsam")
    assert ("epsilon_provable" in rows[1]) == private
    published = private and method not in ("fedper", "fedbn", "apfl")
    assert ("epsilon_published" in rows[1]) == published
    assert bool(run_.guarantees()) == private
    assert ("ledger.jsonl" in files) == private
    personal = method in ("dp2-fedsam", "centaur", "p-fedsam", "fedper", "fedrep")
    names = set(load_file(run_.path / "model.safetensors"))
    assert not any(name.endswith("running_mean") for name in names)
    assert any(name.startswith("head") for name in names) == (not personal)
    assert len(run_.client_metrics()) == 8
    for svg in (run_.path / "figures").glob("*.svg"):
        assert svg.with_suffix(".csv").exists()


def test_the_run_spends_what_it_was_given_and_the_ledger_agrees(tmp_path):
    run_ = run(tmp_path / "run", epsilon=3.0)
    models = run_.guarantees()[1]
    assert 2.97 < models.epsilon <= 3.0
    entries = Ledger.read(run_.ledger_path)
    assert [e["kind"] for e in entries] == ["reserve", "commit"] * 3


@pytest.mark.report
def test_the_published_calibration_gives_the_published_and_the_provable_epsilon(
    tmp_path,
):
    facts = {"clients": 20, "sampling_rate": 0.1, "sampling": "fixed-size"}
    run_ = run(tmp_path / "run", calibration="published", epsilon=3.0, **facts)
    published, models, *_ = run_.guarantees()
    assert published.epsilon == pytest.approx(3.0)
    assert run_.status == "completed"
    assert models.epsilon > 3.0  # with its own sampling, the theorem promises too much
    assert "not a promise of this run" in (run_.path / "report.md").read_text(encoding="utf-8")


def test_personalisation_learns_what_a_shared_model_cannot(tmp_path):
    """With two classes per client and no noise, personal heads beat one model for all."""
    facts = {"clients": 20, "rounds": 8, "evaluate_every": 8}
    accuracies = {
        method: run(tmp_path / method, method=method, **facts).metrics()[-1]["accuracy_mean"]
        for method in ("p-fedsam", "fedavg")
    }
    assert accuracies["p-fedsam"] > max(0.8, accuracies["fedavg"])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"method": "fedsam2"}, "method='fedsam2': expected one of"),
        ({"sampling": "often"}, "sampling='often': expected one of poisson"),
        ({"dataset": "imagenet"}, "dataset='imagenet': expected one of digits"),
        ({"partition": "even"}, "partition='even': expected one of pathological"),
        ({"classes_per_client": 11}, "classes_per_partition=11"),
        ({"epsilon": -1.0}, r"epsilon=-1\.0: expected a finite number > 0"),
        ({"epsilon": "two"}, "epsilon='two': expected a finite number > 0"),
        ({"clipping_norm": 0.0}, r"run-config clipping-norm=0\.0"),
        ({"learning_rate": 0.0}, r"run-config learning-rate=0\.0"),
        ({"model": "gpt"}, "model='gpt'"),
        ({"sam_radius": 0.0}, r"sam-radius=0\.0 with method='dp2-fedsam': expected a number > 0"),
        ({"sam_radius": 0.0, "method": "p-fedsam"}, r"sam-radius=0\.0 with method='p-fedsam'"),
        ({"sam_radius": 0.0, "method": "dp-fedsam"}, r"sam-radius=0\.0 with method='dp-fedsam'"),
        ({"noise_placement": "moon"}, "noise-placement='moon'"),
        (
            {"method": "apfl", "apfl_weight": 2.0},
            r"apfl-weight=2\.0: expected a number in \[0, 1\]",
        ),
        ({"method": "apfl", "momentum": 0.5}, r"local\.momentum=0\.5: leave it out"),
        (
            {"method": "fedbn", "model": "digits-mlp"},
            "expected a model with trainable normalisation layers",
        ),
        ({"method": "fedper", "calibration": "published"}, "'published' with method='fedper'"),
    ],
)
def test_bad_settings_are_named_and_leave_no_run_directory(overrides, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        run(tmp_path / "run", **overrides)
    assert not (tmp_path / "run").exists()


def test_running_statistics_are_shared_by_no_method(tmp_path):
    with pytest.raises(UnshareableModel, match="keeps running statistics of the data"):
        run(tmp_path / "run", method="fedper", model="digits-mlp-bn", noise_multiplier=1.0)


def test_a_method_without_sam_needs_no_radius(tmp_path):
    run_ = run(tmp_path / "run", method="centaur", sam_radius=0.0, rounds=1, noise_multiplier=1.0)
    assert run_.status == "completed"


def test_half_a_client_more_makes_a_cohort_of_fixed_size_one_larger(tmp_path):
    facts = {"clients": 10, "sampling_rate": 0.25, "sampling": "fixed-size", "rounds": 1}
    (row,) = run(tmp_path / "run", method="fedavg", **facts).metrics()
    assert row["cohort"] == 3


def test_a_run_that_fails_says_so_in_its_directory(tmp_path):
    server, client = DP2_FEDSAM.parts()
    facts = {"clients": 8, "rounds": 1, "noise_multiplier": 1.0}
    settings = DP2_FEDSAM.config(run_directory=str(tmp_path / "run"), **facts)
    with pytest.raises(RuntimeError, match="7 of 8|9 nodes"):
        run_in_process(server, client, num_clients=9, run_config=settings)
    facts = json.loads((tmp_path / "run" / "run.json").read_text())
    assert facts["status"] == "failed"
    assert "9 nodes are connected" in facts["reason"]


def test_a_run_directory_is_never_overwritten(tmp_path):
    facts = {"rounds": 1, "noise_multiplier": 1.0}
    run(tmp_path / "run", **facts)
    with pytest.raises(NotARun, match="not empty; name a new one"):
        run(tmp_path / "run", **facts)


SECURE = {"aggregation": "secure", "evaluation": "secure", "sampling": "fixed-size"}


@pytest.mark.report
def test_scores_in_secure_sums_are_paid_for_and_reported_as_means(tmp_path):
    clients = 24  # five times the noise's standard deviation: below a count of 1 are no means
    settings = {"epsilon": 6.0, "evaluation_loss_bound": 4.0, "clients": clients, **SECURE}
    run_ = run(tmp_path / "run", **settings)
    rows = run_.metrics()
    assert run_.status == "completed"
    assert [row.get("evaluation_messages", 0) for row in rows] == [0, 2 * clients, 2 * clients]
    by_view = {one.view: one for one in run_.guarantees() if one.basis == "provable"}
    models = by_view[AdversaryView.RELEASED_MODELS]
    assert 5.8 < models.epsilon <= 6.0
    assert "2 sums of scores" in models.source
    assert not any("scores" in text for one in by_view.values() for text in one.not_covered)
    entries = Ledger.read(run_.ledger_path)
    assert [e["kind"] for e in entries].count("reserve") == 3 + 2
    assert run_.client_metrics() == []
    text = (run_.path / "report.md").read_text(encoding="utf-8")
    assert "un-noised at evaluation" not in text
    assert f"**{rows[-1]['accuracy_mean']:.3f} ± {rows[-1]['accuracy_mean_error']:.2g}**" in text
    assert "No client was evaluated" not in text


def test_with_hardly_any_noise_the_mean_score_matches_the_clients_scores(tmp_path):
    settings = {"noise_multiplier": 1.0, "seeded_noise": True, "evaluation_noise_multiplier": 0.01}
    settings |= {"colluding_share": 0.0}  # of a cohort of four
    ours = run(tmp_path / "secure", **settings, **SECURE).metrics()
    plain = {**settings, **SECURE, "evaluation": "plain"}
    theirs = run(tmp_path / "plain", **plain).metrics()
    for one, other in zip(ours[1:], theirs[1:], strict=True):
        error = one["accuracy_mean_error"]
        assert 0 < error < 0.01
        assert one["accuracy_mean"] == pytest.approx(other["accuracy_mean"], abs=6 * error)
        assert one["scored_clients"] == pytest.approx(8, abs=0.2)


def test_settings_of_secure_evaluations_that_do_not_fit_are_refused_by_name(tmp_path):
    for wrong, message in (
        ({"aggregation": "plain"}, "evaluation='secure' with aggregation='plain'"),
        ({"evaluate_every": 0}, "evaluation='secure' with evaluate-every=0"),
        ({"evaluation_share": 1.0}, r"evaluation-share=1.0: expected a number in \(0, 1\)"),
        ({"noise_multiplier": 1.0}, "evaluation-noise-multiplier=0.0 with noise-multiplier=1.0"),
        ({"method": "fedavg"}, "with method='fedavg'"),
    ):
        with pytest.raises(ValueError, match=message):
            run(tmp_path / "run", **{**SECURE, **wrong})

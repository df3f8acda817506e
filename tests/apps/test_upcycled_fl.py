"""The whole app in this process: fourteen methods, both perturbations, and refused settings."""

import math

import pytest

from flower_ext.data import DataNotFound
from flower_ext.federation import run_in_process
from flower_ext.privacy import AdversaryView, PrivacyUnit
from flower_ext.privacy.guarantee import PreconditionFailed
from flower_ext.runs import RunDirectory
from tests.support.apps import UPCYCLED_FL
from tests.support.grids import grid

METHODS = ("fedavg", "fedavgm", "fedprox", "fedyogi", "scaffold", "feddyn", "pfedme")
SGD = {
    "classes": 0,
    "model": "",
    "unit_features": False,
    "perturbation": "none",
    "noise_stddev": 1.0,
    "solver": "sgd",
    "proximal_weight": 0.0,
}
EXACT = {
    "method": "fedprox",
    "proximal_weight": 0.5,
    "solver": "newton",
    "model": "binary-logistic",
    "classes": 2,
    "unit_features": True,
}


def run(path, **overrides):
    server, client = UPCYCLED_FL.parts()
    facts = {
        **SGD,
        "clients": 4,
        "rounds": 4,
        "generated": True,
        "sampling_rate": 0.5,
        "local_epochs": 2,
        "evaluate_every": 2,
        **overrides,
    }
    settings = UPCYCLED_FL.config(run_directory=str(path), **facts)
    run_in_process(server, client, num_clients=settings["clients"], run_config=settings)
    return RunDirectory.open(path)


@pytest.mark.report
@pytest.mark.figures
@pytest.mark.parametrize("method", grid(METHODS, "scaffold".__eq__))
def test_upcycling_a_method_sends_half_as_much_in_as_many_rounds(method, tmp_path):
    plain = run(tmp_path / "plain", method=method, upcycled=False)
    upcycled = run(tmp_path / "upcycled", method=method)
    for one in (plain, upcycled):
        files = {p.name for p in one.path.iterdir()}
        assert {"run.json", "metrics.jsonl", "model.safetensors", "clients.csv"} <= files
        assert {"report.md", "report.html", "figures"} <= files
        assert one.status == "completed"
        assert len(one.client_metrics()) == 4
    assert [row["messages"] for row in plain.metrics()] == [4, 4, 4, 4]
    assert [row["messages"] for row in upcycled.metrics()] == [4, 0, 4, 0]
    for way in ("bytes_down", "bytes_up"):
        sent = [row[way] for row in upcycled.metrics()]
        assert sent[0] > 0
        assert sent[1::2] == [0, 0]
        assert sum(sent) * 2 == sum(row[way] for row in plain.metrics())
    # Silent rounds are evaluated as well.
    assert [row["round"] for row in upcycled.metrics() if "accuracy_mean" in row] == [2, 4]


@pytest.mark.parametrize("method", grid(METHODS, lambda method: method in ("fedavgm", "scaffold")))
def test_twice_the_rounds_with_coefficient_zero_is_the_plain_run(method, tmp_path):
    """Cohorts, batches and stragglers are the same, so only upcycling differs."""
    facts = {"method": method, "straggler_ratio": 0.5, "evaluate_every": 1}
    plain = run(tmp_path / "plain", upcycled=False, rounds=2, **facts)
    upcycled = run(tmp_path / "upcycled", coefficient=0.0, rounds=4, **facts)
    losses = [row["loss_mean"] for row in upcycled.metrics()]
    assert losses[0::2] == losses[1::2] == [row["loss_mean"] for row in plain.metrics()]


@pytest.mark.report
@pytest.mark.parametrize(
    "perturbation", ["output", pytest.param("objective", marks=pytest.mark.full)]
)
def test_a_private_run_states_both_epsilons_and_upcycling_lowers_both(perturbation, tmp_path):
    runs = [
        run(tmp_path / f"{up}", upcycled=up, sampling_rate=1.0, perturbation=perturbation, **EXACT)
        for up in (False, True)
    ]
    for one in runs:
        guarantees = one.guarantees()
        assert [g.basis for g in guarantees] == ["published", "provable"]
        for g in guarantees:
            assert g.unit is PrivacyUnit.RECORD
            assert g.view is AdversaryView.EACH_UPLOAD
            assert 0 < g.epsilon < math.inf
        last = one.metrics()[-1]
        for basis in ("published", "provable"):
            assert last[f"epsilon_{basis}_mean"] < last[f"epsilon_{basis}"]
    for plain, upcycled in zip(*(one.guarantees() for one in runs), strict=True):
        assert upcycled.epsilon < plain.epsilon
    text = (runs[0].path / "report.md").read_text(encoding="utf-8")
    assert "record" in text
    assert "each-upload" in text


def test_noise_never_depends_on_the_seed_unless_asked_to(tmp_path):
    facts = {"perturbation": "output", "evaluate_every": 4, **EXACT}
    losses = {
        seeded: [
            run(tmp_path / f"{seeded}-{n}", seeded_noise=seeded, **facts).metrics()[-1]["loss_mean"]
            for n in range(2)
        ]
        for seeded in (False, True)
    }
    assert losses[True][0] == losses[True][1]
    assert losses[False][0] != losses[False][1]


@pytest.mark.parametrize(
    "facts",
    [
        {"unit_features": False},  # nothing bounds the gradient
        {"model": "synthetic-logistic"},  # softmax regression is not a generalised linear model
    ],
)
def test_objective_perturbation_of_what_the_theorem_does_not_cover_is_refused(facts, tmp_path):
    with pytest.raises(PreconditionFailed):
        run(tmp_path / "run", perturbation="objective", **{**EXACT, **facts})


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"method": "fedsgd"}, "method='fedsgd': expected one of fedavg"),
        ({"schedule": "rising"}, "schedule='rising': expected one of constant"),
        ({"coefficient": -0.5}, r"coefficient=-0\.5"),
        ({"perturbation": "input"}, "perturbation='input': expected one of none, output"),
        ({"solver": "adam"}, "solver='adam': expected one of sgd, newton"),
        ({"dataset": "synthetic-2-2"}, "dataset='synthetic-2-2': expected one of"),
        ({"straggler_ratio": 1.5}, r"ratio=1\.5"),
        ({"model": "gpt"}, "model='gpt'"),
        ({"method": "feddyn", "regularization": 0.0}, r"regularization=0\.0"),
        ({"method": "fedprox", "server_learning_rate": 0.5}, r"server-learning-rate=0\.5 with"),
    ],
)
def test_bad_settings_end_the_run_with_the_name_of_the_setting(overrides, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        run(tmp_path / "run", **overrides)


def test_help_with_missing_data_proposes_no_data_set_that_the_app_refuses(tmp_path):
    with pytest.raises(DataNotFound, match="FLOWER_EXT_DATA") as error:
        run(tmp_path / "run", dataset="letters", data_folder=str(tmp_path), generated=False)
    assert "digits" not in str(error.value)

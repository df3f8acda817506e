"""The whole app in this process: every method, both kinds of noise, the planner, bad settings."""

import math
import sys
import tomllib

import numpy as np
import pytest
from safetensors.numpy import load_file

from flower_ext.federation import run_in_process
from flower_ext.runs import RunDirectory
from tests.support.apps import DP_DITTO
from tests.support.grids import grid

METHODS = ("ditto", "pfedme", "fedamp", "apple", "fedala")
AS_PUBLISHED = {"noise": "upload", "calibration": "published", "delta": 0.01}
SCORES = ("mean", "std", "variance", "worst_decile", "jain")


def run(path, **overrides):
    server, client = DP_DITTO.parts()
    facts = {"clients": 5, "rounds": 3, "classes_per_client": 3, "evaluate_every": 2}
    facts |= {**AS_PUBLISHED, **overrides}
    settings = DP_DITTO.config(run_directory=str(path), **facts)
    run_in_process(server, client, num_clients=settings["clients"], run_config=settings)
    return RunDirectory.open(path)


@pytest.mark.report
@pytest.mark.figures
@pytest.mark.parametrize(
    "method",
    grid(
        [*METHODS, *(f"dp-{method}" for method in METHODS)],
        lambda method: method in ("dp-ditto", "apple"),
    ),
)
def test_every_method_leaves_a_complete_run_directory_with_fairness_in_every_evaluation(
    method, tmp_path
):
    run_ = run(tmp_path / "run", method=method)
    assert run_.status == "completed"
    assert run_.metadata.get("refused", 0) == 0
    rows = run_.metrics()
    assert [row["round"] for row in rows] == [1, 2, 3]
    for row in rows[1:]:
        for score in ("accuracy", "loss", "training_loss"):
            assert all(math.isfinite(row[f"{score}_{which}"]) for which in SCORES)
    assert rows[2]["training_loss_variance"] == pytest.approx(rows[2]["training_loss_std"] ** 2)
    private = method.startswith("dp-")
    assert [g.basis for g in run_.guarantees()] == ["published", "provable"] * private
    assert len(run_.client_metrics()) == 5
    assert (run_.path / "report.html").exists()


def test_the_default_run_ends_at_an_epsilon_that_is_provable(tmp_path):
    names = ("noise", "calibration", "delta", "epsilon")
    as_shipped = {name: DP_DITTO.config()[name] for name in names}
    run_ = run(tmp_path / "run", **as_shipped)
    (provable,) = [g for g in run_.guarantees() if g.basis == "provable"]
    assert provable.epsilon == pytest.approx(as_shipped["epsilon"], rel=1e-3)
    assert provable.delta == as_shipped["delta"] < 1 / (20 * 75)


def test_the_published_target_is_met_and_the_provable_epsilon_is_beside_it(tmp_path):
    published, provable = run(tmp_path / "run", epsilon=7.0).guarantees()
    assert published.epsilon == pytest.approx(7.0)
    assert not published.conditions_hold
    assert provable.epsilon > 1000


def test_noise_in_clipped_steps_meets_a_provable_target(tmp_path):
    run_ = run(tmp_path / "run", noise="steps", calibration="provable", epsilon=5.0)
    published, provable = run_.guarantees()
    assert provable.epsilon == pytest.approx(5.0, rel=1e-4)
    assert provable.epsilon > 4.9
    assert published.epsilon > 0
    assert "noised steps" in provable.source


def test_personalisation_learns_and_is_fairer_than_the_shared_model_alone(tmp_path):
    """With two classes per client, a small λ beats λ = 2, and clients do about equally well."""
    facts = {"clients": 10, "rounds": 12, "evaluate_every": 12, "classes_per_client": 2}
    personal, shared = (
        run(tmp_path / str(weight), method="ditto", global_weight=weight, **facts).metrics()[-1]
        for weight in (0.1, 2.0)
    )
    assert personal["accuracy_mean"] > max(0.85, shared["accuracy_mean"])
    assert personal["training_loss_std"] < shared["training_loss_std"]


def test_noise_reaches_personal_models_by_their_global_weight_only(tmp_path):
    """At λ = 0, a run with much noise ends in the same personal models as one with little."""
    noisy, quiet, far = (
        run(tmp_path / name, epsilon=epsilon, global_weight=weight).client_metrics()
        for name, epsilon, weight in (("a", 0.1, 0.0), ("b", 1000.0, 0.0), ("c", 0.1, 1.0))
    )
    assert [row["loss"] for row in noisy] == [row["loss"] for row in quiet]
    assert [row["loss"] for row in noisy] != [row["loss"] for row in far]


def test_the_planner_chooses_fewer_rounds_where_the_budget_is_small(tmp_path):
    facts = {
        "planner": "bound",
        "calibration": "provable",
        "noise": "steps",
        "local_epochs": 1,
        "batch_size": 0,
        "rounds": 12,
        "global_weight": 0.5,
    }
    chosen = {
        epsilon: run(tmp_path / str(epsilon), epsilon=epsilon, **facts) for epsilon in (0.5, 10.0)
    }
    rounds = {epsilon: len(run_.metrics()) for epsilon, run_ in chosen.items()}
    assert 1 <= rounds[0.5] < rounds[10.0] <= 12
    for epsilon, run_ in chosen.items():
        assert run_.config["planned-rounds"] == rounds[epsilon]
        assert run_.guarantees()[1].epsilon == pytest.approx(epsilon, rel=1e-3)


def test_a_pilot_run_finds_the_constants_leaves_them_and_plans_by_them(tmp_path):
    facts = {
        "model": "digits-logistic",
        "planner": "pilot",
        "pilot_rounds": 3,
        "calibration": "provable",
        "noise": "steps",
        "batch_size": 0,
        "epsilon": 1000.0,
        "global_weight": 1.0,
        "learning_rate": 0.5,
        "personal_learning_rate": 0.5,
        "rounds": 4,
    }
    run_ = run(tmp_path / "run", **facts)
    pilot_settings = tomllib.loads((run_.path / "pilot.toml").read_text())
    assert pilot_settings["dimension"] == 650  # of digits-logistic
    assert 0 < pilot_settings["strong-convexity"] <= pilot_settings["smoothness"]
    names = ("strong_convexity", "smoothness", "initial_gap", "initial_distance")
    again = {"planner": "bound", **{name: pilot_settings[name.replace("_", "-")] for name in names}}
    same = run(tmp_path / "same", **{**facts, **again})
    assert same.config["planned-rounds"] == run_.config["planned-rounds"] >= 1
    assert not (same.path / "pilot.toml").exists()
    for one, piloted in ((run_, True), (same, False)):
        provable = one.guarantees()[1]
        assert any("pilot.toml" in text for text in provable.not_covered) == piloted


def test_the_planner_says_where_no_round_is_worth_its_noise(tmp_path):
    facts = {"planner": "bound", "calibration": "provable", "initial_distance": 0.0}
    with pytest.raises(ValueError, match="no number of rounds makes the bound"):
        run(tmp_path / "run", **facts)


def test_a_pilot_run_that_plans_no_round_prints_the_constants_it_found(tmp_path):
    facts = {"planner": "pilot", "model": "digits-logistic", "pilot_rounds": 20, "noise": "steps"}
    with pytest.raises(ValueError, match="no number of rounds makes the bound") as refused:
        run(tmp_path / "run", calibration="provable", epsilon=0.1, **facts)
    constants = tomllib.loads(str(refused.value).partition("The pilot run found\n")[2])
    assert 0 < constants["strong-convexity"] <= constants["smoothness"]
    assert constants["dimension"] == 650


def test_only_a_run_with_a_planner_needs_the_plugin(tmp_path, monkeypatch):
    for name in [*sys.modules]:
        if name.startswith(("dp_ditto_app", "flower_ext_planner")):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "flower_ext_planner", None)
    assert run(tmp_path / "run").status == "completed"
    for planner in ("bound", "pilot"):
        with pytest.raises(ValueError, match=f"'{planner}' needs a plug-in: pip install flower-e"):
            run(tmp_path / planner, planner=planner)


def test_the_shared_model_differs_by_method(tmp_path):
    finals = [
        load_file(run(tmp_path / m, method=m).path / "model.safetensors")["head.weight"]
        for m in METHODS[1:]
    ]
    for i, one in enumerate(finals):
        assert all(not np.allclose(one, other, atol=1e-4) for other in finals[i + 1 :])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"method": "dp-mine"}, "method='dp-mine': expected one of dp-ditto"),
        ({"dataset": "imagenet"}, "dataset='imagenet': expected one of digits"),
        ({"model": "gpt"}, "model='gpt'"),
        ({"rounds": 0}, "rounds=0: expected an integer >= 1"),
        ({"epsilon": 0.0}, r"epsilon=0\.0: expected a finite number > 0"),
        ({"epsilon": -1.0, "calibration": "provable"}, r"epsilon=-1\.0"),
        ({"delta": 1.0}, r"delta=1\.0"),
        ({"clipping_norm": 0.0}, r"run-config clipping-norm=0\.0"),
        ({"global_weight": 2.5}, r"global_weight=2\.5: expected .* \[0, 2\]"),
        ({"global_weight": -0.5}, r"global-weight=-0\.5"),
        ({"examples_per_client": 100_000}, "examples-per-client=100000: expected 1 …"),
        ({"noise": "moon"}, "noise='moon'"),
        ({"calibration": "guess"}, "calibration='guess'"),
        ({"planner": "oracle"}, "planner='oracle'"),
        ({"method": "ditto", "planner": "bound"}, "'bound' with method='ditto': expected method="),
        ({"method": "dp-apple", "planner": "bound"}, "method='dp-apple': expected method='dp-dit"),
        ({"method": "dp-fedala", "planner": "pilot"}, "'pilot' with method='dp-fedala': expected"),
        ({"planner": "pilot"}, "the losses are not strongly convex"),
        ({"planner": "pilot", "pilot_rounds": 1}, "rounds=1 of the pilot"),
        ({"method": "dp-apple", "noise": "steps"}, "expected noise='upload'"),
        (
            {"noise": "steps", "gradient_clipping_norm": 0.0},
            r"run-config gradient-clipping-norm=0\.0",
        ),
        ({"method": "fedala", "sample_fraction": 0.0}, r"sample-fraction=0\.0"),
    ],
)
def test_bad_settings_end_the_run_with_the_name_of_the_setting(overrides, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        run(tmp_path / "run", **overrides)

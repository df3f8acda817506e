"""Projects as Flower's examples are, with one strategy or one mod of this package dropped in."""

import os
import subprocess
import sys
from importlib import import_module
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from flwr.clientapp.mod import LocalDpMod, adaptiveclipping_mod, fixedclipping_mod
from flwr.serverapp.strategy import DifferentialPrivacyClientSideFixedClipping, FedAdam, FedAvg

from flower_ext.algorithms import DPFedAvg, Hosted, Upcycled
from flower_ext.federation import (
    FederatedStrategy,
    FederationNotReady,
    InProcessGrid,
    client_level_dp_mod,
)
from flower_ext.federation.engines.run_app import run_app
from flower_ext.privacy import FullParticipation, NonPrivatePlan, SecureSum
from tests.support.apps import EXAMPLES
from tests.support.grids import grid

EXAMPLES.parts()  # makes the package importable
projects = import_module("flower_projects.projects")
server = import_module("flower_projects.server_app")
CLIENTS, plan, start = server.CLIENTS, server.plan, server.start

ALL = [projects.quickstart, projects.custom_mods, projects.opacus]


def fed_avg() -> FedAvg:
    return FedAvg(min_train_nodes=CLIENTS, min_available_nodes=CLIENTS)


def without_privacy(weighting: str = "clients") -> NonPrivatePlan:
    return NonPrivatePlan(sampling=FullParticipation(CLIENTS), weighting=weighting)


STRATEGIES = {
    "unchanged": fed_avg,
    "upcycled": lambda: Upcycled(fed_avg()),
    "upcycled adam": lambda: Upcycled(FedAdam(min_available_nodes=CLIENTS)),
    "without privacy": lambda: FederatedStrategy(DPFedAvg(), without_privacy("examples")),
    "hosted": lambda: FederatedStrategy(Hosted(fed_avg()), without_privacy()),
    "noise of the server": lambda: FederatedStrategy(DPFedAvg(), plan(noise_placement="server")),
}


def run(app, strategy):
    """Run two rounds; return the accuracies after each, and the model."""
    result = start(InProcessGrid(app, CLIENTS), strategy)
    assert getattr(strategy, "refusals", []) == []
    model = {name: array.numpy() for name, array in result.arrays.items()}
    assert all(np.isfinite(array).all() for array in model.values())
    return result, model


DAILY = {
    *((projects.quickstart, name) for name in STRATEGIES),
    (projects.custom_mods, "hosted"),
    (projects.custom_mods, "noise of the server"),
    (projects.opacus, "noise of the server"),
}


@pytest.mark.parametrize(
    ("project", "name"),
    grid(product(ALL, STRATEGIES), DAILY.__contains__),
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_project_runs_with_any_of_these_strategies(project, name):
    strategy = STRATEGIES[name]()
    result, _ = run(project(), strategy)
    ours = isinstance(strategy, FederatedStrategy)
    assert [*result.evaluate_metrics_clientapp] == [1, 2]
    for scores in result.evaluate_metrics_clientapp.values():
        assert 0 <= scores["accuracy_mean" if ours else "accuracy"] <= 1


@pytest.mark.parametrize("project", ALL[:2], ids=lambda project: project.__name__)
def test_averaging_without_privacy_gives_the_model_of_flower(project):
    _, expected = run(project(), fed_avg())
    for name in ("without privacy", "hosted"):
        _, model = run(project(), STRATEGIES[name]())
        for key, array in expected.items():
            np.testing.assert_allclose(model[key], array, atol=1e-6)


@pytest.mark.parametrize(
    "project",
    grid(ALL, lambda project: project is not projects.opacus),
    ids=lambda project: project.__name__,
)
def test_with_our_mod_first_uploads_are_noised_after_all_other_mods(project):
    projects.scalars.clear()
    strategy = FederatedStrategy(DPFedAvg(), plan())
    run(project(client_level_dp_mod()), strategy)
    exact = [one for one in strategy.guarantees() if one.basis == "provable"]
    assert min(one.epsilon for one in exact) == pytest.approx(8.0, rel=1e-2)
    if project is projects.custom_mods:
        rehearsal = [1]
        steps = [line["step"] for line in projects.scalars]
        assert steps == rehearsal + [1] * CLIENTS + [2] * CLIENTS
        assert all(line["train_loss"] > 0 for line in projects.scalars)


def test_our_mod_after_mods_that_read_metrics_is_refused_with_its_place():
    app = projects.quickstart(projects.scalars_mod, client_level_dp_mod())
    with pytest.raises(FederationNotReady, match="that mod before all others of ClientApp"):
        run(app, strategy := FederatedStrategy(DPFedAvg(), plan()))
    assert strategy.participations.rounds == 0


LEFT_OVER = {
    "fixedclipping_mod": fixedclipping_mod,
    "adaptiveclipping_mod": adaptiveclipping_mod,
}


@pytest.mark.parametrize("mod", LEFT_OVER)
def test_a_clipping_mod_of_the_former_strategy_is_to_be_taken_out(mod):
    app = projects.quickstart(LEFT_OVER[mod])
    fixed = DifferentialPrivacyClientSideFixedClipping(fed_avg(), 1.0, 1.0, CLIENTS)
    start(InProcessGrid(app, CLIENTS), fixed)
    strategy = FederatedStrategy(DPFedAvg(), plan(noise_placement="server"))
    message = f"remove mods that belong to a different strategy from ClientApp.*{mod} requires"
    with pytest.raises(FederationNotReady, match=message):
        run(app, strategy)
    assert strategy.participations.rounds == 0


def test_local_noise_of_flower_breaks_evaluation_alone():
    """Beside our plan it is noise of the ClientApp's own, of which no guarantee speaks."""
    app = projects.quickstart(LocalDpMod(1.0, 0.01, 1.0, 1e-5))
    strategy = FederatedStrategy(DPFedAvg(), plan(noise_placement="server"))
    result = start(InProcessGrid(app, CLIENTS), strategy)
    assert result.evaluate_metrics_clientapp == {}
    assert len(strategy.refusals) == 2 * CLIENTS
    assert all("mods that belong to a different strategy" in text for text in strategy.refusals)
    assert strategy.participations.rounds == 2


def test_names_of_a_wrapped_model_are_shown_with_what_to_return():
    app = projects.opacus(wrapped=True)
    message = r"'_module.conv.bias', .*but no 'conv.bias'.*state_dict of the model itself"
    for strategy in (
        FederatedStrategy(DPFedAvg(), plan(noise_placement="server")),
        STRATEGIES["hosted"](),
    ):
        with pytest.raises(FederationNotReady, match=message):
            run(app, strategy)


def test_behind_our_mod_the_nodes_log_shows_them(logged):
    strategy = FederatedStrategy(DPFedAvg(), plan())
    with pytest.raises(FederationNotReady, match="the reason is in its own log") as error:
        run(projects.opacus(client_level_dp_mod(), wrapped=True), strategy)
    assert "_module" not in str(error.value)
    assert any("_module.conv.bias" in str(r.exc_info) for r in logged.records if r.exc_info)
    assert strategy.participations.rounds == 0


def test_behind_the_mod_flowers_quickstart_trains_in_secure_sums():
    secure = plan(noise_placement=SecureSum(colluding=0.0, dropouts=0.25))
    strategy = FederatedStrategy(DPFedAvg(), secure)
    run(projects.quickstart(client_level_dp_mod()), strategy)
    assert strategy.refusals == []


def test_an_app_without_such_a_setting_runs_with_the_given_clients():
    grid = run_app(EXAMPLES.folder, EXAMPLES.config(), clients=CLIENTS)
    assert len(grid.contexts) == CLIENTS


@pytest.mark.full
@pytest.mark.engine
@pytest.mark.parametrize("where", [["--in-process"], []], ids=["in-process", "ray"])
def test_the_command_runs_such_an_app_on_the_given_nodes(where, tmp_path):
    command = [str(Path(sys.executable).parent / "flower-ext"), "run", str(EXAMPLES.folder)]
    env = {**os.environ, "FLWR_HOME": str(tmp_path), "FLWR_TELEMETRY_ENABLED": "0"}
    done = subprocess.run(
        [*command, *where, "--clients", str(CLIENTS)],
        env=env,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ε = 8 at δ = 0.001" in done.stdout + done.stderr

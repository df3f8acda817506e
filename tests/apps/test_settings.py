"""Settings of every app: wrong types and values are refused by name; every data set has a model."""

from importlib import import_module

import pytest
import torch
from flwr.app import Context, RecordDict

from flower_ext.data import DataNotFound, describe
from flower_ext.data.datasets import names
from flower_ext.federation import run_in_process
from tests.support.apps import (
    DP2_FEDSAM,
    DP_DITTO,
    PRIVATE_FINETUNING,
    PRIVATE_LM,
    ULDP_FL,
    UPCYCLED_FL,
)
from tests.support.grids import grid


@pytest.mark.parametrize(
    "app",
    grid(
        [DP2_FEDSAM, DP_DITTO, PRIVATE_FINETUNING, PRIVATE_LM, ULDP_FL, UPCYCLED_FL],
        lambda app: app is UPCYCLED_FL,
    ),
    ids=lambda app: app.folder.name,
)
@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("seeded-noise", "false", "true or false"),
        ("rounds", "many", "an integer >= 1"),
        ("rounds", 0, "an integer >= 1"),
        ("rounds", 2.5, "an integer >= 1"),
        ("evaluate-every", True, "an integer"),
        ("clipping-norm", "two", "a finite number > 0"),
        ("dataset", 5, "one of "),
        ("round-timeout", -1, "a finite number > 0"),
        ("connect-timeout", 0, "a finite number > 0"),
        ("budget-ledger", "people.jsonl", "an absolute path"),
    ],
)
def test_a_setting_of_another_type_ends_the_run_with_its_name(app, name, value, expected, tmp_path):
    server, client = app.parts()
    config = {**app.small_config(run_directory=str(tmp_path / "run")), name: value}
    with pytest.raises(ValueError, match=f"run-config {name}={value!r}: expected {expected}"):
        run_in_process(server, client, num_clients=3, run_config=config)


def fails(app, tmp_path, message, **settings):
    server, client = app.parts()
    config = {**app.small_config(run_directory=str(tmp_path / "run")), **settings}
    with pytest.raises(ValueError, match=message):
        run_in_process(server, client, num_clients=config["clients"], run_config=config)


@pytest.mark.parametrize(
    ("app", "name", "value", "expected"),
    [
        (DP2_FEDSAM, "dirichlet-alpha", -1.0, "a finite number > 0"),
        (DP_DITTO, "dirichlet-alpha", -1.0, "a finite number > 0"),
        (DP2_FEDSAM, "classes-per-client", 0, "an integer >= 1"),
        (DP_DITTO, "classes-per-client", 0, "an integer >= 1"),
        (DP2_FEDSAM, "sampling-rate", -1.0, r"a number in \(0, 1\]"),
        (UPCYCLED_FL, "sampling-rate", -1.0, r"a number in \(0, 1\]"),
    ],
)
def test_settings_are_looked_at_even_where_another_leaves_them_without_effect(
    app, name, value, expected, tmp_path
):
    settings = {"partition": "iid"} if "partition" in app.config() else {}
    fails(app, tmp_path, f"{name}={value!r}: expected {expected}", **{**settings, name: value})


def test_the_delta_of_one_client_alone_has_to_be_set(tmp_path):
    message = r"clients=1 with delta=0.0: expected a delta in \(0, 1\), or more clients"
    fails(DP2_FEDSAM, tmp_path, message, clients=1)


@pytest.mark.parametrize("dataset", names())
@pytest.mark.parametrize("app", [DP2_FEDSAM, DP_DITTO], ids=lambda app: app.folder.name)
def test_every_data_set_that_is_offered_has_a_model(app, dataset):
    app.parts()  # makes the app importable
    context = Context(
        run_id=1,
        node_id=0,
        node_config={},
        state=RecordDict(),
        run_config=app.config(dataset=dataset),
    )
    model = import_module(f"{app.package}.task").task_of(context).model()
    assert model(torch.zeros(2, *describe(dataset).input_shape)).shape == (2, 10)


@pytest.mark.parametrize(
    ("app", "settings"),
    [
        pytest.param(DP2_FEDSAM, {"dataset": "mnist"}, id="dp2-fedsam"),
        pytest.param(DP_DITTO, {"dataset": "mnist"}, id="dp-ditto"),
        pytest.param(ULDP_FL, {"dataset": "creditcard"}, id="uldp-fl"),
        pytest.param(UPCYCLED_FL, {"dataset": "letters", "generated": False}, id="upcycled-fl"),
    ],
)
def test_missing_data_end_the_run_before_it_begins(app, settings, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    server, client = app.parts()
    folders = {"run_directory": str(tmp_path / "run"), "data_folder": str(tmp_path)}
    config = {**app.small_config(**folders), **settings}
    with pytest.raises(DataNotFound, match="FLOWER_EXT_DATA"):
        run_in_process(server, client, num_clients=3, run_config=config)
    assert not (tmp_path / "run").exists()

"""What every app makes of settings that a config file may have: of the wrong type, any data set."""

from importlib import import_module

import pytest
import torch
from flwr.app import Context, RecordDict

from flower_ext.data import describe
from flower_ext.data.datasets import names
from flower_ext.federation import run_in_process
from tests.apps.app import DP2_FEDSAM, DP_DITTO, ULDP_FL, UPCYCLED_FL


@pytest.mark.parametrize(
    "app", [DP2_FEDSAM, DP_DITTO, ULDP_FL, UPCYCLED_FL], ids=lambda app: app.folder.name
)
@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("seeded-noise", "false", "true or false"),
        ("rounds", "many", "an integer >= 1"),
        ("rounds", 0, "an integer >= 1"),
        ("rounds", 2.5, "an integer >= 1"),
        ("evaluate-every", True, "an integer"),
        ("clipping-norm", "two", "a number"),
        ("dataset", 5, "a text"),
    ],
)
def test_a_setting_of_another_type_ends_the_run_with_its_name(app, name, value, expected, tmp_path):
    server, client = app.parts()
    config = {**app.small_config(run_directory=str(tmp_path / "run")), name: value}
    with pytest.raises(ValueError, match=f"run-config {name}={value!r}: expected {expected}"):
        run_in_process(server, client, num_clients=3, run_config=config)


@pytest.mark.parametrize("dataset", names())
@pytest.mark.parametrize("app", [DP2_FEDSAM, DP_DITTO], ids=lambda app: app.folder.name)
def test_every_data_set_that_is_offered_has_a_model(app, dataset):
    app.parts()  # puts the app where Python finds it
    context = Context(
        run_id=1,
        node_id=0,
        node_config={},
        state=RecordDict(),
        run_config=app.config(dataset=dataset),
    )
    model = import_module(f"{app.folder.name}_app.task").task_of(context).model()
    assert model(torch.zeros(2, *describe(dataset).input_shape)).shape == (2, 10)

"""FedAMP's server warns when clients no longer take anything from one another."""

import numpy as np
import pytest

from flower_ext.algorithms import FedAMP
from flower_ext.federation import Released, Update

CLIENTS = 4


def mix(models, method):
    """Return the state after a step from models, each of which is one client's upload."""
    shape = models[0]["w"].shape
    received = {"w": np.zeros(shape)}
    released = Released(
        mean={},
        kept={client: Update(model, {}) for client, model in models.items()},
        round=1,
        population=len(models),
        fraction=1.0,
    )
    return method.step(received, released, method.init(received, len(models)))[1]


def mixed(distance, caplog, **options):
    """Mix models that lie ``distance`` apart, twice; return the state and the warnings."""
    method = FedAMP(**options)
    models = {i: {"w": distance / 2**0.5 * np.eye(CLIENTS)[i]} for i in range(CLIENTS)}
    state = mix(models, method)
    clouds = {i: state.server[f"cloud.{i}"]["w"] for i in models}
    again = Released(
        # Each client uploads its difference to the cloud model that it received.
        mean={},
        kept={i: Update({"w": models[i]["w"] - clouds[i]}, {}) for i in models},
        round=2,
        population=CLIENTS,
        fraction=1.0,
    )
    _, state = method.step({"w": np.zeros(CLIENTS)}, again, state)
    return state, [r.getMessage() for r in caplog.records if "attention_width" in r.message]


def test_a_faded_attention_warns_once_and_suggests_a_width(caplog):
    faded, warnings = mixed(3.0, caplog, attention_width=1.0)
    assert len(warnings) == 1
    assert "at most 9.3e-05 of any client's cloud model" in warnings[0]  # 3/4 exp(−9)
    assert "two models, which is 9" in warnings[0]
    caplog.clear()
    mended, warnings = mixed(3.0, caplog, attention_width=9.0)
    assert not warnings
    share = mended.server["cloud.0"]["w"][1] / mended.server["uploaded.1"]["w"][1]
    assert share == pytest.approx(np.exp(-1) / 4)
    assert faded.server["cloud.0"]["w"][1] < 1e-4


@pytest.mark.parametrize("distance", [0.0, 1.0, 2.0])
def test_clients_that_share_their_models_are_not_warned_of(distance, caplog):
    assert not mixed(distance, caplog)[1]


def test_one_pair_of_similar_clients_is_enough(caplog):
    mix({i: {"w": np.array([v])} for i, v in enumerate([0.0, 0.1, 9.0])}, FedAMP())
    assert not caplog.records

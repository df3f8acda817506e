"""FedAMP's server warns when clients no longer take anything from one another."""

import numpy as np
import pytest

from flower_ext.algorithms import FedAMP
from flower_ext.federation import FederatedStrategy
from flower_ext.privacy import FullParticipation, NonPrivatePlan
from tests.support.strategies import strategy_of

CLIENTS = 4


def mixed(distance, caplog, **options):
    """Mix models that lie ``distance`` apart; return the strategy and its warnings."""
    plan = NonPrivatePlan(sampling=FullParticipation(CLIENTS))
    strategy = strategy_of(FedAMP, plan=plan, **options)
    strategy.models = {i: {"w": distance / 2**0.5 * np.eye(CLIENTS)[i]} for i in range(CLIENTS)}
    strategy._mix()
    strategy._mix()
    return strategy, [r.getMessage() for r in caplog.records if "attention_width" in r.message]


def test_a_faded_attention_is_told_once_with_a_width_that_mends_it(caplog):
    strategy, said = mixed(3.0, caplog, attention_width=1.0)
    assert len(said) == 1
    assert "at most 9.3e-05 of any client's cloud model" in said[0]  # 3/4 exp(−9)
    assert "now 9," in said[0]
    caplog.clear()
    mended, said = mixed(3.0, caplog, attention_width=9.0)
    assert not said
    share = mended.clouds[0]["w"][1] / mended.models[1]["w"][1]
    assert share == pytest.approx(np.exp(-1) / 4)
    assert strategy.clouds[0]["w"][1] < 1e-4


@pytest.mark.parametrize("distance", [0.0, 1.0, 2.0])
def test_clients_that_share_their_models_are_not_warned_of(distance, caplog):
    assert not mixed(distance, caplog)[1]


def test_one_pair_of_similar_clients_is_enough(caplog):
    plan = NonPrivatePlan(sampling=FullParticipation(3))
    strategy = FederatedStrategy(FedAMP(), plan)
    strategy.models = {i: {"w": np.array([v])} for i, v in enumerate([0.0, 0.1, 9.0])}
    strategy._mix()
    assert not caplog.records

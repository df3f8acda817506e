"""The state of a method, and what its step may return."""

from dataclasses import dataclass

import numpy as np
import pytest

from flower_ext.algorithms import DPFedAvg
from flower_ext.errors import InvalidValue
from flower_ext.federation import FederatedStrategy, InProcessGrid, State
from flower_ext.privacy import FullParticipation, NonPrivatePlan
from tests.support.worlds import initial, task

CLIENTS = 3
C = {"c": np.zeros(2)}


@pytest.mark.parametrize("name", ["arrays", "round", "config", "settings", "training.local"])
def test_a_group_for_everyone_that_would_replace_a_record_is_refused(name):
    with pytest.raises(InvalidValue, match="expected a different name"):
        State(everyone={name: C})


def test_a_group_of_one_name_in_both_parts_is_refused():
    with pytest.raises(InvalidValue, match="everyone has the group 'c': expected a different name"):
        State(everyone={"c": C}, server={"c": C})


@pytest.mark.parametrize("value", [1.0, [1.0], np.array([1j]), np.array(["a"])])
def test_a_state_of_anything_but_real_arrays_is_refused(value):
    with pytest.raises(InvalidValue, match="expected a NumPy array of real numbers"):
        State(server={"c": {"value": value}})


@dataclass(frozen=True, kw_only=True)
class Wrong(DPFedAvg):
    """Federated averaging whose step goes wrong in one way."""

    way: str

    def step(self, model, released, state):
        model, state = super().step(model, released, state)
        first = next(iter(model))
        return {
            "shape": ({**model, first: model[first].ravel()}, state),
            "missing": ({name: a for name, a in model.items() if name != first}, state),
            "complex": ({**model, first: model[first] + 1j}, state),
            "no state": (model, None),
            "no pair": model,
        }[self.way]


@pytest.mark.parametrize("way", ["shape", "missing", "complex", "no state", "no pair"])
def test_a_step_that_breaks_later_rounds_ends_the_run_in_round_one(way):
    plan = NonPrivatePlan(sampling=FullParticipation(CLIENTS))
    strategy = FederatedStrategy(Wrong(way=way), plan, evaluate_every=0)
    with pytest.raises(InvalidValue, match="the server's step of Wrong"):
        strategy.start(InProcessGrid(Wrong.client_app(task()), CLIENTS), initial(), num_rounds=3)
    assert strategy.participations.rounds == 1

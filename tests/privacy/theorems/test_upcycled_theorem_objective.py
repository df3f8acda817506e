"""The facts of a local objective on which perturbation's guarantees rest."""

import math
from dataclasses import replace

import pytest

from flower_ext.privacy import LocalObjective
from flower_ext.privacy.theorems.upcycled_theorem import NEGLIGIBLE_DISTANCE
from tests.support.upcycled_problems import KNOWN


@pytest.mark.parametrize(
    "field",
    [
        "gradient_bound",
        "curvature_bound",
        "feature_norm_bound",
        "proximal_weight",
        "distance_to_minimiser",
    ],
)
@pytest.mark.parametrize("value", [-0.1, math.nan])
def test_unfit_facts_of_an_objective_are_refused_by_name(field, value):
    with pytest.raises(ValueError, match=f"{field}="):
        LocalObjective(**{field: value})


def test_an_infinite_proximal_weight_is_refused():
    with pytest.raises(ValueError, match="proximal_weight=inf"):
        LocalObjective(proximal_weight=math.inf)


def test_what_the_proof_assumes_of_the_solver_is_a_separate_condition():
    def unmet(**facts):
        conditions = replace(KNOWN, **facts).solution_conditions()
        return [condition.text for condition in conditions if not condition.holds]

    assert unmet() == []
    assert unmet(distance_to_minimiser=NEGLIGIBLE_DISTANCE) == []
    (text,) = unmet(distance_to_minimiser=1e-3)
    assert "distance at most 0.001" in text
    (text,) = unmet(distance_to_minimiser=math.inf)
    assert "SGD" in text
    (text,) = unmet(memoryless=False)
    assert "no state" in text


def test_clients_and_server_agree_on_the_least_number_of_examples():
    objective = replace(KNOWN, curvature_bound=0.11, proximal_weight=0.011)
    assert objective.size_condition(objective.least_examples()).holds

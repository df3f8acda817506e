"""The checks of a client before its scores become part of a noised sum."""

from types import SimpleNamespace

import pytest
from flower_ext.federation.client.masked_scores import bounds_of, masked_scores
from flwr.app import Context, RecordDict

from flower_ext.errors import InvalidValue
from flower_ext.federation.client.protecting import NodePolicy
from flower_ext.privacy.mechanisms.protections import ClipToCells

SHARE = ClipToCells(clipping_norm=1.0, share_stddev=0.5, cell=2.0**-16)


def request(**scores):
    return SimpleNamespace(queries=(scores,), protection=SHARE, state={}, facts={})


@pytest.mark.parametrize(
    "scores",
    [
        {},
        {"names": ["a"], "low": [0.0], "high": []},
        {"names": ["a"], "low": [], "high": [1.0]},
        {"names": [], "low": [0.0], "high": [1.0]},
    ],
)
def test_scores_without_names_or_bounds_are_refused(scores):
    with pytest.raises(InvalidValue, match="expected at least one score"):
        bounds_of(request(**scores))


@pytest.mark.parametrize(("least", "error"), [(0.6, PermissionError), (0.4, InvalidValue)])
def test_the_owner_of_a_node_sets_the_least_noise_of_scores_too(least, error):
    node = {"partition-id": 0, "least-noise-multiplier": least}
    context = Context(run_id=1, node_id=1, node_config=node, state=RecordDict(), run_config={})
    asked = request(names=["accuracy"], low=[0.0], high=[1.0])  # without a secure sum
    with pytest.raises(error):
        masked_scores({"accuracy": 1.0}, asked, context, "m", NodePolicy(context, False))

"""Claims of an app's live objects."""

import math
from types import SimpleNamespace

import pytest

from flower_ext_check.claims import Claim, claims_of_objects, claims_of_settings


class OfFlower:
    """An accountant with the interface of Flower's."""

    def get_privacy_spent(self):
        return SimpleNamespace(epsilon=2.0, delta=1e-5)


class OfAnotherLibrary:
    """An accountant whose method of this name needs an argument, as Opacus's does."""

    def get_privacy_spent(self, *, delta):
        raise NotImplementedError


def test_only_accountants_with_flowers_interface_claim_an_epsilon():
    chain = [
        SimpleNamespace(accountant=OfAnotherLibrary()),
        SimpleNamespace(accountant=OfFlower()),
        SimpleNamespace(accountant=None),
        SimpleNamespace(),
    ]
    claims = claims_of_objects(chain, None, [], rounds=3, planned=10)
    assert claims == [Claim("OfFlower", 2.0, 1e-5, rounds=3)]


@pytest.mark.parametrize("delta", [1, 2.0, math.inf, math.nan, -1.0])
def test_a_number_that_is_no_delta_is_a_claim_without_one(delta):
    (claim,) = claims_of_settings({"epsilon": 8.0, "delta": delta}, planned=3)
    assert (claim.epsilon, claim.delta) == (8.0, 0.0)
    assert Claim("report", 8.0, delta, rounds=3).delta == 0

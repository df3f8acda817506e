"""Claims of an app's live objects."""

from types import SimpleNamespace

from flower_ext_check.claims import Claim, claims_of_objects


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

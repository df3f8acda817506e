import secrets

from flower_ext.secure.weighting.paillier_messages import PaillierKey
from flower_ext.secure.weighting.weighting_silo import WeightingSilo
from tests.support.weighting import key, weighting_settings


def seeds_of(monkeypatch, number: int, run: str = "test") -> list[bytes]:
    """Return the seed of every silo, where silo 0 chooses its part."""
    settings = weighting_settings(run=run)
    silos = [WeightingSilo(settings, at) for at in range(3)]
    server_key = PaillierKey.of(key(number=number).public, settings)
    for silo in silos:
        silo.receive_keys(server_key, [other.key for other in silos])
    with monkeypatch.context() as patch:
        patch.setattr(secrets, "token_bytes", bytes)
        sealed = silos[0].seal_seed()
    for silo, seed in zip(silos[1:], sealed, strict=True):
        silo.open_seed(seed)
    return [silo._seed for silo in silos]


def test_all_silos_have_one_seed_which_silo_0_cannot_choose(monkeypatch):
    """It depends on the server's key and the run as well, which silo 0 does not draw."""
    seeds = [seeds_of(monkeypatch, *case) for case in ((0,), (1,), (0, "another run"))]
    assert [len(set(of_silos)) for of_silos in seeds] == [1, 1, 1]
    assert len({of_silos[0] for of_silos in seeds}) == 3
    assert bytes(32) not in {of_silos[0] for of_silos in seeds}

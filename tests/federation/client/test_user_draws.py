"""Silos draw the same users from a key alone, independently in every round, and each round once."""

import os

import numpy as np
import pytest
from flwr.app import Context, RecordDict

from flower_ext.errors import InvalidValue, ProtocolError, is_tellable
from flower_ext.federation._flower_private import SimulatedContext
from flower_ext.federation.client.user_draws import draw_fingerprint, draw_users, draws_vault
from flower_ext.federation.storage.memory import ClientVault, forget_client
from flower_ext.privacy import PoissonSampling
from tests.support.silos import task

KEY, OTHER = bytes(range(32)), bytes(32)
USERS, RATE = 20_000, 0.3
SAMPLING = PoissonSampling(USERS, RATE)


def context_of(number=0, folder=None, node_id=0, kind=SimulatedContext):
    node = {"partition-id": number}
    node |= {} if folder is None else {"state-folder": str(folder)}
    return kind(run_id=1, node_id=node_id, node_config=node, state=RecordDict(), run_config={})


def silo(*args, **options):
    return draws_vault(context_of(*args, **options), "uldp_avg")


def drawn(number=1, key=KEY, run=("study", 1), sampling=SAMPLING, vault=None):
    return draw_users(task(draw_key=key), vault or silo(), run, number, sampling)


def test_all_silos_draw_the_same_users_each_with_the_rate():
    users = drawn(vault=silo(0))
    assert users == drawn(vault=silo(1))
    spread = np.sqrt(USERS * RATE * (1 - RATE))
    assert abs(len(users) - USERS * RATE) < 5 * spread


@pytest.mark.parametrize(
    "other",
    [{"number": 2}, {"run": ("another study", 1)}, {"run": ("study", 2)}, {"key": OTHER}],
    ids=["round", "run", "Flower's run", "key"],
)
def test_another_round_run_or_key_draws_independently(other):
    both = len({*drawn()} & {*drawn(**other)})
    assert abs(both - USERS * RATE**2) < 5 * np.sqrt(USERS * RATE**2)


@pytest.mark.parametrize("again", [1, 3])
def test_a_silo_draws_each_round_once_and_never_an_earlier_one(again, tmp_path):
    for folder in (None, tmp_path):
        vault = silo(folder=folder)
        drawn(3, vault=vault)
        # A new process has the folder alone.
        later = vault if folder is None else silo(folder=folder)
        with pytest.raises(ProtocolError, match="up to round 3:") as refused:
            drawn(again, vault=later)
        assert is_tellable(refused.value)
        assert drawn(4, vault=later)


def refuses(vault):
    with pytest.raises(ProtocolError, match="up to round 3:"):
        drawn(3, vault=vault)
    return True


def test_a_silo_remembers_its_draws_under_any_node_number(tmp_path):
    drawn(3, vault=silo(folder=tmp_path, node_id=7))
    assert refuses(silo(folder=tmp_path, node_id=8))
    assert drawn(3, vault=silo(1, folder=tmp_path, node_id=7))  # another silo's folder


def test_age_and_other_runs_do_not_remove_the_memory_of_draws(tmp_path):
    drawn(3, vault=silo(folder=tmp_path))
    for file in (tmp_path / "secrets").iterdir():
        os.utime(file, (0, 0))
    ClientVault(context_of(folder=tmp_path, node_id=9), "another").store(b"keys")
    assert refuses(silo(folder=tmp_path))


def test_a_server_that_makes_a_silo_forget_cannot_repeat_a_draw(tmp_path):
    for folder in (None, tmp_path):
        context = context_of(folder=folder)
        keys = ClientVault(context, "uldp_avg")
        keys.store(b"keys")
        drawn(3, vault=draws_vault(context, "uldp_avg"))
        forget_client(context, ["study"], vaults="-sum")
        assert keys.load() is None
        assert refuses(draws_vault(context, "uldp_avg"))


def test_a_silo_whose_memory_a_restart_would_delete_draws_nothing(tmp_path):
    vault = silo(kind=Context)
    for draw in (
        lambda: drawn(vault=vault),
        lambda: draw_fingerprint(task(draw_key=KEY), vault),
    ):
        with pytest.raises(InvalidValue, match="state-folder") as refused:
            draw()
        assert is_tellable(refused.value)
    assert drawn(vault=silo(folder=tmp_path, kind=Context))


def test_a_silo_without_a_key_says_how_to_get_one():
    with pytest.raises(Exception, match="link key") as refused:
        drawn(key=None)
    assert is_tellable(refused.value)


def test_fingerprints_are_equal_for_equal_keys_alone():
    prints = [draw_fingerprint(task(draw_key=key), silo()) for key in (KEY, KEY, OTHER)]
    assert prints[0] == prints[1] != prints[2]
    assert KEY[:4] not in prints[0]

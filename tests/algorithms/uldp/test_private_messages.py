"""Private weighting sends no counts, weights or sums in the clear."""

import json

import numpy as np
import pytest
from gmpy2 import mpz

from flower_ext.federation.messages import records
from flower_ext.federation.sums.weighted import WEIGHTED_SUM
from flower_ext.privacy import (
    PoissonSampling,
)
from flower_ext.secure.weighting.encoding import from_residue
from tests.support.private_silos import (
    make,
    start,
    vault,
)
from tests.support.private_uldp import arrays, kept
from tests.support.silos import (
    ROUNDS,
    SILOS,
    USERS,
    histogram,
    silos,
)
from tests.support.travelling import Recorder
from tests.support.weighting import numbers


def raw(message):
    """Return all bytes and strings of a message."""
    content = message.content
    parts = [a.data for r in content.array_records.values() for a in r.values()]
    for config in content.config_records.values():
        parts += [v if isinstance(v, bytes) else json.dumps(v).encode() for v in config.values()]
    return b"|".join(parts)


@pytest.fixture(scope="module")
def transcript():
    strategy = make(sampling=PoissonSampling(USERS, 0.5), evaluate_every=0)
    grid, _ = start(strategy, Recorder)
    return strategy, grid


def test_the_server_gets_only_keys_seeds_blinded_counts_and_masked_sums(transcript):
    strategy, grid = transcript
    facts = strategy.run.summation.server.settings
    sizes = {
        "begin": 32,
        "keys": 60 * (SILOS - 1),
        "count": USERS * facts.count_bytes,
        "sum": 20 + facts.ciphertexts * facts.ciphertext_bytes,
    }
    seen = set()
    for reply in grid.received:
        if reply.metadata.message_type == "query.identity":
            continue
        assert set(reply.content.keys()) <= {"answer", "update"}
        for record in reply.content.array_records.values():
            for name, array in records.to_arrays(record).items():
                if name == "one-by-one":
                    assert array.shape == ()
                    assert int(array) in (0, 1)
                    continue
                is_empty = name == "keys" and reply.metadata.src_node_id != 1_000
                assert array.dtype == np.uint8
                assert array.shape == (0 if is_empty else sizes[name],)
                seen.add(name)
    assert seen == set(sizes)


def test_no_secret_of_a_silo_is_in_any_message(transcript):
    _, grid = transcript
    everything = b"||".join(raw(m) for m in [*grid.sent, *grid.received])
    for number in range(SILOS):
        held = kept(grid, number)
        secret = [held.seed, held.private, *held._pairs._keys.values()]
        secret += [int(b).to_bytes(held.settings.count_bytes, "big") for b in held._blinds]
        for value in secret:
            assert value not in everything
            assert value.hex().encode() not in everything
        assert vault(grid, number).load() not in everything


def test_every_number_that_is_sent_is_fresh(transcript):
    strategy, grid = transcript
    facts = strategy.run.summation.server.settings
    sent = []
    for _, data in arrays(grid.received, "answer", "count"):
        sent += numbers(data, facts.count_bytes)
    uploads = arrays(grid.received, "update", "sum")
    assert len(uploads) == SILOS * ROUNDS
    for _, data in uploads:
        sent += numbers(data, facts.ciphertext_bytes)
    weights = arrays(grid.sent, WEIGHTED_SUM, "weights")
    assert len(weights) == SILOS * ROUNDS
    for data in {data for _, data in weights}:  # one list per round, for all silos
        sent += numbers(data, facts.ciphertext_bytes)
    assert len(sent) == USERS * SILOS + SILOS * ROUNDS * facts.ciphertexts + USERS * ROUNDS
    assert len(set(sent)) == len(sent)


def test_no_count_and_no_weight_is_in_what_the_server_receives(transcript):
    strategy, grid = transcript
    server, facts = (
        strategy.run.summation.server,
        strategy.run.summation.server.settings,
    )
    n, held = server._key.public.n, histogram(silos(), USERS)
    blinds = kept(grid)._blinds
    secret = {mpz(int(x)) for x in np.unique([*held.ravel(), *held.sum(axis=0)])}
    for user, blind in enumerate(blinds):
        secret |= {blind * int(count) % n for count in held[:, user]}
        for count in held[:, user]:
            if count:
                weight = mpz(int(count) * facts.common_multiple // int(held[:, user].sum()))
                secret |= {weight, -weight % n}
    received = []
    for _, data in arrays(grid.received, "answer", "count"):
        received += numbers(data, facts.count_bytes)
    for _, data in arrays(grid.received, "update", "sum"):
        ciphertexts = numbers(data, facts.ciphertext_bytes)
        received += ciphertexts + server._key.decrypt(ciphertexts)
    assert not secret & set(received)


def test_no_upload_and_no_partial_sum_shows_anything_with_the_secret_key(transcript):
    strategy, grid = transcript
    server, facts = (
        strategy.run.summation.server,
        strategy.run.summation.server.settings,
    )
    public = server._key.public
    for number in map(str, range(1, ROUNDS + 1)):
        sums = [
            numbers(data, facts.ciphertext_bytes)
            for message, data in arrays(grid.received, "update", "sum")
            if message.metadata.group_id == number
        ]
        for some in ([0], [1], [2], [0, 1], [0, 2], [1, 2]):
            for at in range(facts.ciphertexts):
                product = mpz(1)
                for one in some:
                    product = product * sums[one][at] % public.n_squared
                (shown,) = server._key.decrypt([product])
                assert abs(from_residue(shown, public.n)).bit_length() > 450
        product = mpz(1)
        for one in sums:
            product = product * one[0] % public.n_squared
        (shown,) = server._key.decrypt([product])
        assert abs(from_residue(shown, public.n)) <= facts.packing.largest


def test_bytes_of_the_protocol_are_counted(transcript):
    strategy, _ = transcript
    facts, row = strategy.run.summation.server.settings, strategy.run.progress.row
    assert row["bytes_up"] >= SILOS * facts.ciphertexts * facts.ciphertext_bytes
    assert row["bytes_down"] >= SILOS * USERS * facts.ciphertext_bytes

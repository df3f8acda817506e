"""Whole rounds of `flower_ext.secure.aggregation` in one process."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np

from flower_ext.privacy import FullParticipation, ReleasePlan, SecureNoise, SecureSum
from flower_ext.privacy.mechanisms.noised_sum import NoisedSum
from flower_ext.secure.aggregation import member
from flower_ext.secure.aggregation.aggregation_server import SumServer
from flower_ext.secure.aggregation.context import (
    Invitation,
    RoundContext,
    degree,
    graph_digest,
    graph_of,
)
from flower_ext.secure.aggregation.mask_streams import Residues, apply_mask
from flower_ext.secure.aggregation.member import Member

MEASURED = 3
"""Number of timed clients, which clip, noise and mask their whole vector."""
CHECKED = 1_000
"""Count of numbers at the start of each vector that all clients mask; the sum is checked there."""


@dataclass(frozen=True, kw_only=True)
class Cost:
    """CPU seconds of one client and of the server.

    Parameters
    ----------
    client : float
        Seconds of clipping, rounding, noise and all four stages, without training.
    server : float
        Seconds of all stages.
    extra_bytes : float
        Bytes to and from one client, besides its masked vector.
    vector_bytes : int
        Bytes of a masked vector's message.
    """

    client: float
    server: float
    extra_bytes: float
    vector_bytes: int


class Clock:
    """A sum of the CPU seconds of called steps."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self, step: Callable[..., Any], *arguments: Any) -> Any:
        """Call a step and return its result."""
        start = time.process_time()
        result = step(*arguments)
        self.seconds += time.process_time() - start
        return result


def mechanism_of(members: int) -> NoisedSum:
    """Return the measured mechanism: γ = δ = 0.1, σ = 1."""
    return ReleasePlan(
        sampling=FullParticipation(members),
        clipping_norm=1.0,
        noise_multiplier=1.0,
        rounds=1,
        delta=1e-5,
        noise_placement=SecureSum(colluding=0.1, dropouts=0.1),
    ).mechanism()


def round_cost(members: int, length: int) -> Cost:
    """Run a round in which every tenth member is lost after sharing, and check its sum.

    `MEASURED` clients do all their work. The others mask only the first `CHECKED` numbers, because
    a thousand clients would take hours. The server's work does not depend on the numbers.
    """
    mechanism = mechanism_of(members)
    assert mechanism.masked is not None
    parameters = mechanism.masked.parameters
    num_neighbors = degree(members, parameters.num_neighbors)
    graph = graph_of(np.random.default_rng().permutation(members).tolist(), num_neighbors)
    context = RoundContext(
        **{**vars(parameters), "num_neighbors": num_neighbors},
        run=b"benchmark",
        round_number=1,
        graph=graph_digest(graph),
        bits=mechanism.masked.bits,
        length=length,
    )
    exchanging, masking, serving = Clock(), Clock(), Clock()
    noising = _noising(mechanism, length)
    server = SumServer(context, graph)
    parties = [
        Member(invitation=Invitation(context=context, index=index, neighbors=tuple(near)))
        for index, near in enumerate(graph)
    ]
    values = np.arange(length, dtype=context.dtype)

    adverts = [exchanging(party.advertise) for party in parties]
    for advert in adverts:
        serving(server.add, advert)
    keys = serving(server.keys)
    shares = [exchanging(parties[index].share, message) for index, message in keys.items()]
    for share in shares:
        serving(server.add, share)
    deliveries = serving(server.deliveries)
    answering = [index for index in deliveries if index % 10]
    for index in answering[:MEASURED]:
        masked = masking(parties[index].mask, deliveries[index], values)
        serving(server.add, masked)
    with mock.patch.object(member, "apply_mask", _mask_what_is_checked):
        for index in answering[MEASURED:]:
            masked = parties[index].mask(deliveries[index], values)
            serving(server.add, masked)
    questions = serving(server.unmask_requests)
    revealed = [
        exchanging(parties[index].unmask, question) for index, question in questions.items()
    ]
    for reply in revealed:
        serving(server.add, reply)
    total = serving(server.total)
    expected = values[:CHECKED] * context.dtype.type(len(answering))
    np.testing.assert_array_equal(total[:CHECKED], expected)

    sent = [*adverts, *shares, *revealed]
    sent += [*keys.values(), *deliveries.values(), *questions.values()]
    extra = sum(len(message.to_bytes()) for message in sent) / members
    extra += len(context.to_bytes()) + 8 * num_neighbors
    return Cost(
        client=exchanging.seconds / members + masking.seconds / MEASURED + noising,
        server=serving.seconds,
        extra_bytes=extra,
        vector_bytes=len(masked.to_bytes()),
    )


def _noising(mechanism: NoisedSum, length: int) -> float:
    """Return CPU seconds of clipping, rounding and noise, without the tables of the first call."""
    update = {"w": np.random.default_rng(1).standard_normal(length).astype(np.float32)}
    protection = mechanism.client_protection(mechanism.num_members)
    protection.released({"w": update["w"][:10]}, SecureNoise())
    clock = Clock()
    for _ in range(MEASURED):
        clock(protection.released, update, SecureNoise())
    return clock.seconds / MEASURED


def _mask_what_is_checked(key: bytes, values: Residues, *, subtract: bool = False) -> None:
    apply_mask(key, values[:CHECKED], subtract=subtract)

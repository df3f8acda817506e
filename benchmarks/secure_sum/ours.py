"""Whole rounds of `flower_ext.secure.aggregation` in one process."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from flower_ext.privacy import SecureNoise
from flower_ext.privacy.protections import ClipToCells
from flower_ext.secure.aggregation import Member, RoundContext, SumServer, degree, draw_order


@dataclass(frozen=True, kw_only=True)
class Cost:
    """CPU seconds of one client and of the server; bytes of a client beside its vector.

    A client clips, rounds and noises its vector too, once in ``noising`` seconds of ``client``.
    """

    client: float
    noising: float
    server: float
    extra_bytes: float


def round_cost(members: int, neighbours: int, threshold: int, length: int) -> Cost:
    """Run a round in which every tenth member is lost after sharing, and check its sum."""
    context = RoundContext(
        run=b"benchmark",
        round_number=1,
        order=draw_order(members, np.random.default_rng()),
        bits=32,
        length=length,
        neighbours=degree(members, neighbours),
        threshold=threshold,
        least_answers=members // 2,
    )
    clock = time.process_time
    clients = extra = server_seconds = 0.0
    server, parties = SumServer(context), [Member(context, index) for index in range(members)]
    lost = set(range(0, members, 10))
    values = np.arange(length, dtype=np.uint32)

    protection = ClipToCells(clipping_norm=1.0, share_stddev=members**-0.5, cell=2.0**-16)
    update = {"w": np.random.default_rng(1).standard_normal(length).astype(np.float32)}
    protection.released(update, SecureNoise())  # makes the table, once a run
    start = clock()
    protection.released(update, SecureNoise())
    noising = clock() - start
    start = clock()
    adverts = [party.advertise() for party in parties]
    clients += clock() - start
    start = clock()
    for advert in adverts:
        server.add_advert(advert)
    keys = server.keys()
    server_seconds += clock() - start
    start = clock()
    shares = [parties[index].share(message) for index, message in keys.items()]
    clients += clock() - start
    start = clock()
    for share in shares:
        server.add_shares(share)
    deliveries = server.deliveries()
    server_seconds += clock() - start
    for index, delivery in deliveries.items():
        start = clock()
        masked = parties[index].mask(delivery, values)
        clients += clock() - start
        if index not in lost:
            start = clock()
            server.add_masked(masked)
            server_seconds += clock() - start
    start = clock()
    question = server.question()
    server_seconds += clock() - start
    start = clock()
    revealed = [parties[index].unmask(question) for index in sorted(server.answered)]
    clients += clock() - start
    start = clock()
    for one in revealed:
        server.add_revealed(one)
    total = server.total()
    server_seconds += clock() - start
    np.testing.assert_array_equal(total, values * np.uint32(members - len(lost)))

    sent = [*adverts, *shares, *revealed, *keys.values(), *deliveries.values()]
    extra = sum(len(message.to_bytes()) for message in sent) / members
    extra += len(context.to_bytes()) + len(question.to_bytes())
    return Cost(
        client=clients / members + noising,
        noising=noising,
        server=server_seconds,
        extra_bytes=extra,
    )

"""Malformed requests to real clients, which must answer with an error and remember nothing."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from flwr.app import ConfigRecord, Message

from flower_ext.federation import InProcessGrid
from flower_ext.federation.messages import records
from tests.faults.malformed import malformed, requests
from tests.faults.worlds import CASES, PRIVATE, PRIVATE_PLUG_INS, Case, initial, task


@dataclass
class Asked:
    """The clients' answers to requests."""

    requests: int = 0
    answered: list[str] = field(default_factory=list)
    """Malformed requests that a client answered without an error."""
    remembered: list[str] = field(default_factory=list)
    """Malformed requests that changed a client's memory."""
    wrong: Counter[str] = field(default_factory=Counter)
    sound: int = 0
    """Number of later well-formed requests, and of those answered by an error."""
    refused: int = 0


def ask(case: Case, count: int, *, seed: int) -> Asked:
    """Send ``count`` malformed requests to clients of an earlier round, then well-formed ones."""
    outcome, rng = Asked(), np.random.default_rng(seed)
    strategy = case.build(seed=seed)
    # Clients refuse seeded noise, as in a deployment.
    app = strategy.method.client_app(task(), allow_seeded_noise=case is PRIVATE)
    grid = InProcessGrid(app, case.nodes)
    questions: list[Message] = []
    for server_round in range(1, 9):  # the last round stays unanswered; a cohort may be empty
        train_requests = list(
            strategy.configure_train(server_round, initial(), ConfigRecord(), grid)
        )
        questions = train_requests or questions
        if server_round < 8:
            strategy.aggregate_train(server_round, grid.send_and_receive(train_requests))
    facts = dict(questions[0].content.config_records[records.ROUND])
    mutations = requests(facts)
    if case is PRIVATE:
        mutations.pop("seeded noise")  # seeded noise is allowed here, as are small keys
    if "seeded-noise" not in facts:  # the request has no protection
        mutations = {n: m for n, m in mutations.items() if not n.startswith("seeded-noise")}
    for _ in range(count):
        question = questions[rng.integers(len(questions))]
        what, request = malformed(question, rng, mutations)
        context = grid.contexts[request.metadata.dst_node_id]
        before = {name: id(record) for name, record in context.state.items()}
        (reply,) = grid.send_and_receive([request])
        outcome.requests += 1
        outcome.wrong[what] += 1
        if not reply.has_error():
            outcome.answered.append(what)
        if {name: id(record) for name, record in context.state.items()} != before:
            outcome.remembered.append(what)
    outcome.sound = len(questions)
    outcome.refused = sum(reply.has_error() for reply in grid.send_and_receive(questions))
    return outcome


def everyone(count: int, *, seed: int) -> dict[str, Asked]:
    """Run `ask` for every method."""
    return {case.name: ask(case, count, seed=seed) for case in (*CASES, PRIVATE, *PRIVATE_PLUG_INS)}

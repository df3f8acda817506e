"""The server cannot tell a client that fails to load its data from any other client."""

from dataclasses import replace
from itertools import product

import pytest
from flwr.app import ArrayRecord, MetricRecord
from flwr.serverapp.strategy import FedAdam

from flower_ext import algorithms
from flower_ext.algorithms import DPFedAvg, FedDyn, Scaffold
from flower_ext.federation import FederatedStrategy
from flower_ext.federation.messages.round_entries import _KINDS
from flower_ext.federation.server.run_guarantees import summary_of
from flower_ext.privacy import (
    AdaptiveClipping,
    Budget,
    FullParticipation,
    NonPrivatePlan,
    OutputPerturbation,
    PerturbationPlan,
    RecordLevelPlan,
    SecureScores,
    SecureSum,
)
from flower_ext.privacy.mechanisms.protections import ClipAndNoise
from flower_ext.training import LocalTraining
from tests.support.failing import FAILING, failing_task
from tests.support.grids import grid as grid_of
from tests.support.plans import release_plan
from tests.support.silos import SILOS, USERS, silo
from tests.support.travelling import Recorder
from tests.support.worlds import client_data, initial

CLIENTS, EXAMPLES, ROUNDS = 4, 30, 3
FAST = LocalTraining(steps=2, batch_size=10, learning_rate=0.1)
WITHOUT_PLAN = {
    "UldpGroup": "its noise is in the steps of training, so a silo reports missing data",
    "Upcycled": "it wraps a strategy, and trains in the rounds of this strategy",
}
"""Names of `algorithms` that no plan which hides missing data fits, and the reason."""
METHODS = [name for name in algorithms.__all__ if name not in WITHOUT_PLAN]
OF_SILOS = ("UldpAvg", "UldpNaive", "UldpSgd")
TWO_PHASES = {"head": FAST, "extractor": FAST}
OPTIONS = {
    "Centaur": TWO_PHASES,
    "DP2FedSAM": {**TWO_PHASES, "adapt_before_evaluation": True},
    "DPDitto": {"local": FAST, "personal_training": FAST},
    "DPFedAvg": {"local": FAST, "fine_tuning": FAST},
    "DPFedSAM": {"local": replace(FAST, sam_radius=0.1)},
    "FedBN": {"local": FAST, "personal": ["head"]},
    "FedRep": TWO_PHASES,
    "Hosted": {"local": FAST, "strategy": FedAdam(eta=0.01, tau=0.1)},
    "PFedMe": {"local": FAST, "personal_training": FAST},
    "UldpAvg": {"local": FAST, "num_silos": SILOS},
    "UldpNaive": {"local": FAST, "num_silos": SILOS},
    "UldpSgd": {"num_silos": SILOS},
}

SUMS = SecureSum(colluding=0.0, dropouts=0.0)
SCORES = SecureScores(noise_multiplier=1.0, times=ROUNDS, bounds=(("loss", 0.0, 3.0),))
RELEASES = {
    "noise by clients": {},
    "noise by the server": {"noise_placement": "server"},
    "adaptive clipping": {"clipping_norm": AdaptiveClipping(initial_norm=1.0)},
    "a secure sum": {"noise_placement": SUMS},
    "summed scores": {"noise_placement": SUMS, "queries": (SCORES,)},
}
OF_SINGLE_UPLOADS = ("models with noise", "perturbed models", "perturbed models, and a budget")


def method_of(name):
    return getattr(algorithms, name)(**OPTIONS.get(name, {"local": FAST}))


def plan_of(name, plan):
    everyone, delta = FullParticipation(CLIENTS), 1e-5
    if plan in RELEASES:
        return release_plan(USERS if name in OF_SILOS else CLIENTS, **RELEASES[plan])
    noise = {"clipping_norm": 2.0, "noise_stddev": 0.5, "num_examples": EXAMPLES}
    if plan == "models with noise":
        return RecordLevelPlan(sampling=everyone, rounds=ROUNDS, delta=delta, **noise)
    return PerturbationPlan(
        sampling=everyone, perturbation=OutputPerturbation(**noise), delta=delta
    )


def strategy_of(name, plan):
    budget = Budget(epsilon=1e9, delta=1e-5) if plan.endswith("budget") else None
    evaluates = int(plan == "summed scores")
    options = {"seed": 1, "timeout": 5.0, "evaluate_every": evaluates, "budget": budget}
    return FederatedStrategy(method_of(name), plan_of(name, plan), **options)


def fits(name, plan):
    if name in OF_SILOS:
        return plan in ("noise by clients", "a secure sum")
    return plan in OF_SINGLE_UPLOADS or not method_of(name).needs_each_update


FITTING = [
    (name, plan) for plan in (*RELEASES, *OF_SINGLE_UPLOADS) for name in METHODS if fits(name, plan)
]
FAILURES = {
    "never loaded": ("data that raise", 0),
    "loaded once": ("data that raise", 1),
    "without a training": ("a label out of range", 0),
}
CASES = [
    pytest.param(name, plan, *failure, id=f"{name}, {plan}, {text}")
    for name, plan in FITTING
    for text, failure in FAILURES.items()
]


def is_daily(case):
    name, plan = case.split(", ")[:2]
    usual = plan in ("noise by clients", "models with noise", "summed scores")
    return (usual and case.endswith("never loaded")) or name in ("DPFedAvg", "Scaffold")


def shown(message):
    """Return everything in a reply except the numbers in its arrays, which have noise."""
    if message.has_error():
        return message.error.reason
    return {
        name: {key: (array.shape, array.dtype) for key, array in record.items()}
        if isinstance(record, ArrayRecord)
        else dict(record)
        for name, record in message.content.items()
        if isinstance(record, ArrayRecord | MetricRecord)
    }


def play(strategy, task, rounds=ROUNDS, clients=CLIENTS):
    grid = Recorder(strategy.method.client_app(task), num_clients=clients)
    strategy.start(grid, initial(), num_rounds=rounds)
    return grid


def seen_by_server(name, plan, kind, beginning):
    """Return what the server sees of a run, except numbers with noise."""
    strategy, of_silos = strategy_of(name, plan), name in OF_SILOS
    sound = silo if of_silos else client_data
    task = failing_task(kind, beginning=beginning, sound_data=sound)
    grid = play(strategy, task, clients=SILOS if of_silos else CLIENTS)
    received = [
        (message.metadata.message_type, message.metadata.src_node_id, shown(message))
        for message in grid.received
    ]
    return received, strategy.refusals, strategy.run.num_examples


@pytest.mark.parametrize(("name", "plan", "kind", "beginning"), grid_of(CASES, is_daily))
def test_data_that_fail_change_nothing_that_the_server_sees(name, plan, kind, beginning):
    failed = seen_by_server(name, plan, kind, beginning)
    assert failed == seen_by_server(name, plan, None, beginning)
    assert failed[1] == []  # no reply was refused


def test_the_cases_have_every_protection_that_hides_missing_data():
    protections = set()
    for name, plan in FITTING:
        run = strategy_of(name, plan).run
        protection = run.mechanism.protection(summary_of(run), CLIENTS)
        assert protection.hides_missing_data
        protections.add((type(protection), protection.of_units, protection.cell is not None))
    hiding = {(kind, False, False) for kind in _KINDS.values() if kind.hides_failures}
    assert protections == hiding | {
        (ClipAndNoise, *case) for case in product((False, True), repeat=2)
    }


class Raising(FedDyn):
    """A method that fails in the first round, but only on the client that cannot load its data."""

    @staticmethod
    def local_update(work):
        if work.round == 1 and len(work.data.train) == 0:
            raise ZeroDivisionError
        return (yield from FedDyn.client.local_update(work))

    client = replace(FedDyn.client, local_update=local_update)


def test_memory_that_the_server_mirrors_may_begin_with_a_failure():
    strategy = FederatedStrategy(
        Raising(local=FAST), plan_of("FedDyn", "noise by clients"), evaluate_every=0, timeout=5.0
    )
    play(strategy, failing_task("data that raise"))
    assert strategy.refusals == []


class Counting(Scaffold):
    """A method that fails on the client that cannot load its data."""

    @staticmethod
    def local_update(work):
        if len(work.data.train) == 0:
            raise ZeroDivisionError
        return (yield from Scaffold.client.local_update(work))

    client = replace(Scaffold.client, local_update=local_update)


def test_a_client_whose_method_fails_sends_the_metrics_of_all_others():
    strategy = FederatedStrategy(
        Counting(local=FAST), plan_of("Scaffold", "models with noise"), evaluate_every=0
    )
    grid = play(strategy, failing_task("data that raise"))
    trained = [m for m in grid.received if m.metadata.message_type.startswith("train")]
    assert strategy.refusals == []
    assert len(trained) == CLIENTS * ROUNDS
    assert len({str(shown(message)) for message in trained}) == 1
    assert FAILING in strategy.run.num_examples


@pytest.mark.parametrize("reserved", ["num-examples", "update-norm"])
def test_a_method_cannot_replace_the_metrics_of_the_client_side(reserved):
    class Replacing(DPFedAvg):
        client = replace(DPFedAvg.client, metrics=lambda training, size: {reserved: 1.0, "own": 2})

    plan = NonPrivatePlan(sampling=FullParticipation(1))
    strategy = FederatedStrategy(Replacing(local=FAST), plan, evaluate_every=0, timeout=5.0)
    with pytest.raises(Exception, match=f"{reserved}.*expected other names"):
        play(strategy, failing_task(None), rounds=1, clients=1)

"""Run methods under faults; recompute every round, and the ε of each run, independently."""

from __future__ import annotations

import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import dp_accounting
import numpy as np
from dp_accounting import pld
from flwr.app import ArrayRecord, Message

from flower_ext.algorithms.uldp import UldpAvg
from flower_ext.federation import FederatedStrategy, Opening, OpenSum
from flower_ext.federation.messages import records
from flower_ext.federation.messages.upload_reply import Update
from flower_ext.privacy import (
    AdversaryView,
    Ledger,
    PoissonSampling,
    RecordLevelPlan,
    ReleasePlan,
    seeded_generator,
)
from flower_ext.runs import RunWriter
from tests.faults.grid import Delivered, FaultyGrid
from tests.faults.worlds import SEED, SILOS, Case, initial


@dataclass
class Outcome:
    """The results of a run under faults."""

    name: str
    rounds: int = 0
    released: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    wrong: Counter[str] = field(default_factory=Counter)
    """Number of malformed messages by kind."""
    crashes: list[str] = field(default_factory=list)
    accepted: list[str] = field(default_factory=list)
    """Rounds in which the strategy used other replies than the valid ones."""
    wrong_aggregates: list[str] = field(default_factory=list)
    unexplained: int = 0
    """Refusals without a reason."""
    refusals: Counter[str] = field(default_factory=Counter)
    epsilon: dict[str, tuple[float, float]] = field(default_factory=dict)
    """By adversary's view: the reported ε and the recomputed one."""

    @property
    def epsilon_is_right(self) -> bool:
        """Return True if every reported ε is the recomputed one, or at most 1 in 1,000 above."""
        return all(
            -1e-6 <= ours / recomputed - 1 <= 1e-3 for ours, recomputed in self.epsilon.values()
        )


class Referee:
    """Recomputes every round of a strategy from the valid replies, and compares."""

    def __init__(self, strategy: FederatedStrategy, grid: FaultyGrid, outcome: Outcome) -> None:
        self.strategy, self.grid, self.outcome = strategy, grid, outcome
        self.weights: defaultdict[int, float] = defaultdict(float)
        """By client: the number of rounds that an adversary who sees each sum learns from."""
        self._used: dict[int, Mapping[str, np.ndarray]] = {}
        summation = strategy.run.summation
        open_sum, aggregate = summation.open, strategy.aggregate_train
        evaluate = strategy.aggregate_evaluate

        def watched_open(opening: Opening) -> OpenSum:
            opened = open_sum(opening)
            read = opened.read

            def watched_read(reply: Message) -> Update:
                update = read(reply)
                # The reader of a hidden sum has added the upload, and returns no arrays.
                arrays = update.arrays or _arrays(reply)
                self._used[opening.clients.partition_of(reply)] = arrays
                return update

            vars(opened).update(read=watched_read)
            return opened

        def watched_aggregate(server_round: int, replies: Iterable[Message]) -> Any:
            base = {name: array.copy() for name, array in strategy.run.model.items()}
            moved, metrics = aggregate(server_round, replies)
            self._check(server_round, base, moved, grid.taken())
            return moved, metrics

        def watched_evaluate(server_round: int, replies: Iterable[Message]) -> Any:
            summary = evaluate(server_round, replies)
            self._check_scores(server_round, summary is not None)
            return summary

        vars(summation).update(open=watched_open)
        vars(strategy).update(
            aggregate_train=watched_aggregate, aggregate_evaluate=watched_evaluate
        )

    def _check_scores(self, number: int, summarised: bool) -> None:
        metrics = {
            partition: dict(reply.content.metric_records[records.METRICS])
            for partition, reply in self.grid.scores.items()
        }
        if summarised != bool(metrics) or (metrics and self.strategy.run.client_metrics != metrics):
            self.outcome.accepted.append(f"scores of round {number}")
        mean = self.strategy.run.progress.row.get("accuracy_mean", 0.0)
        if metrics and not np.isclose(mean, np.mean([one["accuracy"] for one in metrics.values()])):
            self.outcome.wrong_aggregates.append(f"scores of round {number}")

    def _check(
        self, number: int, base: records.Arrays, moved: ArrayRecord | None, came: Delivered
    ) -> None:
        outcome, used = self.outcome, self._used
        self._used = {}
        outcome.rounds += 1
        outcome.released += moved is not None
        counted = {partition: _arrays(reply) for partition, reply in came.counted.items()}
        same = set(used) == set(counted) and all(
            np.array_equal(used[partition][name], array)
            for partition, arrays in counted.items()
            for name, array in arrays.items()
        )
        if not same:
            outcome.accepted.append(f"round {number}: {sorted(used)}, not {sorted(counted)}")
        assert self.strategy.newest_round is not None
        for partition in self.strategy.newest_round.cohort.partitions if counted else ():
            self.weights[partition] += came.asked / len(counted)
        if self.strategy.run.summation.brings_weights:
            if (moved is not None) != (len(counted) == SILOS):
                outcome.wrong_aggregates.append(f"round {number}: released without all silos")
            return
        expected = expected_model(self.strategy, base, list(counted.values()), came.asked)
        if (moved is None) != (expected is None):
            outcome.wrong_aggregates.append(f"round {number}: released {moved is not None}")
        elif moved is not None and expected is not None:
            model = records.to_arrays(moved)
            if not all(np.allclose(model[n], expected[n], rtol=1e-5, atol=1e-6) for n in expected):
                outcome.wrong_aggregates.append(f"round {number}: another model")


def expected_model(
    strategy: FederatedStrategy,
    base: records.Arrays,
    uploads: list[records.Arrays],
    request: int,
) -> records.Arrays | None:
    """Return the next model by plain arithmetic, with seeded noise; None without a release."""
    plan, number = strategy.run.plan, strategy.participations.rounds
    wide = [{name: a.astype(np.float64) for name, a in upload.items()} for upload in uploads]
    if not isinstance(plan, ReleasePlan):
        if not wide:
            return None
        return {name: base[name] + np.mean([u[name] for u in wide], axis=0) for name in base}
    clipping_norm = plan.clipping_norm
    assert isinstance(clipping_norm, float)
    stddev = plan.noise_multiplier * clipping_norm
    if plan.noise_placement == "server":
        for upload in wide:
            norm = np.sqrt(sum(float(np.square(a).sum()) for a in upload.values()))
            for array in upload.values():
                array *= min(1.0, clipping_norm / norm)
    else:
        stddev *= np.sqrt(1 - len(uploads) / request) if request else 1.0
    rng = seeded_generator(SEED, "server-noise", number)
    divisor = plan.sampling.expected_cohort_size
    if isinstance(strategy.method, UldpAvg):
        divisor *= SILOS
    moved = {}
    for name, array in base.items():
        noise = stddev * rng.standard_normal(array.shape) if stddev else 0.0
        total = sum((upload[name] for upload in wide), np.zeros(array.shape)) + noise
        moved[name] = array + strategy.method.server.learning_rate * total / divisor
    return moved


def run_case(case: Case, rounds: int, *, flood: int, seed: int) -> Outcome:
    """Run one method for ``rounds`` rounds, or until an error, with ledger and run directory."""
    outcome = Outcome(case.name)
    with tempfile.TemporaryDirectory() as folder:
        ledger = Ledger(Path(folder) / "ledger.jsonl")
        strategy = case.build(
            seed=SEED,
            seeded_noise=True,
            evaluate_every=20,
            directory=RunWriter.create(Path(folder) / "run", {}),
        )
        if isinstance(strategy.run.plan, ReleasePlan):
            strategy.run.spending.ledger = ledger
        grid = FaultyGrid(
            case.client_app(strategy),
            case.nodes,
            rates=replace(case.rates, flood=flood),
            mutations=case.mutations,
            rng=np.random.default_rng(seed),
            huge=case.huge,
        )
        referee = Referee(strategy, grid, outcome)
        try:
            strategy.start(grid, initial(), num_rounds=rounds)
            outcome.epsilon = epsilons(strategy, referee, ledger)
        except Exception as error:
            outcome.crashes.append(f"{type(error).__name__}: {error}")
        ledger.close()
    outcome.faults, outcome.wrong = grid.faults, grid.wrong
    for refusal in strategy.refusals:
        reason = refusal.partition(": ")[2]
        outcome.unexplained += not reason
        outcome.refusals[reason[:40]] += 1
    return outcome


def epsilons(
    strategy: FederatedStrategy, referee: Referee, ledger: Ledger
) -> dict[str, tuple[float, float]]:
    """Return each reported ε beside the one recomputed from rounds and participations only."""
    plan, rounds = strategy.run.plan, referee.outcome.rounds
    reported = {g.view: g.epsilon for g in strategy.guarantees() if g.basis == "provable"}
    if isinstance(plan, RecordLevelPlan):
        multiplier = plan.noise_stddev / (2 * plan.clipping_norm) / np.sqrt(rounds)
        (ours,) = reported.values()
        return {"each upload": (ours, dp_accounting.get_epsilon_gaussian(multiplier, plan.delta))}
    if not isinstance(plan, ReleasePlan):
        return {}
    multiplier = plan.mechanism(strategy.method.traits).release.noise_multiplier
    assert isinstance(plan.sampling, PoissonSampling)
    accountant = pld.PLDAccountant(value_discretization_interval=1e-3)
    gaussian = dp_accounting.GaussianDpEvent(multiplier)
    event = dp_accounting.PoissonSampledDpEvent(plan.sampling.rate, gaussian)
    recomputed = accountant.compose(event, rounds).get_epsilon(plan.delta)
    epsilons_by_view = {
        "released models": (reported[AdversaryView.RELEASED_MODELS], recomputed),
        "the ledger": (ledger.spent(plan.delta).epsilon, recomputed),
    }
    sums = reported.get(AdversaryView.SUM_ONLY, np.inf)
    if np.isfinite(sums) and not isinstance(strategy.method, UldpAvg):
        worst = multiplier / np.sqrt(max(referee.weights.values()))
        epsilons_by_view["each sum"] = (sums, dp_accounting.get_epsilon_gaussian(worst, plan.delta))
    return epsilons_by_view


def _arrays(reply: Message) -> records.Arrays:
    return records.to_arrays(reply.content.array_records[records.UPDATE])

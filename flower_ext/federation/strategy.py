"""The shared Strategy: cohort → configure → validate → bound, noise, ledger → aggregate → metrics.

A method adds the phases of its local training and its client functions. Everything that a
guarantee rests on happens here, once, and is taken from one frozen plan.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from logging import getLogger
from typing import ClassVar, TypeVar

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from flower_ext.evaluation import summarize
from flower_ext.federation import records
from flower_ext.federation.client import ClientMethod, client_app
from flower_ext.federation.cohort import FederationNotReady, Roster
from flower_ext.privacy import (
    BudgetExhausted,
    Guarantee,
    Ledger,
    NoiseSource,
    NonPrivatePlan,
    Participations,
    ReleasePlan,
    Reservation,
    RoundDiscarded,
    SecureNoise,
    SeededNoise,
    client_level_guarantees,
    privacy_loss_of,
    secure_generator,
    seeded_generator,
)
from flower_ext.reporting import RunDirectory
from flower_ext.training import LocalTraining, Task, matches

log = getLogger("flwr")

T = TypeVar("T")


class FederatedStrategy(Strategy):
    """Base of every method: subclass it, name the client side, list the training phases.

    Parameters
    ----------
    plan : ReleasePlan | NonPrivatePlan
        What is sampled, clipped, noised and accounted.
    personal : Sequence[str]
        Module names that never leave the client; dropped from the initial arrays.
    server_learning_rate : float
        Factor on the averaged update.
    seed : int, optional
        Reproducible cohorts, initial models and batches. None draws cohorts from the operating
        system's randomness.
    seeded_noise : bool
        Reproducible noise from ``seed``; for simulation only, and the guarantee says so.
    evaluate_every : int
        Rounds between evaluations on all clients, besides the last; 0 never asks a client to
        evaluate. What clients report there is not covered by any guarantee.
    diagnostics : bool
        Clients report the norm of their update before clipping, un-noised. Not covered either.
    timeout : float
        Seconds to wait for nodes to connect, and for replies.
    ledger : Ledger, optional
        Durable record of every release; stops the run at its budget.
    run : RunDirectory, optional
        Where metrics go.
    """

    client: ClassVar[ClientMethod]
    any_client_app: ClassVar[bool] = False
    """Whether a ClientApp that knows nothing of this package can take part."""

    def __init__(
        self,
        *,
        plan: ReleasePlan | NonPrivatePlan,
        personal: Sequence[str] = (),
        server_learning_rate: float = 1.0,
        seed: int | None = None,
        seeded_noise: bool = False,
        evaluate_every: int = 1,
        diagnostics: bool = False,
        timeout: float = 600.0,
        ledger: Ledger | None = None,
        run: RunDirectory | None = None,
    ) -> None:
        if not 0 < server_learning_rate < float("inf"):
            raise ValueError(f"server_learning_rate={server_learning_rate!r}: expected > 0")
        if evaluate_every < 0:
            raise ValueError(f"evaluate_every={evaluate_every!r}: expected an integer >= 0")
        if seeded_noise and seed is None:
            raise ValueError("seeded_noise=True needs a seed")
        self.plan = plan
        self.personal = tuple(personal)
        self.server_learning_rate = server_learning_rate
        self.seed = seed
        self.seeded_noise = seeded_noise
        self.evaluate_every = evaluate_every
        self.diagnostics = diagnostics
        self.timeout = timeout
        self.ledger = ledger
        self.run = run
        self.refusals: list[str] = []
        self.participations = Participations()
        self.client_metrics: dict[int, dict[str, float]] = {}
        self.stopped: str | None = None
        self._roster: Roster | None = None
        self._last_round: int | None = None
        self._cohort: list[int] = []
        self._base: records.Arrays = {}
        self._release = ExitStack()
        self._reservation = Reservation()
        self._row: dict[str, float] = {}

    @property
    def training(self) -> Mapping[str, LocalTraining]:
        """The phases of local training, by the names that the client side uses."""
        raise NotImplementedError

    @property
    def evaluation_training(self) -> Mapping[str, LocalTraining]:
        """Phases of training on a client before it evaluates; none by default."""
        return {}

    @classmethod
    def client_app(
        cls, task: Task | Callable[[Context], Task], *, allow_seeded_noise: bool = False
    ) -> ClientApp:
        """A ClientApp that answers this method's messages (see `federation.client_app`)."""
        return client_app(cls.client, task=task, allow_seeded_noise=allow_seeded_noise)

    def published_claim(self) -> Guarantee | None:
        """What the method's paper promises after the releases so far."""
        return None

    # Training -----------------------------------------------------------------------------

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Draw the cohort, make the spend durable, and ask.

        Raises
        ------
        BudgetExhausted
            This round would exceed the ledger's budget; nothing was sent.
        """
        roster = self._connect(grid)
        self._cohort = self.plan.sampling.draw(self._generator("cohort", server_round))
        self._base = records.shared_arrays(self._shared(arrays))
        self._row = {"cohort": len(self._cohort)}
        if isinstance(self.plan, ReleasePlan) and self.ledger is not None:
            entry = self.ledger.reserve(self.plan.release, round=server_round)
            self._reservation = self._release.enter_context(entry)
        content: dict[str, ArrayRecord | ConfigRecord] = {
            records.MODEL: records.to_record(self._base),
            records.ROUND: self._facts(server_round, self._protection()),
            **records.training_records(_in_round(self.training, server_round)),
        }
        content[records.CONFIG] = config
        return self._ask("train", roster, self._cohort, content, server_round)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Refuse what is malformed; bound, noise and add up the rest."""
        trusted = not isinstance(self.plan, ReleasePlan) or self.plan.noise_placement == "server"
        updates = self._accepted(
            server_round,
            replies,
            self._cohort,
            lambda reply: records.read_update(reply, base=self._base, trust_models=trusted),
        )
        self.participations.record(self._cohort, len(updates))
        self._row |= {"answered": len(updates), "messages": 2 * len(self._cohort)}
        norms = [u.metrics["update-norm"] for u in updates.values() if "update-norm" in u.metrics]
        if norms:
            self._row["update_norm_mean"] = float(np.mean(norms))
            self._row["update_norm_std"] = float(np.std(norms))
        with self._release:
            mean = self._aggregate([u.arrays for u in updates.values()], server_round)
        if mean is None:
            return None, records.metrics_record(self._row)
        rate = self.server_learning_rate
        moved = {
            name: (base + rate * mean[name]).astype(base.dtype) for name, base in self._base.items()
        }
        return records.to_record(moved), records.metrics_record(self._row)

    def _aggregate(
        self, updates: list[records.Arrays], server_round: int
    ) -> Mapping[str, np.ndarray] | None:
        try:
            aggregate = self.plan.aggregate(
                updates,
                cohort_size=len(self._cohort),
                noise=self._noise("server-noise", server_round),
                like=self._base,
            )
        except RoundDiscarded as reason:
            log.warning("round %d discarded: %s", server_round, reason)
            self._row["discarded"] = 1
            self._reservation.discard(str(reason))
            return None
        facts = {"answered": aggregate.answered, "topped_up_stddev": aggregate.topped_up_stddev}
        self._row |= facts
        self._reservation.note(cohort=len(self._cohort), **facts)
        return aggregate.value

    # Evaluation ---------------------------------------------------------------------------

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask every client, in the rounds that evaluate and in the last."""
        if self.evaluate_every == 0:
            return []
        if server_round % self.evaluate_every and server_round != self._last_round:
            return []
        roster = self._connect(grid)
        content: dict[str, ArrayRecord | ConfigRecord] = {
            records.MODEL: records.to_record(records.shared_arrays(self._shared(arrays))),
            records.ROUND: self._facts(server_round, {}),
            **records.training_records(_in_round(self.evaluation_training, server_round)),
        }
        content[records.CONFIG] = config
        return self._ask("evaluate", roster, sorted(roster.nodes), content, server_round)

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Every client counts alike: mean, worst tenth, spread and Jain's index."""
        everyone = [] if self._roster is None else sorted(self._roster.nodes)
        scores = self._accepted(server_round, replies, everyone, records.read_metrics)
        if not scores:
            return None
        self.client_metrics = scores
        summary: dict[str, float] = {}
        for name in sorted(set.intersection(*(set(s) for s in scores.values()))):
            if name == "num-examples":
                continue
            spread = summarize({partition: s[name] for partition, s in scores.items()})
            summary |= {
                f"{name}_mean": spread.mean,
                f"{name}_std": spread.std,
                f"{name}_worst_decile": spread.worst_decile,
                f"{name}_jain": spread.jain_index,
            }
        self._row |= summary
        return records.metrics_record(summary)

    # The run ------------------------------------------------------------------------------

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """Run ``num_rounds`` rounds, fewer where the budget ends first (see ``stopped``)."""
        self.summary()
        self._last_round = num_rounds
        result = Result()
        arrays = result.arrays = self._shared(initial_arrays)
        for server_round in range(1, num_rounds + 1):
            started = time.monotonic()
            try:
                asked = self.configure_train(
                    server_round, arrays, train_config or ConfigRecord(), grid
                )
            except BudgetExhausted as reason:
                self.stopped = str(reason)
                log.warning("stopped before round %d: %s", server_round, reason)
                break
            moved, metrics = self.aggregate_train(
                server_round, grid.send_and_receive(asked, timeout=timeout)
            )
            if moved is not None:
                arrays = result.arrays = moved
            if metrics is not None:
                result.train_metrics_clientapp[server_round] = metrics
            asked = self.configure_evaluate(
                server_round, arrays, evaluate_config or ConfigRecord(), grid
            )
            answers = grid.send_and_receive(asked, timeout=timeout) if asked else []
            scores = self.aggregate_evaluate(server_round, answers) if asked else None
            if scores is not None:
                result.evaluate_metrics_clientapp[server_round] = scores
            if evaluate_fn is not None and (own := evaluate_fn(server_round, arrays)) is not None:
                result.evaluate_metrics_serverapp[server_round] = own
            self._row["seconds"] = time.monotonic() - started
            self._record(server_round, num_rounds)
        return result

    def summary(self) -> None:
        """Log the method and its plan."""
        words = [type(self).__name__, self.plan.sampling.describe()]
        if isinstance(self.plan, ReleasePlan):
            words.append(
                f"clipping norm {self.plan.clipping_norm:g}, noise multiplier "
                f"{self.plan.noise_multiplier:.4g} added by the {self.plan.noise_placement}"
            )
        else:
            words.append("no privacy")
        log.info(" · ".join(words))

    # Parts --------------------------------------------------------------------------------

    def _connect(self, grid: Grid) -> Roster:
        if self._roster is None:
            population = self.plan.sampling.population
            roster = Roster.connect(grid, population, timeout=self.timeout)
            if not roster.known:
                self._check_foreign_clients()
            self._roster = roster
        return self._roster

    def _check_foreign_clients(self) -> None:
        fix = f"build the ClientApp with {type(self).__name__}.client_app(task)"
        if not self.any_client_app:
            raise FederationNotReady(
                f"the ClientApp does not know {type(self).__name__}, which trains in its own way "
                f"on the clients: {fix}"
            )
        if isinstance(self.plan, ReleasePlan) and self.plan.noise_placement == "client":
            raise FederationNotReady(
                "the plan leaves noise to the clients, but the ClientApp does not know how: "
                f"{fix}, or take noise_placement='server'"
            )
        log.info("foreign ClientApp: plain train/evaluate messages, nodes numbered by their ids")

    def _shared(self, arrays: ArrayRecord) -> ArrayRecord:
        shared = {n: a for n, a in arrays.items() if not matches(n, self.personal)}
        if not shared:
            raise ValueError(f"personal={self.personal} leaves no parameter to share")
        return ArrayRecord(shared)

    def _generator(self, *path: str | int) -> np.random.Generator:
        return secure_generator() if self.seed is None else seeded_generator(self.seed, *path)

    def _noise(self, *path: str | int) -> NoiseSource:
        if self.seeded_noise and self.seed is not None:
            return SeededNoise(self.seed, *path)
        return SecureNoise()

    def _protection(self) -> dict[str, float]:
        """What a client needs to bound and noise its update."""
        if not isinstance(self.plan, ReleasePlan) or not self._cohort:
            return {}
        return {
            "clipping-norm": self.plan.clipping_norm,
            "noise-stddev": self.plan.client_noise_stddev(len(self._cohort)),
            "seeded-noise": self.seeded_noise,
        }

    def _facts(self, server_round: int, more: Mapping[str, float]) -> ConfigRecord:
        own = {"number": server_round, "seed": self.seed or 0, "diagnostics": self.diagnostics}
        return ConfigRecord({**own, **more})

    def _ask(
        self,
        kind: str,
        roster: Roster,
        partitions: Sequence[int],
        content: Mapping[str, ArrayRecord | ConfigRecord],
        server_round: int,
    ) -> list[Message]:
        messages = [
            Message(
                RecordDict(dict(content)),
                dst_node_id=roster.nodes[partition],
                message_type=f"{kind}.{self.client.name}" if roster.known else kind,
                group_id=str(server_round),
            )
            for partition in partitions
        ]
        self._count("bytes_down", sum(map(records.payload_bytes, messages)))
        return messages

    def _accepted(
        self,
        server_round: int,
        replies: Iterable[Message],
        partitions: Sequence[int],
        read: Callable[[Message], T],
    ) -> dict[int, T]:
        """What `records.accept` accepts, by partition; the rest is counted and reported."""
        replies = list(replies)
        self._count("bytes_up", sum(map(records.payload_bytes, replies)))
        nodes = {} if self._roster is None else self._roster.nodes
        asked = {partition: nodes[partition] for partition in partitions}
        accepted = records.accept(replies, asked=asked, server_round=server_round, read=read)
        for refusal in accepted.refusals:
            log.warning("refused reply: %s", refusal)
        self.refusals += accepted.refusals
        self._count("refused", len(accepted.refusals))
        return accepted.values

    def _count(self, name: str, number: float) -> None:
        self._row[name] = self._row.get(name, 0) + number

    def guarantees(self) -> list[Guarantee]:
        """What protects the clients after the rounds so far: published claim and provable ones.

        The provable ones use the participations of this very run, which depend on nobody's data.
        """
        if not isinstance(self.plan, ReleasePlan) or self.participations.rounds == 0:
            return []
        claim = self.published_claim()
        return ([] if claim is None else [claim]) + client_level_guarantees(
            self.plan,
            self.participations,
            secure_noise=not self.seeded_noise,
            secure_cohorts=self.seed is None,
            not_covered=self._not_covered(),
        )

    def _not_covered(self) -> list[str]:
        """What leaves the clients outside the guarantee in this run."""
        exposed = ["that a client answered or not, and when"]
        if self.evaluate_every:
            exposed.append(
                "scores and test-set sizes that clients report un-noised at evaluation "
                "(evaluate_every=0 turns this off)"
            )
        if self.diagnostics:
            exposed.append("norms of updates before clipping (diagnostics=False turns this off)")
        return exposed

    def _record(self, server_round: int, num_rounds: int) -> None:
        """One line in the log and in the run directory."""
        parts = [f"round {server_round}/{num_rounds}"]
        if evaluated := "accuracy_mean" in self._row:
            mean, worst = self._row["accuracy_mean"], self._row["accuracy_worst_decile"]
            parts.append(f"accuracy {mean:.3f} (worst tenth {worst:.3f})")
        if isinstance(self.plan, ReleasePlan) and (evaluated or server_round == num_rounds):
            rounds = self.participations.rounds
            spent = privacy_loss_of({self.plan.release: rounds}, delta=self.plan.delta)
            self._row["epsilon_provable"] = spent.epsilon
            parts.append(f"ε {spent.epsilon:.2f} provable (released models)")
            if (claim := self.published_claim()) is not None:
                self._row["epsilon_published"] = claim.epsilon
                parts.append(f"{claim.epsilon:.2f} published")
        if "answered" in self._row:
            parts.append(f"{self._row['answered']:.0f} of {self._row['cohort']:.0f} answered")
        if refused := self._row.get("refused", 0):
            parts.append(f"{refused:.0f} refused")
        log.info(" · ".join(parts))
        if self.run is not None:
            self.run.log(server_round, **self._row)


def _in_round(
    trainings: Mapping[str, LocalTraining], server_round: int
) -> dict[str, LocalTraining]:
    return {phase: training.in_round(server_round) for phase, training in trainings.items()}

"""The shared Strategy: cohort → configure → validate → bound, noise, ledger → aggregate → metrics.

A method adds the phases of its local training and its client functions. Everything that a
guarantee rests on happens here, once, and is taken from one frozen plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import replace
from logging import getLogger
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid

from flower_ext.federation import records, rounds
from flower_ext.federation.client import client_app
from flower_ext.federation.cohort import FederationNotReady
from flower_ext.federation.exchange import Content
from flower_ext.federation.population import Cohort, Population
from flower_ext.federation.protection import to_facts
from flower_ext.federation.run_loop import RunLoop
from flower_ext.federation.state.checkpoint import Asked
from flower_ext.federation.stragglers import Stragglers
from flower_ext.privacy import (
    Budget,
    BudgetExhausted,
    Guarantee,
    Ledger,
    NoiseSource,
    PrivacyPlan,
    SecureNoise,
    SeededNoise,
    secure_generator,
    seeded_generator,
)
from flower_ext.privacy.ledger import Reservation
from flower_ext.privacy.plan import Aggregate, RoundDiscarded
from flower_ext.privacy.randomness import derived_seed
from flower_ext.privacy.run_facts import MethodTraits, RunFacts
from flower_ext.privacy.shared_ledger import Charge, charge, note_uncovered
from flower_ext.privacy.updates import l2_norm
from flower_ext.runs import RunDirectory
from flower_ext.training import LocalTraining, Task

log = getLogger("flwr")
T = TypeVar("T")

_ROUNDING = 1.01
"""Room for rounding to the precision in which uploads travel, half precision at the worst."""


class FederatedStrategy(RunLoop):
    """Base of every method: subclass it, name the client side, list the training phases.

    Parameters
    ----------
    plan : PrivacyPlan
        What is sampled, clipped, noised and accounted.
    personal : Sequence[str]
        Module names that never leave the client; dropped from the initial arrays.
    server_learning_rate : float
        Factor on the averaged update.
    stragglers : Stragglers, optional
        Simulated devices that complete only some of their local epochs.
    seed : int, optional
        Reproducible initial models and batches; cohorts too, but under a `ReleasePlan` with secure
        noise, whose ε rests on their being secret: these come from the operating system's
        randomness. Without a seed cohorts, stragglers and noise all come from there; clients'
        initial personal parts and the order of their batches, which are no secret, are then those
        of seed 0: give other seeds to vary them.
    seeded_noise : bool
        Reproducible noise from ``seed``; for simulation only, and the guarantee says so.
    evaluate_every : int
        Rounds between evaluations on all clients, besides the last; 0 never asks a client to
        evaluate. What clients report there is not covered by any guarantee.
    training_loss : bool
        Clients also report the loss of the model that they would use on their training examples,
        whose variance over clients is a measure of fairness. Not covered either.
    diagnostics : bool
        Clients report the norm of their update before clipping, un-noised. Not covered either.
    timeout : float
        Seconds to wait for nodes to connect, and for replies.
    ledger : Ledger, optional
        Durable record of every release of a `ReleasePlan`; stops the run at its budget.
    budget : Budget, optional
        Stops the run before a round with which its provable ε would exceed it, whatever the plan;
        with ``Budget(ledger=...)`` that of all runs on the same population. Under a
        `NonPrivatePlan` such an account says that no ε covers the run.
    run : RunDirectory, optional
        Where metrics and checkpoints go; if it was resumed, ``start`` goes on from the last one.
    population : Population, optional
        Who is asked, and who counts; by default the clients that the plan's sampling draws.
    exposed : Sequence[str]
        What else shows anything of the clients' data, before the run or beside it, in a line each:
        the guarantees list it as not covered.
    """

    any_client_app: ClassVar[bool] = False
    """Whether a ClientApp that knows nothing of this package can take part."""
    one_model: ClassVar[bool] = True
    """Whether all clients are sent the same shared model; see `client_state`."""
    units_are_clients: ClassVar[bool] = True
    """Whether a `ReleasePlan` protects clients, each of them with one upload a round."""
    bounds_units: ClassVar[bool] = False
    """Whether an upload is a sum over units, each of which the client side bounds by itself."""
    needs_each_update: ClassVar[bool] = False
    """Whether the server needs every single update, which a `ReleasePlan` hides."""

    def __init__(
        self,
        *,
        plan: PrivacyPlan,
        personal: Sequence[str] = (),
        server_learning_rate: float = 1.0,
        stragglers: Stragglers | None = None,
        seed: int | None = None,
        seeded_noise: bool = False,
        evaluate_every: int = 1,
        training_loss: bool = False,
        diagnostics: bool = False,
        timeout: float = 600.0,
        ledger: Ledger | None = None,
        budget: Budget | None = None,
        run: RunDirectory | None = None,
        population: Population | None = None,
        exposed: Sequence[str] = (),
    ) -> None:
        if not 0 < server_learning_rate < float("inf"):
            raise ValueError(f"server_learning_rate={server_learning_rate!r}: expected > 0")
        if evaluate_every < 0:
            raise ValueError(f"evaluate_every={evaluate_every!r}: expected an integer >= 0")
        if seeded_noise and seed is None:
            raise ValueError("seeded_noise=True needs a seed")
        if budget is not None:
            _check_budget_fits(budget, plan)
        if ledger is not None and plan.release is None:
            raise ValueError(
                f"ledger with a {type(plan).__name__}: it records the releases of a ReleasePlan "
                "alone; budget= stops a run under any plan that promises privacy"
            )
        if isinstance(personal, str):
            raise ValueError(f"personal={personal!r}: expected several names, as ({personal!r},)")
        self.plan = plan
        plan.check(self.traits)
        self.server_learning_rate = server_learning_rate
        self.stragglers = stragglers
        self.seed = seed
        self.seeded_noise = seeded_noise
        self.evaluate_every = evaluate_every
        self.training_loss = training_loss
        self.diagnostics = diagnostics
        self.budget = budget
        self.exposed = tuple(exposed)
        super().__init__(
            population=population or Population(plan.sampling),
            repeats=self.repeats,
            personal=personal,
            timeout=timeout,
            ledger=ledger,
            run=run,
        )
        self.cohort = Cohort(asked=(), units=())
        """That of the newest training round."""
        self.sent: records.Arrays = {}
        """The shared part of the model that clients were sent last; nothing before that."""
        self._met = False
        self._release = ExitStack()
        self._reservation = Reservation()

    # What a method may add ----------------------------------------------------------------

    @property
    def training(self) -> Mapping[str, LocalTraining]:
        """The phases of local training, by the names that the client side uses."""
        raise NotImplementedError

    @property
    def evaluation_training(self) -> Mapping[str, LocalTraining]:
        """Phases of training on a client before it evaluates; none by default."""
        return {}

    @property
    def proximal_weight(self) -> float:
        """μ of the proximal term around the received model that every local training has."""
        return min((one.proximal_weight for one in self.training.values()), default=0.0)

    @property
    def settings(self) -> Mapping[str, float]:
        """Numbers of the method that its client side needs; none by default."""
        return {}

    def prepare(self, grid: Grid) -> None:
        """What there is to do once, when all nodes are there and before the first round."""

    def begin_round(self, number: int, cohort: Cohort, grid: Grid) -> Cohort:
        """What there is to do before training round ``number`` asks ``cohort``, which is returned.

        Where some of it turns out not to be possible, fewer are returned.
        """
        return cohort

    def server_state(self) -> Mapping[str, ArrayRecord]:
        """Records that travel to the clients next to the model; none by default."""
        return {}

    def client_state(self, partition: int) -> Mapping[str, ArrayRecord]:
        """Records for one client alone, besides or in place of what all get; none by default.

        A record named ``records.MODEL`` is the model that this client receives: its update is the
        difference to that.
        """
        return {}

    def read_update(self, reply: Message) -> records.Update:
        """A client's update.

        Raises
        ------
        RefusedReply
            It is none of the model that was sent, or larger than an honest one.
        """
        trusted = not self.plan.client_protects
        update = records.read_update(reply, base=self.sent, trust_models=trusted)
        if not update.metrics.get("num-examples", 1) >= 1:
            raise records.RefusedReply(
                f"num-examples={update.metrics['num-examples']!r}: expected at least 1"
            )
        if not trusted:
            self._check_size(update.arrays, *self.exchange.sent(reply))
        return update

    def combine(self, updates: Mapping[int, records.Update]) -> Aggregate:
        """The noised average of a round's updates, by partition.

        Raises
        ------
        RoundDiscarded
            Too few of them arrived.
        """
        return self.plan.aggregate(
            [update.arrays for update in updates.values()],
            cohort_size=len(self.cohort.asked),
            noise=self._noise("server-noise", self.participations.rounds),
            like=self.sent,
        )

    def next_model(
        self, base: records.Arrays, mean: records.Arrays, updates: Mapping[int, records.Update]
    ) -> records.Arrays:
        """The next global model: ``base`` moved along the mean update.

        Parameters
        ----------
        base, mean : Arrays
            The model that was sent, and the mean of what came back, bounded and noised.
        updates : Mapping[int, Update]
            The single updates by partition; none under a `ReleasePlan`, which releases the mean.
        """
        return {name: base[name] + self.server_learning_rate * mean[name] for name in base}

    def claims(self, run: RunFacts) -> list[Guarantee]:
        """What the method's paper promises after a run's rounds so far, and what is provable."""
        return self.plan.guarantees(run)

    def not_covered(self) -> list[str]:
        """What leaves the clients outside the guarantee in this run."""
        exposed = ["that a client answered or not, and when"]
        if self.evaluate_every:
            exposed.append(
                "scores and test-set sizes that clients report un-noised at evaluation "
                "(evaluate_every=0 turns this off)"
            )
        if self.evaluate_every and self.training_loss:
            exposed.append(
                "losses on training records that clients report un-noised at evaluation "
                "(training_loss=False turns this off)"
            )
        if self.diagnostics:
            exposed.append("norms of updates before clipping (diagnostics=False turns this off)")
        return [*exposed, *self.exposed]

    @property
    def repeats(self) -> bool:
        """Whether a round that is done again is the same one, since all in it follows a seed."""
        noiseless = self.plan.delta is None
        return self.seed is not None and (self.seeded_noise or noiseless)

    # Rounds -------------------------------------------------------------------------------

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Draw the cohort, make the spend durable, and ask.

        Cohorts, stragglers, batches and learning rates are numbered by training rounds, so that a
        strategy which trains in some rounds only does there what it would do alone.

        Raises
        ------
        BudgetExhausted
            This round would exceed the budget; nothing was sent.
        """
        self.connect(grid, arrays)
        number = self.next_training
        secret = self.plan.release is not None and not self.repeats  # ε rests on it
        drawn = self.population.draw(
            secure_generator() if secret else self._generator("cohort", number)
        )
        self._check_budget(server_round, drawn)
        if number - 1 == self.plan.planned_rounds:
            log.warning(
                "training round %d is beyond the %d of the plan: ε grows past what its noise was "
                "chosen for (budget= would end the run)",
                number,
                number - 1,
            )
        self.cohort = self.begin_round(number, drawn, grid)
        if self.plan.release is not None and self.ledger is not None:
            same = derived_seed(self.seed or 0, "release", self.checkpoints.run_id, number)
            entry = self.ledger.reserve(
                self.plan.release, round=server_round, identity=same if self.repeats else None
            )
            self._reservation = self._release.enter_context(entry)
        slow: dict[int, float] = {}
        if self.stragglers is not None:
            self.stragglers.check(self.training.values())
            rng = self._generator("stragglers", number)
            slow = self.stragglers.draw(self.cohort.asked, self.population.num_nodes, rng)
        self.check_training()
        protection = self._protection()
        shared: Content = {
            records.MODEL: records.to_record(self.sent),
            records.ROUND: self._facts(number, protection),
            records.SETTINGS: ConfigRecord(dict(self.settings)),
            records.CONFIG: config,
            **self.server_state(),
        }
        contents = rounds.training_contents(
            self.cohort,
            shared,
            rounds.in_round(self.training, number),
            slow=slow,
            own=self.client_state,
        )
        if self.client.mirrored:
            contents = rounds.with_remembered(
                contents,
                self.remembered,
                lambda last: self._facts(number, {**protection, "remembered": last}),
            )
        self.progress.row["cohort"] = len(self.cohort.asked)
        who, how_many = list(self.cohort.units), len(self.cohort.asked)
        self.checkpoints.asked(Asked(training=number, participants=who, asked=how_many))
        return self.exchange.ask("train", contents, server_round)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Refuse what is malformed; bound, noise and add up the rest."""
        updates = self.exchange.accepted(
            "train", server_round, replies, self.cohort.asked, self.read_update
        )
        row = self.progress.row
        self.checkpoints.answered(len(updates))
        self.population.count(self.cohort, len(updates))
        row["answered"] = len(updates)
        self._ever_answered |= bool(updates)
        row |= rounds.norm_columns(updates.values())
        for partition, update in updates.items():  # the smallest told: none makes ε look smaller
            if "num-examples" in update.metrics:
                size = int(update.metrics["num-examples"])
                self.num_examples[partition] = min(size, self.num_examples.get(partition, size))
        with self._release:
            mean = self._aggregate(updates, server_round)
        if self.client.keeps_memory and not (self.client.mirrored and mean is None):
            self.remembered |= dict.fromkeys(updates, self.participations.rounds)
        if mean is None:
            return None, records.metrics_record(row)
        released_only = self.plan.release is not None  # nothing else may show in the model
        moved = self.next_model(self.sent, mean, {} if released_only else updates)
        moved = {name: moved[name].astype(base.dtype) for name, base in self.sent.items()}
        return records.to_record(moved), records.metrics_record(row)

    def _aggregate(
        self, updates: Mapping[int, records.Update], server_round: int
    ) -> records.Arrays | None:
        try:
            aggregate = self.combine(updates)
        except RoundDiscarded as reason:
            log.warning("round %d discarded: %s", server_round, reason)
            self.progress.row["discarded"] = 1
            self._reservation.discard(str(reason))
            return None
        facts = {"answered": aggregate.answered, "topped_up_stddev": aggregate.topped_up_stddev}
        self.progress.row |= facts
        self._reservation.note(cohort=len(self.cohort.asked), **facts)
        return dict(aggregate.value)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask every client, in the rounds that evaluate and in the last."""
        if self.evaluate_every == 0:
            return []
        if server_round % self.evaluate_every and server_round != self._last_round:
            return []
        self._meet(grid)
        last = max(1, self.participations.rounds)
        content: Content = {
            records.MODEL: records.to_record(records.shared_arrays(self.shared(arrays))),
            records.ROUND: self._facts(last, {"training-loss": self.training_loss}),
            records.CONFIG: config,
            **records.training_records(rounds.in_round(self.evaluation_training, last)),
        }
        everyone = dict.fromkeys(self.exchange.nodes, content)
        return self.exchange.ask("evaluate", everyone, server_round)

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Every client counts alike: mean, worst tenth, spread and Jain's index."""
        scores = self.exchange.accepted(
            "evaluate", server_round, replies, list(self.exchange.nodes), records.read_scores
        )
        scores = {p: s for p, s in scores.items() if s.get("num-examples") != 0}
        if not scores:
            return None
        self.client_metrics = scores
        return records.metrics_record(self.progress.scores(scores.values()))

    # The run ------------------------------------------------------------------------------

    @classmethod
    def client_app(
        cls, task: Task | Callable[[Context], Task], *, allow_seeded_noise: bool = False
    ) -> ClientApp:
        """A ClientApp that answers this method's messages (see `federation.client_app`)."""
        return client_app(cls.client, task=task, allow_seeded_noise=allow_seeded_noise)

    def summary(self) -> None:
        """Log the method and its plan."""
        log.info("%s · %s", type(self).__name__, self.plan.describe())

    @property
    def traits(self) -> MethodTraits:
        """What the method declares, for the plan to see whether it protects it."""
        return MethodTraits(
            name=type(self).__name__,
            units_are_clients=self.units_are_clients,
            bounds_units=self.bounds_units,
            needs_each_update=self.needs_each_update,
            keeps_memory=self.client.keeps_memory,
            memoryless=self.client.memoryless,
            upload_phase=self.client.upload_phase,
        )

    @property
    def run_facts(self) -> RunFacts:
        """All that the plan may know of the run so far."""
        return RunFacts(
            method=self.traits,
            participations=self.participations,
            num_examples=self.num_examples,
            training=self.training,
            proximal_weight=self.proximal_weight,
            sent=self.sent,
            secure_noise=not self.seeded_noise,
            secure_cohorts=not self.repeats,
            not_covered=self.not_covered(),
        )

    def guarantees(self) -> list[Guarantee]:
        """What protects people after the rounds so far: published claim and provable ones.

        The provable ones use the participations of this very run, which depend on nobody's data.
        """
        return self.claims(self.run_facts) if self.participations.rounds else []

    def spent(self) -> dict[str, float]:
        """ε so far, for the log and the report's figures."""
        return self._spent(self.run_facts)

    def _spent(self, run: RunFacts) -> dict[str, float]:
        spent = self.plan.spent(run)
        if self.plan.release is not None:  # else the plan knows what is published
            for one in self.claims(run):
                if one.basis == "published":
                    spent["epsilon_published"] = one.epsilon
        return spent

    def give_up(self, reason: str) -> None:
        """Close a round that was begun and will not be finished; what it reserved stays spent."""
        self._reservation.discard(reason)
        self._release.close()

    def _protection(self) -> dict[str, Any]:
        """What the round tells a client of how to protect its upload."""
        asked = self.plan.protection(self.run_facts, len(self.cohort.asked))
        facts = to_facts(asked, seeded_noise=self.seeded_noise)
        return {"report-size": True, **facts} if self.plan.tells_sizes else facts

    def _check_size(self, update: records.Arrays, partition: int, received: records.Arrays) -> None:
        """Refuse an upload that is larger than bound and noise of an honest client explain.

        What clients noise cannot be clipped without changing the noise. See
        `NoisedSum.largest_upload` for what this protects.

        Raises
        ------
        RefusedReply
            Names the norm and the largest probable one.
        """
        limit = self.plan.largest_upload(
            cohort_size=len(self.cohort.asked),
            numbers=sum(array.size for array in update.values()),
            norms=self.cohort.norms.get(partition, 1.0),
        )
        if math.isinf(limit):
            return
        bounded: Mapping[str, Any] = update
        if self.plan.bounds_models:
            bounded = {name: received[name] + step for name, step in update.items()}
        if (norm := l2_norm(bounded)) > limit * _ROUNDING:
            raise records.RefusedReply(
                f"norm {norm:.4g}: bound and noise of an honest upload stay below {limit:.4g}"
            )

    def connect(self, grid: Grid, arrays: ArrayRecord) -> None:
        """Take ``arrays`` as the model that is sent; meet the clients, the first time."""
        self.sent = records.shared_arrays(self.shared(arrays))
        self._meet(grid)

    def _meet(self, grid: Grid) -> None:
        if self._met:
            return
        roster = self.exchange.connect(grid, self.population.num_nodes)
        if not roster.known:
            self._check_foreign_clients(roster.said)
        self.prepare(grid)
        if self.plan.needs_sizes and self.budget is not None:
            self._ask_sizes(grid)
        self._met = True

    def _ask_sizes(self, grid: Grid) -> None:
        """Learn what else the first upload tells: only with it is a round's ε known beforehand."""
        content = {records.ROUND: self._facts(0, {"report-size": True})}
        everyone = dict.fromkeys(self.exchange.nodes, content)
        told = self.exchange.query(grid, everyone, records.read_answer)
        self.num_examples |= {p: int(answer["num-examples"]) for p, answer in told.items()}

    def _check_foreign_clients(self, said: str) -> None:
        said = f" (the first to fail said: {said})" if said else ""
        fix = f"build the ClientApp with {type(self).__name__}.client_app(task)"
        if not self.any_client_app:
            raise FederationNotReady(
                f"the ClientApp does not know {type(self).__name__}, which trains in its own way "
                f"on the clients: {fix}{said}"
            )
        if self.plan.client_protects:
            raise FederationNotReady(
                "the plan leaves noise to the clients, but the ClientApp does not know how: "
                f"{fix}, or take a ReleasePlan with noise_placement='server'{said}"
            )
        log.info("foreign ClientApp: plain train/evaluate messages, nodes numbered by their ids")

    def ask_everyone(
        self,
        grid: Grid,
        question: ConfigRecord,
        read: Callable[[Message], T],
        own: Mapping[int, Content] | None = None,
        *,
        partitions: Sequence[int] | None = None,
    ) -> dict[int, T]:
        """What the client side answers to a question of this method, by partition (see `prepare`).

        Parameters
        ----------
        own : Mapping[int, Mapping[str, ArrayRecord]], optional
            Records for one partition alone, next to the question.
        partitions : Sequence[int], optional
            Ask these only.

        Raises
        ------
        FederationNotReady
            A node does not answer, or not what ``read`` accepts.
        """
        content: Content = {records.QUESTION: question}
        nodes = self.exchange.nodes if partitions is None else partitions
        special = {partition: {**content, **alone} for partition, alone in (own or {}).items()}
        return self.exchange.query(grid, {**dict.fromkeys(nodes, content), **special}, read)

    def check_training(self) -> None:
        """Refuse local training that the plan does not speak of, as every round does.

        Raises
        ------
        ValueError
            Names the setting and what the plan expects.
        """
        self.plan.check_training(self.run_facts)

    @property
    def next_training(self) -> int:
        """Number of the next training round, from 1: silent rounds do not count."""
        return self.participations.rounds + 1

    def _check_budget(self, server_round: int, cohort: Cohort) -> None:
        """Refuse a round with which the provable ε would exceed the budget."""
        if self.budget is None:
            return
        ahead = deepcopy(self.population)
        ahead.count(cohort, len(cohort.asked))
        run = replace(self.run_facts, participations=ahead.participations)
        epsilon = self.plan.spent(run).get("epsilon_provable", float("inf"))
        if self.budget.ledger is not None:
            self._charge(run, epsilon, self.budget, self.budget.ledger)
        elif epsilon > self.budget.epsilon:
            raise BudgetExhausted(
                f"round {server_round} would bring the provable spend to ε = {epsilon:.4g}, above "
                f"the budget of {self.budget.epsilon:g}"
            )

    def _charge(self, run: RunFacts, epsilon: float, budget: Budget, ledger: Path) -> None:
        """Charge the round to the population's account, or say there that no ε covers it."""
        checkpoints = self.checkpoints
        who = {
            "run": checkpoints.run_id,
            "method": type(self).__name__,
            "name": "" if checkpoints.run is None else checkpoints.run.path.name,
        }
        for shown in self.exposed:
            note_uncovered(ledger, **who, what=shown)
        plan = self.plan
        if plan.delta is None:
            note_uncovered(ledger, **who, what="training without noise")
            return
        claim = next(each for each in self.claims(run) if each.basis == "provable")
        new = Charge(
            **who,
            training=self.next_training,
            repeatable=self.repeats,
            unit=claim.unit,
            relation=claim.relation if plan.release is None else plan.release.relation,
            epsilon=epsilon,
            delta=claim.delta if plan.release is None else plan.delta,
            release=plan.release,
        )
        charge(ledger, new, budget)

    def _generator(self, *path: str | int) -> np.random.Generator:
        return secure_generator() if self.seed is None else seeded_generator(self.seed, *path)

    def _noise(self, *path: str | int) -> NoiseSource:
        if self.seeded_noise and self.seed is not None:
            return SeededNoise(self.seed, *path)
        return SecureNoise()

    def _facts(self, training_round: int, more: Mapping[str, float]) -> ConfigRecord:
        own: dict[str, float | str] = {
            "run": self.checkpoints.run_id,
            "number": training_round,
            "seed": self.seed or 0,
            "diagnostics": self.diagnostics,
        }
        return ConfigRecord({**own, **more})


def _check_budget_fits(budget: Budget, plan: PrivacyPlan) -> None:
    """Refuse a δ that the plan does not promise, and a budget that nothing can be held to."""
    delta = plan.delta
    if budget.ledger is None and delta != budget.delta:
        raise ValueError(
            f"budget.delta={budget.delta!r}: expected that of the plan, "
            f"{'which promises no privacy' if delta is None else delta!r}"
        )
    if delta is not None and delta > budget.delta:
        raise ValueError(
            f"budget.delta={budget.delta!r}: expected at least that of the plan, {delta!r}"
        )

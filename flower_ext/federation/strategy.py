"""The shared Strategy: cohort → configure → validate → bound, noise, ledger → aggregate → metrics.

A method adds the phases of its local training and its client functions. Everything that a
guarantee rests on happens here, once, and is taken from one frozen plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from copy import copy, deepcopy
from logging import getLogger
from pathlib import Path
from typing import ClassVar, TypeVar

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid

from flower_ext.federation import records, rounds
from flower_ext.federation.client import client_app
from flower_ext.federation.cohort import FederationNotReady
from flower_ext.federation.exchange import Content
from flower_ext.federation.population import Cohort, Population
from flower_ext.federation.promises import Promise, promise_of
from flower_ext.federation.run_loop import RunLoop
from flower_ext.federation.state.checkpoint import Asked
from flower_ext.federation.stragglers import Stragglers
from flower_ext.privacy import (
    Budget,
    BudgetExhausted,
    Guarantee,
    Ledger,
    NoiseSource,
    NonPrivatePlan,
    Plan,
    ReleasePlan,
    SecureNoise,
    SeededNoise,
    secure_generator,
    seeded_generator,
)
from flower_ext.privacy.client_level import client_level_guarantees
from flower_ext.privacy.ledger import Reservation
from flower_ext.privacy.randomness import derived_seed
from flower_ext.privacy.release_plan import Aggregate, RoundDiscarded
from flower_ext.privacy.shared_ledger import Charge, charge, note_uncovered
from flower_ext.runs import RunDirectory
from flower_ext.training import LocalTraining, Task

log = getLogger("flwr")
T = TypeVar("T")


class FederatedStrategy(RunLoop):
    """Base of every method: subclass it, name the client side, list the training phases.

    Parameters
    ----------
    plan : Plan
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

    def __init__(
        self,
        *,
        plan: Plan,
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
        if ledger is not None and not isinstance(plan, ReleasePlan):
            raise ValueError(
                f"ledger with a {type(plan).__name__}: it records the releases of a ReleasePlan "
                "alone; budget= stops a run under any plan that promises privacy"
            )
        if isinstance(personal, str):
            raise ValueError(f"personal={personal!r}: expected several names, as ({personal!r},)")
        self.plan = plan
        self._promise.check_method()
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
        return min(training.proximal_weight for training in self.training.values())

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
        promise = self._promise
        trusted = not promise.client_protects
        update = records.read_update(reply, base=self.sent, trust_models=trusted)
        if not update.metrics.get("num-examples", 1) >= 1:
            raise records.RefusedReply(
                f"num-examples={update.metrics['num-examples']!r}: expected at least 1"
            )
        if not trusted:
            partition, received = self.exchange.sent(reply)
            promise.check_upload(partition, update.arrays, received)
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

    def published_claim(self) -> Guarantee | None:
        """What the method's paper promises after the releases so far."""
        return None

    def provable_guarantees(self, plan: ReleasePlan) -> list[Guarantee]:
        """What is provable after the rounds so far, against each adversary."""
        return client_level_guarantees(
            plan,
            self.participations,
            secure_noise=not self.seeded_noise,
            secure_cohorts=not self.repeats,
            not_covered=self.not_covered(),
            memory=self.client.keeps_memory,
        )

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

    def protection(self) -> dict[str, float]:
        """What a client needs to know to protect its upload in this round."""
        return self._promise.facts()

    @property
    def repeats(self) -> bool:
        """Whether a round that is done again is the same one, since all in it follows a seed."""
        noiseless = isinstance(self.plan, NonPrivatePlan)
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
        secret = isinstance(self.plan, ReleasePlan) and not self.repeats  # ε rests on it
        drawn = self.population.draw(
            secure_generator() if secret else self._generator("cohort", number)
        )
        self._check_budget(server_round, drawn)
        if number == getattr(self.plan, "rounds", 0) + 1 > 1:
            log.warning(
                "training round %d is beyond the %d of the plan: ε grows past what its noise was "
                "chosen for (budget= would end the run)",
                number,
                number - 1,
            )
        self.cohort = self.begin_round(number, drawn, grid)
        if isinstance(self.plan, ReleasePlan) and self.ledger is not None:
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
        shared: Content = {
            records.MODEL: records.to_record(self.sent),
            records.ROUND: self._facts(number, self.protection()),
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
                lambda last: self._facts(number, {**self.protection(), "remembered": last}),
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
        released_only = isinstance(self.plan, ReleasePlan)  # nothing else may show in the model
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

    def guarantees(self) -> list[Guarantee]:
        """What protects people after the rounds so far: published claim and provable ones.

        The provable ones use the participations of this very run, which depend on nobody's data.
        """
        return self._promise.guarantees() if self.participations.rounds else []

    def spent(self) -> dict[str, float]:
        """ε so far, for the log and the report's figures."""
        return self._promise.spent()

    def give_up(self, reason: str) -> None:
        """Close a round that was begun and will not be finished; what it reserved stays spent."""
        self._reservation.discard(reason)
        self._release.close()

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
        if self._promise.needs_sizes and self.budget is not None:
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
        if self._promise.client_protects:
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
        self._promise.check_training()

    @property
    def next_training(self) -> int:
        """Number of the next training round, from 1: silent rounds do not count."""
        return self.participations.rounds + 1

    @property
    def _promise(self) -> Promise[Plan]:
        return promise_of(self)

    def _check_budget(self, server_round: int, cohort: Cohort) -> None:
        """Refuse a round with which the provable ε would exceed the budget."""
        if self.budget is None:
            return
        ahead = copy(self)
        ahead.population = deepcopy(self.population)
        ahead.population.count(cohort, len(cohort.asked))
        epsilon = ahead.spent().get("epsilon_provable", float("inf"))
        if self.budget.ledger is not None:
            self._charge(ahead, epsilon, self.budget, self.budget.ledger)
        elif epsilon > self.budget.epsilon:
            raise BudgetExhausted(
                f"round {server_round} would bring the provable spend to ε = {epsilon:.4g}, above "
                f"the budget of {self.budget.epsilon:g}"
            )

    def _charge(
        self, ahead: FederatedStrategy, epsilon: float, budget: Budget, ledger: Path
    ) -> None:
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
        if isinstance(plan, NonPrivatePlan):
            note_uncovered(ledger, **who, what="training without noise")
            return
        if isinstance(plan, ReleasePlan):
            unit, relation, delta = plan.unit, plan.release.relation, plan.delta
        else:
            claim = next(each for each in ahead.guarantees() if each.basis == "provable")
            unit, relation, delta = claim.unit, claim.relation, claim.delta
        new = Charge(
            **who,
            training=self.next_training,
            repeatable=self.repeats,
            unit=unit,
            relation=relation,
            epsilon=epsilon,
            delta=delta,
            release=plan.release if isinstance(plan, ReleasePlan) else None,
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


def _check_budget_fits(budget: Budget, plan: Plan) -> None:
    """Refuse a δ that the plan does not promise, and a budget that nothing can be held to."""
    delta = getattr(plan, "delta", None)
    if budget.ledger is None and delta != budget.delta:
        raise ValueError(
            f"budget.delta={budget.delta!r}: expected that of the plan, "
            f"{'which promises no privacy' if delta is None else delta!r}"
        )
    if delta is not None and delta > budget.delta:
        raise ValueError(
            f"budget.delta={budget.delta!r}: expected at least that of the plan, {delta!r}"
        )

"""The shared Strategy: cohort → configure → validate → bound, noise, ledger → aggregate → metrics.

A method adds the phases of its local training and its client functions. Everything that a
guarantee rests on happens here, once, and is taken from one frozen plan.
"""

from __future__ import annotations

import time
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
from flwr.serverapp.strategy import Result, Strategy

from flower_ext.federation import records
from flower_ext.federation._flower_private import record_of
from flower_ext.federation.client import ClientMethod, client_app
from flower_ext.federation.cohort import FederationNotReady
from flower_ext.federation.exchange import Content, Exchange
from flower_ext.federation.progress import Progress
from flower_ext.federation.promises import Promise, promise_of
from flower_ext.federation.state.checkpoint import Checkpoints
from flower_ext.federation.stragglers import Stragglers, shortened
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
from flower_ext.privacy.participations import Participations
from flower_ext.privacy.randomness import derived_seed
from flower_ext.privacy.release_plan import Aggregate, RoundDiscarded
from flower_ext.privacy.shared_ledger import Charge, charge, note_uncovered
from flower_ext.runs import RunDirectory
from flower_ext.training import LocalTraining, Task, matches

log = getLogger("flwr")
T = TypeVar("T")


class FederatedStrategy(Strategy):
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
    exposed : Sequence[str]
        What else shows anything of the clients' data, before the run or beside it, in a line each:
        the guarantees list it as not covered.
    """

    client: ClassVar[ClientMethod]
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
        self.personal = tuple(personal)
        self.server_learning_rate = server_learning_rate
        self.stragglers = stragglers
        self.seed = seed
        self.seeded_noise = seeded_noise
        self.evaluate_every = evaluate_every
        self.training_loss = training_loss
        self.diagnostics = diagnostics
        self.timeout = timeout
        self.ledger = ledger
        self.budget = budget
        self.exposed = tuple(exposed)
        self.participations = Participations()
        self.progress = Progress(run)
        self._exchange = Exchange(self.client.name, self.progress)
        self._checkpoints = Checkpoints(run)
        self.num_examples: dict[int, int] = {}
        self.client_metrics: dict[int, dict[str, float]] = {}
        self.remembered: dict[int, int] = {}
        """By partition, the training round whose memory the client has, as far as it answered."""
        self.stopped: str | None = None
        self._ready = self._ever_answered = False
        self._last_round: int | None = None
        self._cohort: list[int] = []
        self._base: records.Arrays = {}
        self._release = ExitStack()
        self._reservation = Reservation()

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

    # What a method may add ----------------------------------------------------------------

    @property
    def num_nodes(self) -> int:
        """How many nodes take part: the plan's population, unless its units are not the nodes."""
        return self.plan.sampling.population

    def prepare(self, grid: Grid) -> None:
        """What there is to do once, when all nodes are there and before the first round."""

    def draw_cohort(self, number: int) -> list[int]:
        """Partitions that training round ``number`` asks."""
        secret = isinstance(self.plan, ReleasePlan) and not self.repeats  # ε rests on it
        return self.plan.sampling.draw(
            secure_generator() if secret else self._generator("cohort", number)
        )

    @property
    def proximal_weight(self) -> float:
        """μ of the proximal term around the received model that every local training has."""
        return min(training.proximal_weight for training in self.training.values())

    @property
    def settings(self) -> Mapping[str, float]:
        """Numbers of the method that its client side needs; none by default."""
        return {}

    def server_state(self) -> Mapping[str, ArrayRecord]:
        """Records that travel to the clients next to the model; none by default."""
        return {}

    @property
    def participants(self) -> Sequence[int]:
        """Units whose data go into the round: the clients, unless the plan's units are others."""
        return self._cohort

    def count_participations(self, answered: int) -> None:
        """Count whose data went into the round; ``answered`` uploads can be used."""
        self.participations.record(self.participants, answered, asked=self.num_asked)

    def count_abandoned(self, participants: Sequence[int], answered: int, *, asked: int) -> None:
        """Count a round that was asked for and never finished, since its uploads may be known."""
        self.participations.record(participants, answered, asked=asked)

    def state(self) -> Mapping[str, records.Arrays]:
        """What the method holds on the server between rounds, in named groups; none by default."""
        return {}

    def restore(self, state: Mapping[str, records.Arrays]) -> None:
        """Take back what `state` returned, in a new process, after `prepare`."""

    def give_up(self, reason: str) -> None:
        """Close a round that was begun and will not be finished; what it reserved stays spent."""
        self._reservation.discard(reason)
        self._release.close()

    @property
    def repeats(self) -> bool:
        """Whether a round that is done again is the same one, since all in it follows a seed."""
        noiseless = isinstance(self.plan, NonPrivatePlan)
        return self.seed is not None and (self.seeded_noise or noiseless)

    def client_state(self, partition: int) -> Mapping[str, ArrayRecord]:
        """Records for one client alone, besides or in place of what all get; none by default.

        A record named ``records.MODEL`` is the model that this client receives: its update is the
        difference to that.
        """
        return {}

    def upload_norms(self, partition: int) -> float:
        """How many clipping norms this client's upload may have before noise."""
        return 1.0

    def combine(self, updates: Mapping[int, records.Update]) -> Aggregate:
        """The noised average of a round's updates, by partition.

        Raises
        ------
        RoundDiscarded
            Too few of them arrived.
        """
        return self.plan.aggregate(
            [update.arrays for update in updates.values()],
            cohort_size=len(self._cohort),
            noise=self._noise("server-noise", self.participations.rounds),
            like=self._base,
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

    # Training -----------------------------------------------------------------------------

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
        self._base = records.shared_arrays(self._shared(arrays))
        self._connect(grid)
        number = self.next_training
        self._cohort = self.draw_cohort(number)
        self._check_budget(server_round)
        if number == getattr(self.plan, "rounds", 0) + 1 > 1:
            log.warning(
                "training round %d is beyond the %d of the plan: ε grows past what its noise was "
                "chosen for (budget= would end the run)",
                number,
                number - 1,
            )
        if isinstance(self.plan, ReleasePlan) and self.ledger is not None:
            same = derived_seed(self.seed or 0, "release", self._checkpoints.run_id, number)
            entry = self.ledger.reserve(
                self.plan.release, round=server_round, identity=same if self.repeats else None
            )
            self._reservation = self._release.enter_context(entry)
        slow: dict[int, float] = {}
        if self.stragglers is not None:
            self.stragglers.check(self.training.values())
            rng = self._generator("stragglers", number)
            slow = self.stragglers.draw(self._cohort, self.num_nodes, rng)
        self.check_steps()
        trainings = _in_round(self.training, number)
        shared: Content = {
            records.MODEL: records.to_record(self._base),
            records.ROUND: self._facts(number, self._protection()),
            records.SETTINGS: ConfigRecord(dict(self.settings)),
            records.CONFIG: config,
            **self.server_state(),
        }
        whole = {**shared, **records.training_records(trainings)}
        contents: dict[int, Content] = dict.fromkeys(self._cohort, whole)
        for partition, how_far in slow.items():
            less = {phase: shortened(training, how_far) for phase, training in trainings.items()}
            contents[partition] = {**shared, **records.training_records(less)}
        for partition, content in contents.items():
            if own := self.client_state(partition):
                contents[partition] = {**content, **own}
        if self.client.mirrored:
            contents = self._with_remembered(contents, number)
        self.progress.row["cohort"] = len(self._cohort)
        self._checkpoints.asked(self)
        return self._exchange.ask("train", contents, server_round)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Refuse what is malformed; bound, noise and add up the rest."""
        updates = self._exchange.accepted(
            "train", server_round, replies, self._cohort, self._read_update
        )
        row = self.progress.row
        self._checkpoints.answered(self, len(updates))
        self.count_participations(len(updates))
        row["answered"] = len(updates)
        self._ever_answered |= bool(updates)
        norms = [u.metrics["update-norm"] for u in updates.values() if "update-norm" in u.metrics]
        if norms:
            row["update_norm_mean"] = float(np.mean(norms))
            row["update_norm_std"] = float(np.std(norms))
        sizes = {
            p: u.metrics["num-examples"] for p, u in updates.items() if "num-examples" in u.metrics
        }
        for partition, size in sizes.items():  # the smallest told: none makes ε look smaller
            self.num_examples[partition] = min(
                int(size), self.num_examples.get(partition, int(size))
            )
        with self._release:
            mean = self._aggregate(updates, server_round)
        if self.client.keeps_memory and not (self.client.mirrored and mean is None):
            self.remembered |= dict.fromkeys(updates, self.participations.rounds)
        if mean is None:
            return None, records.metrics_record(row)
        released_only = isinstance(self.plan, ReleasePlan)  # nothing else may show in the model
        moved = self.next_model(self._base, mean, {} if released_only else updates)
        moved = {name: moved[name].astype(base.dtype) for name, base in self._base.items()}
        return records.to_record(moved), records.metrics_record(row)

    def _with_remembered(self, contents: Mapping[int, Content], number: int) -> dict[int, Content]:
        """Tell each which of its rounds was used last; those told the same share a content."""
        told: dict[tuple[int, int], Content] = {}
        for partition, content in contents.items():
            last = self.remembered.get(partition, 0)
            if (id(content), last) not in told:
                facts = self._facts(number, {**self._protection(), "remembered": last})
                told[id(content), last] = {**content, records.ROUND: facts}
        return {p: told[id(c), self.remembered.get(p, 0)] for p, c in contents.items()}

    def _read_update(self, reply: Message) -> records.Update:
        promise = self._promise
        trusted = not promise.client_protects
        update = records.read_update(reply, base=self._base, trust_models=trusted)
        if not update.metrics.get("num-examples", 1) >= 1:
            raise records.RefusedReply(
                f"num-examples={update.metrics['num-examples']!r}: expected at least 1"
            )
        if not trusted:
            partition, received = self._exchange.sent(reply)
            promise.check_upload(partition, update.arrays, received)
        return update

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
        self._reservation.note(cohort=len(self._cohort), **facts)
        return dict(aggregate.value)

    # Evaluation ---------------------------------------------------------------------------

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask every client, in the rounds that evaluate and in the last."""
        if self.evaluate_every == 0:
            return []
        if server_round % self.evaluate_every and server_round != self._last_round:
            return []
        self._connect(grid)
        last = max(1, self.participations.rounds)
        content: Content = {
            records.MODEL: records.to_record(records.shared_arrays(self._shared(arrays))),
            records.ROUND: self._facts(last, {"training-loss": self.training_loss}),
            records.CONFIG: config,
            **records.training_records(_in_round(self.evaluation_training, last)),
        }
        everyone = dict.fromkeys(self._exchange.nodes, content)
        return self._exchange.ask("evaluate", everyone, server_round)

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Every client counts alike: mean, worst tenth, spread and Jain's index."""
        scores = self._exchange.accepted(
            "evaluate", server_round, replies, list(self._exchange.nodes), records.read_scores
        )
        scores = {p: s for p, s in scores.items() if s.get("num-examples") != 0}
        if not scores:
            return None
        self.client_metrics = scores
        return records.metrics_record(self.progress.scores(scores.values()))

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
        """Run up to round ``num_rounds``, less far where the budget ends first (see ``stopped``).

        A run directory that was resumed is gone on with: ``initial_arrays`` then only say which
        model it is.

        Raises
        ------
        FederationNotReady
            Not all nodes are there, or no client ever sent anything of use.
        """
        self.summary()
        for prefix in self.personal:
            if not any(matches(name, [prefix]) for name in initial_arrays):
                log.warning("personal=%r names none of %s", prefix, sorted(initial_arrays))
        self._last_round = num_rounds
        result = Result()
        result.arrays, done = self._checkpoints.resume(
            self, self._shared(initial_arrays), grid, num_rounds
        )
        train, evaluate = train_config or ConfigRecord(), evaluate_config or ConfigRecord()
        with self._checkpoints.guarding(self):
            for server_round in range(done + 1, num_rounds + 1):
                try:
                    self._play(server_round, grid, result, timeout, train, evaluate, evaluate_fn)
                except BudgetExhausted as reason:
                    self.stopped = str(reason)
                    log.warning("stopped before round %d: %s", server_round, reason)
                    self._last_round = server_round - 1
                    self._evaluate_at_last(grid, result, timeout, evaluate)
                    self._checkpoints.save_guarantees(self)
                    break
            if self.refusals and not (done or self._ever_answered):
                raise FederationNotReady(
                    f"no client ever sent anything of use; the first said: {self.refusals[0]}"
                )
        return result

    def _play(
        self,
        server_round: int,
        grid: Grid,
        result: Result,
        timeout: float,
        train_config: ConfigRecord,
        evaluate_config: ConfigRecord,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None,
    ) -> None:
        """One round: train, evaluate, write down."""
        started = time.monotonic()
        self.progress.begin()
        asked = self.configure_train(server_round, result.arrays, train_config, grid)
        answers = grid.send_and_receive(asked, timeout=timeout) if asked else []
        moved, metrics = self.aggregate_train(server_round, answers)
        if moved is not None:
            result.arrays = moved
        if metrics is not None:
            result.train_metrics_clientapp[server_round] = metrics
        self.progress.row["training_seconds"] = time.monotonic() - started
        scored = self._evaluate(server_round, grid, result, timeout, evaluate_config)
        if evaluate_fn is not None:
            own = evaluate_fn(server_round, result.arrays)
            if own is not None:
                result.evaluate_metrics_serverapp[server_round] = own
        if scored or server_round == self._last_round:
            self.progress.row |= self._spent()
            self._checkpoints.save_guarantees(self)
        self.progress.row["seconds"] = time.monotonic() - started
        self.progress.end(server_round, self._last_round or server_round)
        self._checkpoints.save(self, server_round, result.arrays)

    def _evaluate(
        self, server_round: int, grid: Grid, result: Result, timeout: float, config: ConfigRecord
    ) -> bool:
        """Ask for scores, where this round does; whether there are any."""
        asked = self.configure_evaluate(server_round, result.arrays, config, grid)
        answers = grid.send_and_receive(asked, timeout=timeout) if asked else []
        scores = self.aggregate_evaluate(server_round, answers) if asked else None
        if scores is not None:
            result.evaluate_metrics_clientapp[server_round] = scores
        return scores is not None

    def _evaluate_at_last(
        self, grid: Grid, result: Result, timeout: float, config: ConfigRecord
    ) -> None:
        """Evaluate the round that turned out to be the last, if nobody has yet."""
        last = self._last_round
        if not last or self.progress.evaluated(last):
            return
        self.progress.row = {}
        if self._evaluate(last, grid, result, timeout, config):
            self.progress.row |= self._spent()
            self.progress.add(last)
            self._checkpoints.save(self, last, result.arrays)

    def summary(self) -> None:
        """Log the method and its plan."""
        log.info("%s · %s", type(self).__name__, self.plan.describe())

    # Privacy ------------------------------------------------------------------------------

    def guarantees(self) -> list[Guarantee]:
        """What protects people after the rounds so far: published claim and provable ones.

        The provable ones use the participations of this very run, which depend on nobody's data.
        """
        return self._promise.guarantees() if self.participations.rounds else []

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

    def _spent(self) -> dict[str, float]:
        """ε so far, for the log and the report's figures."""
        return self._promise.spent()

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

    def _check_budget(self, server_round: int) -> None:
        """Refuse a round with which the provable ε would exceed the budget."""
        if self.budget is None:
            return
        ahead = copy(self)
        ahead.participations = deepcopy(self.participations)
        ahead.count_participations(self.num_asked)
        epsilon = ahead._spent().get("epsilon_provable", float("inf"))
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
        checkpoints = self._checkpoints
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

    def _protection(self) -> dict[str, float]:
        return self._promise.facts()

    def check_steps(self) -> None:
        """Refuse local training that the plan does not speak of.

        Done before each training round; a method may do it once its training is known.

        Raises
        ------
        ValueError
            Names the setting and what the plan expects.
        """
        self._promise.check_training()

    @property
    def _promise(self) -> Promise[Plan]:
        return promise_of(self)

    @property
    def next_training(self) -> int:
        """Number of the next training round, from 1: silent rounds do not count."""
        return self.participations.rounds + 1

    @property
    def sent(self) -> records.Arrays:
        """The shared part of the model that clients were sent last; nothing before that."""
        return self._base

    @property
    def num_asked(self) -> int:
        """How many clients are asked in this training round."""
        return len(self._cohort)

    @property
    def refusals(self) -> list[str]:
        """Replies that were not used, and why."""
        return self._exchange.refusals

    # Parts --------------------------------------------------------------------------------

    def _connect(self, grid: Grid) -> None:
        if self._ready:
            return
        roster = self._exchange.connect(grid, self.num_nodes, timeout=self.timeout)
        if not roster.known:
            self._check_foreign_clients(roster.said)
        self.prepare(grid)
        if self._promise.needs_sizes and self.budget is not None:
            self._ask_sizes(grid)
        self._ready = True

    def _ask_sizes(self, grid: Grid) -> None:
        """Learn what else the first upload tells: only with it is a round's ε known beforehand."""
        content = {records.ROUND: self._facts(0, {"report-size": True})}
        everyone = dict.fromkeys(self._exchange.nodes, content)
        told = self.ask_each(grid, everyone, records.read_answer)
        self.num_examples |= {p: int(answer["num-examples"]) for p, answer in told.items()}

    def reconnect(self, grid: Grid, arrays: ArrayRecord) -> bool:
        """Meet the clients of a run that goes on; whether they can tell their partitions."""
        self._base = records.shared_arrays(self._shared(arrays))
        self._connect(grid)
        return self._exchange.connect(grid, self.num_nodes, timeout=self.timeout).known

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
        nodes = self._exchange.nodes if partitions is None else partitions
        special = {partition: {**content, **alone} for partition, alone in (own or {}).items()}
        return self.ask_each(grid, {**dict.fromkeys(nodes, content), **special}, read)

    def ask_each(
        self, grid: Grid, contents: Mapping[int, Content], read: Callable[[Message], T]
    ) -> dict[int, T]:
        """What clients answer to a query each, by partition.

        Raises
        ------
        FederationNotReady
            A node does not answer, or not what ``read`` accepts.
        """
        asked = self._exchange.ask("query", contents, 0)
        replies = grid.send_and_receive(asked, timeout=self.timeout)
        answers = self._exchange.accepted("query", 0, replies, list(contents), read)
        if missing := sorted(set(contents) - set(answers)):
            raise FederationNotReady(
                f"partitions {missing} cannot take part: " + ("; ".join(self.refusals) or "silent")
            )
        return answers

    def _shared(self, arrays: ArrayRecord) -> ArrayRecord:
        shared = {n: a for n, a in arrays.items() if not matches(n, self.personal)}
        if not shared:
            raise ValueError(f"personal={self.personal} leaves no parameter to share")
        return record_of(ArrayRecord, shared)

    def _generator(self, *path: str | int) -> np.random.Generator:
        return secure_generator() if self.seed is None else seeded_generator(self.seed, *path)

    def _noise(self, *path: str | int) -> NoiseSource:
        if self.seeded_noise and self.seed is not None:
            return SeededNoise(self.seed, *path)
        return SecureNoise()

    def _facts(self, training_round: int, more: Mapping[str, float]) -> ConfigRecord:
        own: dict[str, float | str] = {
            "run": self._checkpoints.run_id,
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


def _in_round(
    trainings: Mapping[str, LocalTraining], training_round: int
) -> dict[str, LocalTraining]:
    return {phase: training.in_round(training_round) for phase, training in trainings.items()}

"""Options, traits and hooks of a method.

A run uses the hooks in this order:

==========================================  ======================================================
hook                                        purpose
==========================================  ======================================================
`training`, `evaluation_training`,          describe the clients' work
`settings`
`accounted`                                 is the plan that bounds and accounts for each round
`prepare`                                   prepares the run before its first round
`begin_round`                               prepares each training round
`server_state`, `client_state`              return records that the server sends to clients
`read_update`, `combine`, `next_model`      compute the next model from the replies
`claims`                                    returns the guarantees
`state`, `restore`                          carry the server's state to the process that resumes
==========================================  ======================================================
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from logging import getLogger
from typing import ClassVar

import numpy as np
from flwr.app import ArrayRecord, Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid

from flower_ext.errors import InvalidValue
from flower_ext.federation import records, rounds
from flower_ext.federation.client import client_app
from flower_ext.federation.population import Cohort, Population
from flower_ext.federation.run_loop import RunLoop
from flower_ext.federation.secure_sum import SecureRound
from flower_ext.federation.spending import Spending
from flower_ext.federation.stragglers import Stragglers
from flower_ext.federation.uploads import in_parts
from flower_ext.privacy import (
    Budget,
    Guarantee,
    Ledger,
    NoiseSource,
    PrivacyPlan,
    SecureNoise,
    SeededNoise,
    secure_generator,
    seeded_generator,
)
from flower_ext.privacy.mechanisms.plan import Aggregate, times_examples, weighted_mean
from flower_ext.privacy.mechanisms.run_facts import MethodTraits, RunFacts
from flower_ext.runs import RunDirectory
from flower_ext.training import LocalTraining, Task

log = getLogger("flwr")


class MethodHooks(RunLoop):
    """Options that every method takes, and hooks with their defaults (see `FederatedStrategy`)."""

    any_client_app: ClassVar[bool] = False
    """True if a ClientApp that does not use this package can take part."""
    one_model: ClassVar[bool] = True
    """True if the server sends all clients the same shared model; see `client_state`."""
    units_are_clients: ClassVar[bool] = True
    """True if a `ReleasePlan` protects clients, each of which has one upload per round."""
    bounds_units: ClassVar[bool] = False
    """True if an upload is a sum over units, and the client side bounds each unit's part."""
    needs_each_update: ClassVar[bool] = False
    """True if `next_model` needs every single update, which a `ReleasePlan` hides. If False, the
    server adds each update to a sum when it arrives, and drops it."""
    never_repeats: ClassVar[bool] = False
    """True if a repeated round differs from the first attempt, whatever the seed."""
    added_proximal_weight: float = 0.0
    """μ of a proximal term around the received model, in addition to that of ``training``."""
    shown: Sequence[str] = ()
    """Things that the method reveals about the clients' data without a guarantee, a line each."""

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
        frozen: str = "",
    ) -> None:
        if not 0 < server_learning_rate < float("inf"):
            raise InvalidValue(f"server_learning_rate={server_learning_rate!r}: expected > 0")
        if evaluate_every < 0:
            raise InvalidValue(f"evaluate_every={evaluate_every!r}: expected an integer >= 0")
        if seeded_noise and seed is None:
            raise InvalidValue("seeded_noise=True: expected a seed as well; give seed=")
        if isinstance(personal, str):
            raise InvalidValue(
                f"personal={personal!r}: expected a sequence of names, for example ({personal!r},)"
            )
        self.plan = plan
        self.accounted.check(self.traits)
        self.server_learning_rate = server_learning_rate
        self.stragglers = stragglers
        self.seed = seed
        self.seeded_noise = seeded_noise
        self.evaluate_every = evaluate_every
        self.training_loss = training_loss
        self.diagnostics = diagnostics
        self.exposed = tuple(exposed)
        self.frozen = frozen
        spending = Spending(ledger=ledger, budget=budget, exposed=self.exposed)
        spending.check_plan(self.accounted)
        super().__init__(
            population=population or Population(self.accounted.sampling),
            repeats=self.repeats,
            personal=personal,
            timeout=timeout,
            spending=spending,
            run=run,
        )
        self.cohort = Cohort(asked=(), units=())
        """The cohort of the newest training round."""
        self.sent: records.Arrays = {}
        """The shared part of the model that the server sent last; empty before the first round."""
        self._met = False
        self.secure_round: SecureRound | None = None
        """The secure sum of the newest training round, if the plan has one."""
        self._too_few = ""

    @property
    def next_training(self) -> int:
        """Number of the next training round, from 1; rounds without training do not count."""
        return self.participations.rounds + 1

    @property
    def training(self) -> Mapping[str, LocalTraining]:
        """The phases of local training, by the names that the client side uses."""
        raise NotImplementedError

    @property
    def evaluation_training(self) -> Mapping[str, LocalTraining]:
        """Phases of training on a client before it evaluates; none by default."""
        return {}

    @property
    def settings(self) -> Mapping[str, float]:
        """Numbers of the method that its client side needs; none by default."""
        return {}

    @property
    def accounted(self) -> PrivacyPlan:
        """The plan that bounds each round and accounts for it; by default the given plan.

        A method overrides this hook if its units, or the numbers that it sends, differ from those
        that the given plan covers.
        """
        return self.plan

    def prepare(self, grid: Grid) -> None:
        """Prepare the run, once, after all nodes have connected and before the first round."""

    def begin_round(self, number: int, cohort: Cohort, grid: Grid) -> Cohort:
        """Prepare training round ``number`` and return its cohort.

        The returned cohort lacks those clients or units that turn out to be unable to take part.
        """
        return cohort

    def server_state(self) -> Mapping[str, ArrayRecord]:
        """Return records that the server sends to all clients beside the model; none by default."""
        return {}

    def client_state(self, partition: int) -> Mapping[str, ArrayRecord]:
        """Return records for one client only; none by default.

        They are sent beside the records for all clients, and replace those of the same name. A
        record ``records.MODEL`` is the model that this client receives, and its update is the
        difference to that model.
        """
        return {}

    def read_update(self, reply: Message) -> records.Update:
        """Read a client's update and check it.

        Raises
        ------
        RefusedReply
            The update does not fit the model that was sent, or is larger than an honest update.
        """
        return rounds.read_update(reply, self.accounted, self.cohort, self.sent, self.exchange)

    def combine(self, updates: Iterable[tuple[int, records.Update]]) -> Aggregate:
        """Return the noised average of a round's updates.

        Parameters
        ----------
        updates : Iterable[tuple[int, Update]]
            Partitions with their updates, in the order of arrival, to be read once. A method that
            adds each update to a sum before it reads the next one needs memory for one update.

        Raises
        ------
        RoundDiscarded
            Too few updates arrived.
        """
        aggregate = partial(
            self.accounted.aggregate,
            cohort_size=len(self.cohort.asked),
            noise=self._noise("server-noise", self.next_training),
        )
        if not self.accounted.weighs_examples:
            parts = in_parts(update.arrays for _, update in updates)
            return aggregate(parts, like=self.sent)
        uploads = (times_examples(own.arrays, own.metrics["num-examples"]) for _, own in updates)
        return weighted_mean(lambda like: aggregate(uploads, like=like), like=self.sent)

    @property
    def only_adds(self) -> bool:
        """True where the server makes nothing of updates but their sum."""
        return (
            not self.needs_each_update
            and self.secure_round is None
            and type(self).combine is MethodHooks.combine
            and not self.accounted.weighs_examples
            and not self.accounted.bounds_models
        )

    def next_model(
        self, base: records.Arrays, mean: records.Arrays, updates: Mapping[int, records.Update]
    ) -> records.Arrays:
        """Return the next global model: ``base`` moved along the mean update.

        Parameters
        ----------
        base : Arrays
            The model that the server sent.
        mean : Arrays
            The mean of the updates, with the bound and the noise of the plan.
        updates : Mapping[int, Update]
            The single updates by partition; empty under a `ReleasePlan`, which releases only the
            mean. The updates' arrays are kept only if the method sets ``needs_each_update``.
        """
        return {name: base[name] + self.server_learning_rate * mean[name] for name in base}

    def claims(self, run: RunFacts) -> list[Guarantee]:
        """Return the paper's guarantee after the rounds so far, and the provable guarantees."""
        return self.accounted.guarantees(run)

    # What others see of it ----------------------------------------------------------------

    @classmethod
    def client_app(
        cls, task: Task | Callable[[Context], Task], *, allow_seeded_noise: bool = False
    ) -> ClientApp:
        """Return a ClientApp that answers this method's messages (see `federation.client_app`)."""
        return client_app(cls.client, task=task, allow_seeded_noise=allow_seeded_noise)

    def summary(self) -> None:
        """Log the method and its plan."""
        log.info("%s · %s", type(self).__name__, self.accounted.describe())

    @property
    def repeats(self) -> bool:
        """True if a repeated round equals the first attempt, because a seed determines it."""
        noiseless = self.accounted.delta is None
        seeded = self.seed is not None and (self.seeded_noise or noiseless)
        return seeded and not self.never_repeats

    def not_covered(self) -> list[str]:
        """Return what leaves the clients in this run without the guarantee, a line each."""
        exposed = ["that a client answered or not, and when"]
        noised = self.accounted.evaluation_release is not None
        if self.evaluate_every and not noised:
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
        return [*exposed, *self.exposed, *self.shown]

    @property
    def traits(self) -> MethodTraits:
        """The method's declarations, by which the plan decides if it can protect the method."""
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
    def num_units(self) -> int | None:
        """Number of privacy units of the run; None if it is not known."""
        return self.plan.num_units(self.run_facts)

    @property
    def run_facts(self) -> RunFacts:
        """The facts about the run so far that the plan may use."""
        own = [training.proximal_weight for training in self.training.values()]
        roster = self.exchange.roster
        foreign = roster is not None and roster.foreign  # such clients may remember anything
        return RunFacts(
            method=replace(self.traits, keeps_memory=True) if foreign else self.traits,
            participations=self.participations,
            num_examples=self.num_examples,
            training=self.training,
            proximal_weight=min(own, default=0.0) + self.added_proximal_weight,
            sent=self.sent,
            secure_noise=not self.seeded_noise,
            secure_cohorts=not self.repeats,
            not_covered=self.not_covered(),
        )

    def _generator(self, *path: str | int) -> np.random.Generator:
        return secure_generator() if self.seed is None else seeded_generator(self.seed, *path)

    def _noise(self, *path: str | int) -> NoiseSource:
        if self.seeded_noise and self.seed is not None:
            return SeededNoise(self.seed, *path)
        return SecureNoise()

"""Options, traits and hooks of a method.

The hooks, in the order of a run: `training`, `evaluation_training` and `settings` describe the
work, `accounted` the plan that rounds are held to; `prepare` comes before the first round,
`begin_round` before each; `server_state` and `client_state` travel to the clients; `read_update`,
`combine` and `next_model` make a model of the answers; `claims` says what protects people; `state`
and `restore` carry what the server holds from one process to the next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from logging import getLogger
from typing import Any, ClassVar

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
from flower_ext.privacy.plan import Aggregate, times_examples, weighted_mean
from flower_ext.privacy.run_facts import MethodTraits, RunFacts
from flower_ext.runs import RunDirectory
from flower_ext.training import LocalTraining, Task

log = getLogger("flwr")

_FORMER = {
    "num_nodes": "population=",
    "draw_cohort": "population= (and begin_round)",
    "participants": "population=",
    "num_asked": "population=",
    "count_participations": "population=",
    "count_abandoned": "population=",
    "upload_norms": "the norms of the Cohort that begin_round returns",
    "published_claim": "claims",
    "provable_guarantees": "claims",
    "proximal_weight": "added_proximal_weight",
    "check_steps": "check_training",
    "_read_update": "read_update",
}
"""Hooks that a method may have filled in before this release."""


class MethodHooks(RunLoop):
    """Options that every method takes, and hooks with their defaults (see `FederatedStrategy`)."""

    any_client_app: ClassVar[bool] = False
    """Whether a ClientApp that knows nothing of this package can take part."""
    one_model: ClassVar[bool] = True
    """Whether all clients are sent the same shared model; see `client_state`."""
    units_are_clients: ClassVar[bool] = True
    """Whether a `ReleasePlan` protects clients, each of them with one upload a round."""
    bounds_units: ClassVar[bool] = False
    """Whether an upload is a sum over units, each of which the client side bounds by itself."""
    needs_each_update: ClassVar[bool] = False
    """Whether `next_model` needs every single update, which a `ReleasePlan` hides; otherwise each
    is added to a sum as it comes, and dropped."""
    never_repeats: ClassVar[bool] = False
    """Whether a round that is done again is another one, whatever the seed."""
    added_proximal_weight: float = 0.0
    """μ of a proximal term around the received model, besides what ``training`` asks for."""
    shown: Sequence[str] = ()
    """What the method itself shows of the clients' data, in a line each: no guarantee covers it."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name in _FORMER.keys() & vars(cls).keys():  # else it would never be called
            raise TypeError(f"{cls.__name__}.{name}: a method says that by {_FORMER[name]} now")

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
            raise InvalidValue("seeded_noise=True needs a seed")
        if isinstance(personal, str):
            raise InvalidValue(f"personal={personal!r}: expected several names, as ({personal!r},)")
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
        """That of the newest training round."""
        self.sent: records.Arrays = {}
        """The shared part of the model that clients were sent last; nothing before that."""
        self._met = False
        self.secure_round: SecureRound | None = None
        """The secure sum of the newest training round, where the plan has one."""
        self._too_few = ""

    @property
    def next_training(self) -> int:
        """Number of the next training round, from 1: silent rounds do not count."""
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
        """The plan that rounds are held to and accounted by; by default the given one.

        Another one where the method's units, or the numbers that it sends, are not those that the
        given plan speaks of.
        """
        return self.plan

    def prepare(self, grid: Grid) -> None:
        """Prepare the run, once, when all nodes are there and before the first round."""

    def begin_round(self, number: int, cohort: Cohort, grid: Grid) -> Cohort:
        """Prepare training round ``number``, which will ask ``cohort``, and return the cohort.

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
        return rounds.read_update(reply, self.accounted, self.cohort, self.sent, self.exchange.sent)

    def combine(self, updates: Iterable[tuple[int, records.Update]]) -> Aggregate:
        """The noised average of a round's updates.

        Parameters
        ----------
        updates : Iterable[tuple[int, Update]]
            With their partitions, once and as they come. Who adds each up before the next comes
            needs memory for one.

        Raises
        ------
        RoundDiscarded
            Too few of them arrived.
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
        """The next global model: ``base`` moved along the mean update.

        Parameters
        ----------
        base, mean : Arrays
            The model that was sent, and the mean of what came back, bounded and noised.
        updates : Mapping[int, Update]
            The single updates by partition; none under a `ReleasePlan`, which releases the mean.
            They can be read where the method says ``needs_each_update``: else they were not kept.
        """
        return {name: base[name] + self.server_learning_rate * mean[name] for name in base}

    def claims(self, run: RunFacts) -> list[Guarantee]:
        """Return the paper's guarantee after a run's rounds so far, and the provable ones."""
        return self.accounted.guarantees(run)

    # What others see of it ----------------------------------------------------------------

    @classmethod
    def client_app(
        cls, task: Task | Callable[[Context], Task], *, allow_seeded_noise: bool = False
    ) -> ClientApp:
        """A ClientApp that answers this method's messages (see `federation.client_app`)."""
        return client_app(cls.client, task=task, allow_seeded_noise=allow_seeded_noise)

    def summary(self) -> None:
        """Log the method and its plan."""
        log.info("%s · %s", type(self).__name__, self.accounted.describe())

    @property
    def repeats(self) -> bool:
        """Whether a round that is done again is the same one, since all in it follows a seed."""
        noiseless = self.accounted.delta is None
        seeded = self.seed is not None and (self.seeded_noise or noiseless)
        return seeded and not self.never_repeats

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
        return [*exposed, *self.exposed, *self.shown]

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
        own = [training.proximal_weight for training in self.training.values()]
        roster = self.exchange.roster
        foreign = roster is not None and roster.foreign  # what such clients remember, nobody knows
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

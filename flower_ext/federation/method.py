"""The base of federated methods: what clients train, and the step of the server.

A `Method` is frozen, and makes no messages or files: it takes and returns arrays by name. (`Hosted`
alone makes messages, because it passes them to a strategy of Flower.) Only its `State`
changes between rounds: `step` takes it, and returns the next one. Checkpoints, resumed runs and
`Upcycled` therefore treat every method alike.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, ClassVar, TypeVar

import numpy as np
from flwr.app import ConfigRecord, Context
from flwr.clientapp import ClientApp

from flower_ext.checks import Checked, Rule, is_number
from flower_ext.errors import InvalidValue
from flower_ext.federation.client.app import client_app
from flower_ext.federation.client.client_method import ClientMethod
from flower_ext.federation.messages import records
from flower_ext.federation.messages.exchange import Clients
from flower_ext.federation.messages.records import Arrays
from flower_ext.federation.messages.replies import read_answer
from flower_ext.federation.messages.upload_reply import Update
from flower_ext.federation.method_state import State, groups_under, prefixed
from flower_ext.federation.population import Cohort, Population
from flower_ext.federation.server_optimizers import MEAN, ModelAverage, ServerOptimizer
from flower_ext.federation.sums.summation import ClientSum, Summation
from flower_ext.privacy import Guarantee, PrivacyPlan
from flower_ext.privacy.mechanisms.round_mechanism import RoundMechanism
from flower_ext.privacy.queries.vector_query import VectorQuery
from flower_ext.privacy.run_summary import MethodTraits, RunSummary
from flower_ext.training import LocalTraining, Task

T = TypeVar("T")
_OPTIMIZER_GROUP = "optimizer."
"""Prefix of the groups of a state that the server's optimizer uses."""
_IS_OPTIMIZER = Rule("an optimizer such as Sgd or Adam", lambda x: isinstance(x, ServerOptimizer))
_AVERAGES = Rule(
    "ExponentialAverage, TailAverage or None", lambda x: isinstance(x, ModelAverage | None)
)


@dataclass(frozen=True, kw_only=True)
class Connected:
    """Parts of a run that a method can use once all clients are connected.

    Parameters
    ----------
    clients : Clients
        The clients, to which `ask` sends the method's questions.
    summation : Summation
        Adds up the clients' contributions in every round.
    model : Mapping[str, ndarray]
        The shared model.
    generator : Callable[..., numpy.random.Generator]
        Returns the run's random generator for one purpose. Names and numbers state the purpose, as
        in ``generator("cohort", 3)``.
    """

    clients: Clients
    summation: Summation
    model: Arrays
    generator: Callable[..., np.random.Generator]

    def ask(
        self, question: Mapping[str, int | float | str], read: Callable[[Arrays], T]
    ) -> dict[int, T]:
        """Ask each client a question, and return what ``read`` makes of its arrays, by partition.

        ``question`` holds the values that `ClientMethod.answer` gets.

        Raises
        ------
        FederationNotReady
            A client does not answer, or ``read`` refuses its answer.
        """
        content = {records.QUESTION: ConfigRecord({**question})}
        return self.clients.ask_all(
            dict.fromkeys(self.clients.nodes, content), lambda reply: read(read_answer(reply))
        )


@dataclass(frozen=True, kw_only=True)
class Released:
    """Result of a training round that the server may use.

    Parameters
    ----------
    mean : Mapping[str, ndarray]
        Mean of the updates, bounded and noised as the plan says.
    kept : Mapping[int, Update], optional
        Single updates by partition, for a method with ``needs_each_update``; otherwise None.
    round : int
        Number of the training round, from 1.
    population : int
        Number of clients (or of users) from which cohorts are drawn.
    fraction : float
        Fraction of the population that contributed to the mean. If the plan hides who answered,
        the sampling rate takes the place of this fraction.
    """

    mean: Arrays
    kept: Mapping[int, Update] | None = None
    round: int
    population: int
    fraction: float

    @property
    def updates(self) -> Mapping[int, Update]:
        """Single updates by partition.

        Raises
        ------
        InvalidValue
            The server added the updates up as they arrived, because the method does not say that
            its step reads single updates.
        """
        if self.kept is None:
            raise InvalidValue(
                "the server added the round's updates up as they arrived and did not keep them: "
                "set needs_each_update = True in a method whose step reads single updates"
            )
        return self.kept


@dataclass(frozen=True, kw_only=True)
class Method(Checked):
    """Base class of federated methods; a subclass is a frozen dataclass.

    A subclass sets ``client`` to its client side. Each field of type `LocalTraining` describes one
    phase of local training. All clients have the same weight in the mean, unless the
    method says otherwise, or the plan is a ``NonPrivatePlan(weighting="examples")``.

    Parameters
    ----------
    personal : Sequence[str]
        Names of modules that never leave the client; the server drops them from the initial
        arrays. ``*`` matches any part of a name, as in ``"*.classifier"``.
    server : ServerOptimizer
        Moves the shared model by the mean update. By default it adds the whole mean update to the
        model.
    average : ModelAverage, optional
        Average of the models so far, which clients evaluate and the run returns in place of the
        newest model. Training continues from the newest model.

    Raises
    ------
    InvalidValue
        A field is out of range.
    """

    client: ClassVar[ClientMethod]
    """The client side."""
    plain_name: ClassVar[str]
    """Name of the class in the log of a run without noise, as "Ditto" is for DPDitto; by default
    `name`. A subclass has a name of its own, so it does not inherit this one."""
    any_client_app: ClassVar[bool] = False
    """True if a ClientApp that does not use this package can take part."""
    one_model: ClassVar[bool] = True
    """True if the server sends all clients the same shared model; see `begin_round`."""
    bounds_units: ClassVar[bool] = False
    """True if an upload adds up one part for each privacy unit, and the client bounds each part."""
    weighs_updates: ClassVar[bool] = False
    """True if the method determines the weights of clients, such as equal ones.

    It then refuses a plan that weights them by their numbers of examples.
    """
    needs_each_update: ClassVar[bool] = False
    """True if `step` needs every single update, which a `ReleasePlan` hides. If False, the server
    adds each update to a sum when it arrives, and drops it."""
    needs_metrics: ClassVar[bool] = False
    """True if the server needs the ``metrics`` of each client (see `ClientMethod`). The strategy
    then refuses a plan under which clients do not send them (``tells_sizes = False``)."""

    personal: Sequence[str] = ()
    server: Annotated[ServerOptimizer, _IS_OPTIMIZER] = MEAN
    average: Annotated[ModelAverage | None, _AVERAGES] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.personal, str):
            raise InvalidValue(
                f"personal={self.personal!r}: expected a sequence of names, for example "
                f"({self.personal!r},)"
            )
        object.__setattr__(self, "personal", tuple(self.personal))
        if type(self).personal and not self.personal:
            raise InvalidValue(
                f"personal=(): expected the names of {self.name}'s personal modules, for example "
                f"{type(self).personal}"
            )
        if self.average is not None and not self.one_model:
            raise InvalidValue(
                f"average={self.average!r}: expected None, because {self.name}'s server sends each "
                "client a model of its own"
            )

    @property
    def training(self) -> Mapping[str, LocalTraining]:
        """Phases of local training by name; by default all fields of type `LocalTraining`."""
        values = {part.name: getattr(self, part.name) for part in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, LocalTraining)}

    @property
    def evaluation_training(self) -> Mapping[str, LocalTraining]:
        """Phases of training that a client runs before it evaluates; by default, no phase."""
        return {}

    def settings(self, plan: PrivacyPlan) -> Mapping[str, float]:
        """Return numbers that the client side needs; by default all fields that are numbers."""
        values = {part.name: getattr(self, part.name) for part in fields(self)}
        return {name: float(value) for name, value in values.items() if is_number(value)}

    def configure(
        self, config: ConfigRecord, model: Arrays, state: State, plan: PrivacyPlan
    ) -> ConfigRecord:
        """Return the user's configuration of a round, with entries that the method adds, if any."""
        return config

    def check(self, plan: PrivacyPlan) -> None:
        """Refuse a plan that does not fit the method; by default, accept every plan.

        Raises
        ------
        ValueError
            The plan does not fit; the message gives the reason.
        """

    def mechanism(self, plan: PrivacyPlan) -> RoundMechanism:
        """Return the privacy mechanism that the plan makes for this method's rounds.

        A method overrides this member if its rounds release sums that `traits` do not describe.
        """
        return plan.mechanism(self.traits)

    def population(self, plan: PrivacyPlan, summation: Summation) -> Population:
        """Return the `Population`, which has the clients to ask and the privacy units to count."""
        return Population(summation.mechanism.sampling)

    @property
    def traits(self) -> MethodTraits:
        """Declarations of the method, by which a plan decides whether it can protect the method."""
        return MethodTraits(
            name=self.name,
            bounds_units=self.bounds_units,
            weighs_updates=self.weighs_updates,
            needs_each_update=self.needs_each_update,
            keeps_memory=self.client.keeps_memory,
            updates_ignore_memory=self.client.updates_ignore_memory,
            upload_phase=self.client.upload_phase,
        )

    @property
    def name(self) -> str:
        """Name of the method's class, for the log, errors and accounts of privacy."""
        return type(self).__name__

    def check_model(self, model: Arrays) -> None:
        """Refuse a shared model that the method cannot train; by default, accept every model."""

    def init(self, model: Arrays, population: int) -> State:
        """Return the server's state before the first round; by default the optimizer's moments.

        Parameters
        ----------
        model : Mapping[str, ndarray]
            The initial shared model.
        population : int
            Number of clients (or of users) from which cohorts are drawn.
        """
        return State(server=prefixed(_OPTIMIZER_GROUP, self.server.init(model)))

    def connect(self, connected: Connected, state: State) -> State:
        """Ask the connected clients what the run must know; return the state with their answers.

        Every process of a run calls this once, before its first round. In a resumed run, ``state``
        comes from the checkpoint.
        """
        return state

    def begin_round(self, cohort: Cohort, model: Arrays, state: State) -> Cohort:
        """Return a training round's cohort, with models and arrays that only some clients get."""
        return cohort

    def check_update(self, update: Update) -> None:
        """Refuse an update that `step` cannot use; by default, accept every update.

        Raises
        ------
        RefusedReply
            The message gives the reason.
        """

    def step(self, model: Arrays, released: Released, state: State) -> tuple[Arrays, State]:
        """Return the next model and state; by default, the optimizer moves the model."""
        moments = groups_under(_OPTIMIZER_GROUP, state.server)
        moved, kept = self.server.step(model, released.mean, moments)
        return moved, state.updated(server=prefixed(_OPTIMIZER_GROUP, kept))

    def forget(self, partitions: Collection[int], state: State, population: int) -> State:
        """Return the state without the single uploads of clients that withdrew.

        The server calls this before each round, with the ``partitions`` of all clients that
        withdrew so far. By default, the state stays, because it holds sums over clients only.
        """
        return state

    def mean_noise(self, mechanism: RoundMechanism) -> float:
        """Return the stddev of the noise in each coordinate of the mean that moves the model."""
        return mechanism.mean_noise_stddev

    def disclosures(self, summation: Summation) -> Sequence[str]:
        """Return a line for each thing that the method reveals and no guarantee covers."""
        return summation.disclosures

    def complete_summary(self, run: RunSummary, state: State) -> RunSummary:
        """Return ``run`` with the values that only the method knows; unchanged by default."""
        return run

    def claims(self, run: RunSummary, mechanism: RoundMechanism) -> list[Guarantee]:
        """Return the guarantees after the rounds so far: those of the method's paper, and provable.

        By default, only the mechanism of the rounds has guarantees.
        """
        return mechanism.guarantees(run)

    @classmethod
    def client_app(
        cls,
        task: Task | Callable[[Context], Task],
        *,
        allow_seeded_noise: bool = False,
        queries: Sequence[type[VectorQuery]] = (),
        sums: Sequence[type[ClientSum]] = (),
    ) -> ClientApp:
        """Return a ClientApp that answers this method's messages (see `federation.client_app`)."""
        return client_app(
            cls.client,
            task=task,
            allow_seeded_noise=allow_seeded_noise,
            queries=queries,
            sums=sums,
        )


def require_usual_server(method: Method, because: str) -> None:
    """Refuse an optimizer ``server`` other than `MEAN`, because the method's step ignores it.

    Raises
    ------
    InvalidValue
        ``server`` is not `MEAN`; ``because`` is the reason in the message.
    """
    if method.server != MEAN:
        raise InvalidValue(f"server={method.server!r}: expected {MEAN!r}, because {because}")

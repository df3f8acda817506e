"""The interface of sums of clients' contributions.

On the server, a `Summation` opens the sum of each round (`OpenSum`), and a mechanism releases the
mean. On a client, a `ClientSum` seals the contribution.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

from flwr.app import ArrayRecord, Context, Message

from flower_ext.data import ClientData
from flower_ext.errors import InvalidValue
from flower_ext.federation.messages import records
from flower_ext.federation.messages.exchange import Clients
from flower_ext.federation.messages.records import Arrays
from flower_ext.federation.messages.upload_reply import Update
from flower_ext.federation.population import Cohort, Population
from flower_ext.privacy import AdversaryView, NoiseSource
from flower_ext.privacy.mechanisms.bounds import UnitSum
from flower_ext.privacy.mechanisms.protections import Protection
from flower_ext.privacy.mechanisms.round_mechanism import Aggregate, RoundMechanism
from flower_ext.privacy.mechanisms.updates import NamedArrays
from flower_ext.privacy.run_summary import MethodTraits, SumTerms
from flower_ext.training import Params


@dataclass(frozen=True, kw_only=True)
class Opening:
    """Everything that a sum needs to know of its round.

    Parameters
    ----------
    clients : Clients
    population : Population
        Counts in how many rounds each unit took part. If the silos put their users in a new secret
        order, the sum calls `Population.forget_order`.
    cohort : Cohort
        The clients that the server will ask to contribute.
    number : int
        Number of the training round, or of the answer to a query.
    server_round : int
        Round number that the messages carry.
    noise : NoiseSource
        Source of the server's noise.
    model : Mapping[str, ndarray]
        The shared model, from which `RoundMechanism.upload_like` makes a contribution's shapes.
    protection : Protection, optional
        The protection that the server asks clients for.
    check : Callable[[Update], None]
        The method's own check of a contribution that arrives in the clear; raises `RefusedReply`.
    """

    clients: Clients
    population: Population
    cohort: Cohort
    number: int
    server_round: int
    noise: NoiseSource
    model: Arrays
    protection: Protection | None = None
    check: Callable[[Update], None] = lambda update: None


class UploadCounts(NamedTuple):
    """Counts of uploads from which the noise in a sum is computed.

    ``needed`` is how many uploads together carry all the noise of the plan. ``honest`` is how many
    uploads in the sum come from honest clients; None as long as this is unknown.
    """

    needed: int
    honest: int | None


class OpenSum(ABC):
    """The sum of one round.

    Call `read` for each reply when it arrives, `add` for each contribution that `read` returned, in
    the order of partitions, and then `close`.

    Attributes
    ----------
    cohort : Cohort
        The clients of the `Opening` that have not dropped out.
    measures : Mapping[str, float]
        Numbers for the metrics of the round, such as the seconds that encryption took.
    """

    measures: Mapping[str, float] = {}

    def __init__(self, mechanism: RoundMechanism, opening: Opening) -> None:
        self._mechanism, self._opening = mechanism, opening
        self._like = mechanism.upload_like(opening.model)
        """Names, shapes and types of a contribution, and of the result."""
        self.cohort = opening.cohort

    def request(self, partition: int) -> Mapping[str, ArrayRecord]:
        """Return the records that this sum adds to the request to a client; empty by default."""
        return {}

    @abstractmethod
    def read(self, reply: Message) -> Update:
        """Return the contribution in a client's reply; raise an error to refuse it.

        A class whose sums do not depend on the order of additions may add the contribution here.
        Its `add` then does nothing.
        """

    def add(self, update: Update) -> None:  # noqa: B027 - most sums add in `read`
        """Add a contribution that `read` returned. Call it in the order of partitions."""

    @abstractmethod
    def close(self) -> Aggregate:
        """Return the released mean of the added contributions.

        Raises
        ------
        RoundDiscarded
            Nothing is released; the message gives the reason.
        """

    def upload_counts(self, answered: int | None = None) -> UploadCounts:
        """Return the counts of this sum; by default, the size of the cohort and ``answered``.

        ``answered`` is the number of contributions that arrived, or None before the server asks the
        clients.
        """
        return UploadCounts(needed=len(self.cohort.partitions), honest=answered)


class Summation(ABC):
    """The sums of a run.

    Parameters
    ----------
    mechanism : RoundMechanism
        Bounds each contribution, and releases each sum.
    """

    masks: bool = False
    """True if clients mask their contributions, as the plan's `SecureSum` says."""
    secure_sum: str | None = None
    """Assumption under which the server sees no single contribution. It is None if the server sees
    them all, or if the mechanism states the assumption, as for a `MaskedSum`."""
    hidden_draw: str | None = None
    """Assumption under which no party knows the drawn units; None if the server draws."""
    repeats: bool = True
    """False if a repeated round differs from the first attempt, whatever the seed."""
    brings_weights: bool = False
    """True if the sum itself weights the contributions, with weights unknown to the method."""
    disclosures: Sequence[str] = ()
    """Facts about clients' data that the sums reveal and no guarantee covers, one line each."""

    def __init__(self, mechanism: RoundMechanism) -> None:
        self.mechanism = mechanism

    def check(self, method: MethodTraits, *, diagnostics: bool) -> None:  # noqa: B027 - by default any
        """Refuse a method or an option that does not fit these sums.

        Raises
        ------
        ValueError
            The message gives the reason.
        """

    def describe(self) -> str:
        """Return a line for the log; empty by default."""
        return ""

    def connect(self, clients: Clients, model: Arrays) -> Mapping[str, float]:
        """Set up keys between the clients, once per process of the server.

        Return numbers for the record of the run, such as the seconds that the set-up took.
        """
        return {}

    def check_round(self, number: int) -> None:  # noqa: B027 - by default any
        """Refuse a training round beyond those that the sums permit; by default, permit all.

        Raises
        ------
        BudgetExhausted
            The message gives the reason.
        """

    @abstractmethod
    def open(self, opening: Opening) -> OpenSum:
        """Begin the sum of one round.

        Raises
        ------
        RoundDiscarded
            Too few clients are left, so nobody trains.
        """

    def assumptions(self, view: AdversaryView) -> Sequence[str]:
        """Return what the provable guarantee for an adversary's ``view`` assumes about the sums."""
        return ()

    @property
    def terms(self) -> SumTerms:
        """All that guarantees assume about this kind of sum."""
        return SumTerms(
            secure_sum=self.secure_sum,
            hidden_draw=self.hidden_draw,
            assumptions={view: self.assumptions(view) for view in AdversaryView},
        )

    def state(self) -> Mapping[str, Arrays]:
        """Return the state that a checkpoint keeps; nothing by default."""
        return {}

    def restore(self, state: Mapping[str, Arrays]) -> None:  # noqa: B027 - most have no state
        """Restore a checkpoint's `state`; call it after `connect` if the run continues."""


class SumMessage(NamedTuple):
    """The server's message to a client for a sum; empty for a sum that needs no message."""

    step: str = ""
    """Name of the protocol's step."""
    content: bytes = b""

    def of(self, *steps: str) -> tuple[str, bytes]:
        """Return the step and the content; refuse a step that is not in ``steps``."""
        if self.step not in steps:
            raise InvalidValue.tellable(
                f"the server's message for a sum has the step {self.step!r}: expected one of "
                f"{steps}"
            )
        return self


class UsersTotal(Protocol):
    """The total of a silo's users, to which the silo adds their updates while it trains."""

    @property
    def value(self) -> UnitSum:
        """The sum so far, for the ``update`` of a `LocalResult`."""

    def includes(self, user: int) -> bool:
        """Return False if the user's weight is zero, so that the user needs no training."""

    def add(self, users: Sequence[int], rows: Params) -> None:
        """Clip one row of ``rows`` for each of ``users``, and add the rows to the sum."""


class ClientSum:
    """A client's end of a sum, for one message of the server; by default, of a `PlainSum`.

    Parameters
    ----------
    message : SumMessage
        The server's message.
    context : Context
        The client's context, in which a sum keeps keys between messages.
    method : str
        Name of the client's method.
    """

    name: ClassVar[str] = ""
    """Name of the sum's record in the server's messages. It begins with `records.SUM`."""
    is_secure: ClassVar[bool] = False
    """True if a node with ``require-secure-sum`` takes part. The server must then see no single
    contribution, and the class must keep the other limits of the node's owner (`NodePolicy`)."""
    brings_weights: ClassVar[bool] = False
    """True if the sum weights the contributions of users (see `Summation`)."""

    def __init__(self, message: SumMessage, context: Context, method: str) -> None:
        self.message, self.context, self.method = message, context, method

    def check(self, protection: Protection) -> None:
        """Refuse a protection that does not fit this sum, before the client loads any data.

        Raises
        ------
        InvalidValue
            By default: the upload would have only a share of the noise, so it must not leave in the
            clear.
        """
        if protection.cell is not None:
            raise InvalidValue.tellable(
                "the server's message asks for a share of a sum's noise without a secure sum: "
                f"expected a record whose name begins with {records.SUM!r}, too"
            )

    def answer(self, data: Callable[[], ClientData], *, may_simulate: bool) -> bytes:
        """Answer a message for the sum that asks for no contribution, such as a step of a set-up.

        ``data`` loads the client's data. If ``may_simulate`` is True, this client accepts settings
        that protect nobody (see `NodePolicy`).
        """
        raise InvalidValue.tellable(
            f"{type(self).__name__} answers no questions: expected a request to contribute"
        )

    def hidden_sum(self, number: int, like: Params, users: int, bound: float) -> UsersTotal | None:
        """Begin a silo's sum over its users, if this sum weights them; by default, return None.

        ``number`` is the number of the training round. `HiddenSum` explains the other parameters.
        """
        return None

    def seal(self, update: NamedArrays, protection: Protection) -> Arrays:
        """Return a protected update as it leaves the client; by default, unchanged.

        Raises
        ------
        InvalidValue
            The protection does not fit this sum (`check`).
        """
        self.check(protection)
        return records.arrays_of(update)

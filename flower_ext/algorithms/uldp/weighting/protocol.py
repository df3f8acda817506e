"""Interface of private weighting: settings, the server's end of a run, and a silo's end.

`WeightedSum` and its silos' side use these classes only. A distribution adds a protocol by an
entry point of the group ``flower_ext.weighting``: its name is the protocol's, its object a subclass
of `WeightingProtocol`. Secret and encrypted numbers are sent as arrays of bytes.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from logging import getLogger
from typing import ClassVar, Protocol

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message
from numpy.typing import NDArray

from flower_ext.algorithms.uldp.weights import owned
from flower_ext.data import ClientData
from flower_ext.errors import FlowerExtError, InvalidValue
from flower_ext.federation import (
    Clients,
    ClientVault,
    FederationNotReady,
    Question,
    records,
)
from flower_ext.privacy import AdversaryView, PoissonSampling
from flower_ext.privacy.mechanisms.noised_sum import NoisedSum

log = getLogger("flwr")

PLUG_INS = "flower_ext.weighting"
"""Group of the entry points of further protocols."""
_PAILLIER = EntryPoint(
    name="paillier",
    value="flower_ext.algorithms.uldp.weighting.paillier_weighting:PrivateWeighting",
    group=PLUG_INS,
)
STEP, BEGIN = "step", "begin"
"""Key of a question's step, and name of every protocol's first step."""
PROTOCOL = "protocol"
"""Key of the protocol's name in its first question."""
SUM, LOST = "sum", "lost"
"""Array of a reply to a training message: a silo's masked sum, or a notice of lost keys."""
WEIGHTED = "weighted-sum"
"""Record of a round's encrypted weights in the server's message."""
NOISE_ROOM = 64.0
"""Range of the encoding in standard deviations of a silo's noise, which noise never reaches."""

SHOWN_PLACES = "which places of the silos' secret order of users were drawn: the server"
HIDDEN_BY_TRANSFER = (
    "who was drawn is hidden by oblivious transfer: no silo colludes with the server, all parties "
    "follow the protocol; the computational Diffie-Hellman problem is hard in the prime-order "
    "group of Ed25519, and BLAKE2b acts as a random oracle"
)
"""Assumption under which no party knows the drawn users."""
SHOWN_TIME = "how long a silo takes, which grows with the number of its users: whoever times it"

Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Silos:
    """The silos of a run, to which the server's end of a protocol sends questions."""

    clients: Clients

    def ask(
        self,
        step: str,
        name: str,
        length: int,
        *,
        values: Mapping[str, object] | None = None,
        silo_records: Mapping[int, Mapping[str, ArrayRecord]] | None = None,
        answering: Sequence[int] | None = None,
        recipients: Sequence[int] | None = None,
    ) -> dict[int, bytes]:
        """Ask for one step of the protocol, and return the bytes in each silo's answer.

        Parameters
        ----------
        step : str
            Name of the protocol's step.
        name, length : str, int
            Name and length of the array that an answer must hold.
        values : Mapping[str, object], optional
            Plain values besides the step.
        silo_records : Mapping[int, Mapping[str, ArrayRecord]], optional
            Records for single silos, besides the question.
        answering : Sequence[int], optional
            Silos whose answers hold bytes; the other answers are empty. By default all hold bytes.
        recipients : Sequence[int], optional
            Silos to ask; by default all.

        Raises
        ------
        FederationNotReady
            A silo does not answer, or its answer holds no such array.
        """
        nodes = self.clients.exchange.nodes
        speakers = {nodes[silo] for silo in answering or nodes}

        def read(reply: Message) -> bytes:
            arrays = records.read_answer(reply)
            if reply.metadata.src_node_id not in speakers:
                return b""
            return records.read_bytes(arrays, name, length)

        question = ConfigRecord({STEP: step, **(values or {})})  # type: ignore[dict-item]
        return self.clients.ask(question, read, silo_records, partitions=recipients)


class ServerEnd(ABC):
    """The server's end of one run. Call `set_up` once, then `open_round` and `close_round`."""

    @property
    @abstractmethod
    def sensitivity(self) -> float:
        """Most clipping norms by which one user moves a decoded sum; above 1 due to rounding."""

    @property
    def approximation_error(self) -> float:
        """Largest distance of a sum from the exact one in clipping norms, as in `NoisedSum`."""
        return 0.0

    @property
    @abstractmethod
    def sum_bytes(self) -> int:
        """Length of a silo's masked sum in bytes."""

    @abstractmethod
    def set_up(self, silos: Silos) -> None:
        """Exchange keys, and collect the silos' counts for all later rounds.

        Raises
        ------
        FederationNotReady
            A silo does not answer, or its answer breaks the protocol.
        """

    @abstractmethod
    def open_round(
        self, number: int, sampled: Sequence[int] | None, silos: Silos
    ) -> Mapping[str, bytes]:
        """Begin a round, and return the arrays that all silos get.

        Parameters
        ----------
        number : int
            Higher than the number of every earlier round.
        sampled : Sequence[int], optional
            Places, in the silos' secret order, of the users that take part. By default all users
            take part, or the protocol draws them.
        silos : Silos
            Silos to ask, if the protocol asks before a round.

        Raises
        ------
        FederationNotReady
            A silo did not answer, or its answer breaks the protocol; the round has not begun.
        """

    @abstractmethod
    def check_sum(self, silo: int, data: bytes) -> None:
        """Check one silo's sum as soon as it arrives, before the other silos have answered.

        Raises
        ------
        ProtocolError
            The sum belongs to another round.
        ValueError
            The sum is malformed.
        """

    @abstractmethod
    def close_round(self, sums: Mapping[int, bytes]) -> NDArray[np.float64]:
        """Return the weighted and noised sum over all silos, of shape (coordinates,).

        Parameters
        ----------
        sums : Mapping[int, bytes]
            Bytes of each silo's masked sum.

        Raises
        ------
        IncompleteRound
            A silo's sum is missing; nothing was decrypted.
        OverflowError
            The sum is out of bounds: some user has more records than the settings allow, or a silo
            sent what is no sum.
        """


@dataclass(frozen=True, kw_only=True)
class WeightingProtocol(ABC):
    """Public settings of one protocol. Subclasses are frozen dataclasses with defaults.

    Parameters
    ----------
    max_records_per_user : int
        The most records of one user; a protocol says where.
    silo_record_limits : tuple of int, optional
        The most records of one user in each silo.
    draw_choices : int, optional
        If given, users are drawn by 1-out-of-``draw_choices`` oblivious transfer. No party then
        learns which users take part, so the draw amplifies privacy against the server as well. The
        plan's ``sampling_rate`` must be a multiple of 1 / ``draw_choices``.
    """

    name: ClassVar[str]
    """Name of the protocol in messages, settings and silos' states."""
    silo_end: ClassVar[type[SiloEnd]]
    """Class of a silo's end."""

    max_records_per_user: int = 2000
    silo_record_limits: tuple[int, ...] | None = None
    draw_choices: int | None = None
    secure_sum: ClassVar[str]
    """Assumption under which the server sees no silo's upload."""

    @property
    def hidden_draw(self) -> str:
        """Assumption under which no party knows the drawn users; empty if the server draws."""
        return ""

    @property
    def shown(self) -> Sequence[str]:
        """Facts that a run reveals, and to whom, outside any guarantee."""
        return ()

    def assumptions(self, view: AdversaryView) -> Sequence[str]:
        """Return further assumptions of the provable guarantee against that adversary's view."""
        return ()

    @abstractmethod
    def describe(self) -> str:
        """Return one line for the log."""

    @abstractmethod
    def server(self, plan: NoisedSum, *, silos: int, coordinates: int) -> ServerEnd:
        """Return the server's end of a new run, with fresh keys.

        Raises
        ------
        ValueError
            The settings do not fit the plan; the message says what to change.
        """


class SiloSum(Protocol):
    """A silo's sum of one round, which takes updates while other users still train."""

    def add(self, updates: Mapping[int, NDArray[np.float64]]) -> None:
        """Add clipped updates (coordinates,) of users with records here, each once."""
        ...

    def finish(self, noise: NDArray[np.float64]) -> bytes:
        """Return the masked sum with this silo's share of the noise; the round is then used."""
        ...


class SiloEnd(ABC):
    """A silo's end of one run. Each message to it may reach a new process."""

    @classmethod
    @abstractmethod
    def begin(cls, question: Question) -> Arrays:
        """Begin a run's set-up, and answer the first question."""

    @classmethod
    @abstractmethod
    def resume(cls, vault: ClientVault) -> SiloEnd | None:
        """Return the silo as it was stored last; None if none was stored."""

    @property
    @abstractmethod
    def run(self) -> str:
        """Name of the run, different for every set-up."""

    @property
    @abstractmethod
    def users(self) -> int:
        """Number of users that the silos agreed on."""

    @property
    @abstractmethod
    def index(self) -> int:
        """Number of the silo, from zero."""

    @property
    @abstractmethod
    def counted(self) -> Collection[int]:
        """Users whose records this silo counted in the set-up; each sum takes an update of each."""

    @abstractmethod
    def answer(self, question: Question) -> Arrays:
        """Take one step of the protocol. A step that must not happen twice is stored first."""

    @abstractmethod
    def open_sum(self, number: int, sent: Mapping[str, bytes]) -> SiloSum:
        """Begin this silo's sum of round ``number``. The round does not count as used yet.

        Parameters
        ----------
        sent : Mapping[str, bytes]
            Arrays from `ServerEnd.open_round`.
        """


@cache
def protocols() -> Mapping[str, EntryPoint]:
    """Return the entry points of all installed protocols by name."""
    return {point.name: point for point in (*entry_points(group=PLUG_INS), _PAILLIER)}


def load_protocol(name: str) -> type[WeightingProtocol]:
    """Import the settings class of the protocol of that name.

    Raises
    ------
    ValueError
        No such protocol is installed; the message says what to install.
    """
    if name not in protocols():
        raise InvalidValue(
            f"protocol={name!r}: expected one of {', '.join(sorted(protocols()))}; another "
            f"protocol is a distribution of its own: pip install flower-ext-{name}"
        )
    protocol: type[WeightingProtocol] = protocols()[name].load()
    return protocol


@contextmanager
def checked_answers() -> Iterator[None]:
    """Treat a silo's answer that breaks the protocol like a missing one.

    Raises
    ------
    FederationNotReady
        The block raised an error.
    """
    try:
        yield
    except FederationNotReady:
        raise
    except Exception as error:  # bytes from outside may provoke any
        reason = str(error) if isinstance(error, FlowerExtError) else repr(error)
        raise FederationNotReady(f"a silo's answer breaks the protocol: {reason}") from error


def as_record(arrays: Mapping[str, bytes]) -> ArrayRecord:
    """Return named bytes as a record of a message."""
    return records.to_record({name: records.to_bytes_array(data) for name, data in arrays.items()})


def winning_choices(plan: NoisedSum, choices: int | None) -> int:
    """Return the number of a user's ``choices`` in an oblivious transfer that mean taking part.

    Parameters
    ----------
    choices : int, optional
        ``draw_choices`` of the protocol; None if the server names the drawn users.

    Raises
    ------
    ValueError
        ``plan`` draws no users, or at a rate that is not a multiple of 1 / ``choices``.
    """
    if choices is None:
        return 1
    rate = plan.sampling.rate if isinstance(plan.sampling, PoissonSampling) else 1.0
    drawn = round(rate * choices)
    if not (0 < drawn < choices and abs(rate - drawn / choices) < 1e-12):
        raise InvalidValue(
            f"draw_choices={choices}: users are drawn at a rate of {rate:g}, expected a multiple "
            f"of 1/{choices} below 1"
        )
    return drawn


def cores() -> int:
    """Return the number of threads that this process may keep busy."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def log_fingerprint(silo: int, fingerprint: str) -> None:
    """Show the fingerprint of all keys once, where no setting of the log hides it."""
    log.warning(
        "silo %d: the fingerprint of all silos' keys is %s; the silos' owners see another one if "
        "somebody swapped a key on the way",
        silo,
        fingerprint,
    )


def counts_of(data: ClientData, users: int, *, most: int) -> list[int]:
    """Return the number of records of each user in this silo, ``most`` for a user with more.

    Refusing such a user would tell everybody that this silo has one. The weights of a user still
    sum to one.

    Raises
    ------
    ValueError
        The data have no owners, or an owner is out of range.
    """
    owners = owned(data, users).owners.cpu().long()
    counts = torch.bincount(owners, minlength=users)
    if above := int((counts > most).sum()):
        log.warning(
            "%d users have more records in this silo than the %d that the settings allow, and "
            "weigh as if they had %d: agree with the other silos on larger limits",
            above,
            most,
            most,
        )
    return [int(count) for count in counts.clamp(max=most)]

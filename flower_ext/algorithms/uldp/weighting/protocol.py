"""Interface of private weighting: settings, the server's end of a run, and a silo's end.

`PrivateUldpAvg` and its silos' side speak to these classes alone, so that a protocol adds one
module for each end and changes neither. Numbers that anybody could read anything from travel as
arrays of bytes.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.serverapp import Grid
from numpy.typing import NDArray

from flower_ext.algorithms.uldp.weights import owned
from flower_ext.data import ClientData
from flower_ext.federation import ClientVault, FederatedStrategy, Question, records
from flower_ext.privacy import AdversaryView, ReleasePlan

STEP, BEGIN = "step", "begin"
"""Name of a question's step, and the first step of every protocol."""
PROTOCOL = "protocol"
"""Name of the protocol in the question that begins it; absent, as in version 0.1.0: Paillier."""
SUM, NUMBER, LOST = "sum", "round", "lost"
"""Arrays of an upload: a silo's masked sum and its round, or that the silo has lost its keys."""
NOISE_ROOM = 64.0
"""Standard deviations of a silo's noise that encoding has room for; noise never gets there."""

SHOWN_PLACES = "which places of the silos' secret order of users were drawn: the server"
SHOWN_TIME = "how long a silo takes, which grows with the number of its users: whoever times it"
_MARK = b"protocol "
"""Begins a stored state that names its protocol."""

Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Silos:
    """The silos of a run, as the server's end of a protocol asks them."""

    strategy: FederatedStrategy
    grid: Grid

    def ask(
        self,
        step: str,
        name: str,
        length: int,
        *,
        facts: Mapping[str, object] | None = None,
        own: Mapping[int, Mapping[str, ArrayRecord]] | None = None,
        only: Sequence[int] | None = None,
        asked: Sequence[int] | None = None,
    ) -> dict[int, bytes]:
        """Ask for one step of the protocol, and return the bytes that each silo answers.

        Parameters
        ----------
        step : str
            Of the protocol.
        name, length : str, int
            Of the array that an answer has to hold.
        facts : Mapping[str, object], optional
            Plain values next to the step.
        own : Mapping[int, Mapping[str, ArrayRecord]], optional
            Records for single silos, next to the question.
        only : Sequence[int], optional
            Silos whose answer holds bytes; the other answers are empty. By default all do.
        asked : Sequence[int], optional
            By default all silos.

        Raises
        ------
        FederationNotReady
            A silo does not answer, or not with such an array.
        """
        exchange = self.strategy.exchange
        speakers = {exchange.nodes[silo] for silo in only or exchange.nodes}

        def read(reply: Message) -> bytes:
            arrays = records.read_answer(reply)
            if reply.metadata.src_node_id not in speakers:
                return b""
            return records.read_bytes(arrays, name, length)

        question = ConfigRecord({STEP: step, **(facts or {})})  # type: ignore[dict-item]
        return exchange.ask_everyone(self.grid, question, read, own, partitions=asked)


@dataclass(frozen=True, kw_only=True)
class Upload:
    """One silo's masked sum of a round, as it arrived."""

    round_number: int
    data: bytes


class ServerEnd(ABC):
    """The server's end of one run. Call `set_up` once, then open and close every round."""

    @property
    @abstractmethod
    def sensitivity(self) -> float:
        """By how many clipping norms one user moves a decoded sum; above 1, as sums are rounded."""

    @property
    def residue(self) -> float:
        """By how many clipping norms a sum may be away from the exact one, as a plan has it."""
        return 0.0

    @property
    @abstractmethod
    def sum_bytes(self) -> int:
        """Length of a silo's masked sum."""

    @abstractmethod
    def set_up(self, silos: Silos) -> None:
        """Exchange keys, and learn what every later round needs.

        Raises
        ------
        FederationNotReady
            A silo does not answer, or not what the protocol says.
        """

    @abstractmethod
    def open_round(
        self, number: int, sampled: Sequence[int] | None, silos: Silos
    ) -> Mapping[str, bytes]:
        """Begin a round, and return the arrays that all silos get.

        Parameters
        ----------
        number : int
            Above that of every earlier round.
        sampled : Sequence[int], optional
            Places, in the silos' secret order, of the users who take part; by default all take
            part, or the protocol draws them.
        silos : Silos
            Whom to ask, where the protocol asks before a round.

        Raises
        ------
        FederationNotReady
            A silo did not answer; the round has not begun.
        """

    @abstractmethod
    def check_upload(self, silo: int, upload: Upload) -> None:
        """Refuse a silo's sum by itself, before the others are there.

        Raises
        ------
        ProtocolError
            Of another round.
        ValueError
            Malformed.
        """

    @abstractmethod
    def close_round(self, uploads: Mapping[int, Upload]) -> NDArray[np.float64]:
        """Return the weighted and noised sum over all silos, of shape (coordinates,).

        Raises
        ------
        IncompleteRound
            A silo's sum is missing; nothing was decrypted.
        OverflowError
            Some user has more records than the settings allow.
        """


class WeightingProtocol(ABC):
    """Public settings of one protocol. Subclasses are frozen dataclasses."""

    name: ClassVar[str]
    """Name of the protocol in messages, settings and silos' states."""
    secure_sum: ClassVar[str]
    """Assumption under which the server sees no silo's upload."""

    @property
    def hidden_draw(self) -> str:
        """Assumption under which nobody knows who was drawn; empty where the server draws."""
        return ""

    @property
    def shown(self) -> Sequence[str]:
        """What a run shows to whom, outside any guarantee."""
        return ()

    def assumptions(self, view: AdversaryView) -> Sequence[str]:
        """Return further assumptions of what is provable against an adversary with that view."""
        return ()

    @abstractmethod
    def describe(self) -> str:
        """Return one line for the log."""

    @abstractmethod
    def server(self, plan: ReleasePlan, *, silos: int, coordinates: int) -> ServerEnd:
        """Return the server's end of a new run, with fresh keys.

        Raises
        ------
        ValueError
            The settings do not fit the plan; says what to change.
        """


class OpenSum(Protocol):
    """A silo's sum of one round, to which updates are added while other users still train."""

    def add(self, updates: Mapping[int, NDArray[np.float64]]) -> None:
        """Add clipped updates (coordinates,) of users with records here, each once."""
        ...

    def finish(self, noise: NDArray[np.float64]) -> bytes:
        """Return the masked sum with this silo's share of the noise, having used the round up."""
        ...


class SiloEnd(Protocol):
    """A silo's end of one run, between two messages, each of which may reach a fresh process."""

    @property
    def run(self) -> str:
        """Name of the run, which no other set-up has."""
        ...

    @property
    def users(self) -> int:
        """The number of users that the silos agreed on."""
        ...

    @property
    def index(self) -> int:
        """The silo's place among the silos, from zero."""
        ...

    def answer(self, question: Question) -> Arrays:
        """Take one step of the protocol; what must not happen twice is stored before it returns."""
        ...

    def open_sum(self, number: int, sent: Mapping[str, bytes]) -> OpenSum:
        """Begin this silo's sum of round ``number``; the round is not used up yet.

        Parameters
        ----------
        sent : Mapping[str, bytes]
            What `ServerEnd.open_round` returned.
        """
        ...


class SiloProtocol(Protocol):
    """A silo's end of one protocol: the module that begins it and takes it up again."""

    def begin(self, question: Question) -> Arrays:
        """Begin a run's set-up, and answer the first question."""
        ...

    def resume(self, vault: ClientVault) -> SiloEnd | None:
        """Return the silo as it was stored last; None if there is none."""
        ...


def as_record(arrays: Mapping[str, bytes]) -> ArrayRecord:
    """Return named bytes as a record of a message."""
    return records.to_record({name: records.to_bytes_array(data) for name, data in arrays.items()})


def cores() -> int:
    """Return how many threads this process may keep busy."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def counts_of(data: ClientData, users: int) -> list[int]:
    """Return how many records each user has in this silo.

    Raises
    ------
    ValueError
        The data have no owners, or one is out of range.
    """
    owners = owned(data, users).owners.cpu().long()
    return [int(count) for count in torch.bincount(owners, minlength=users)]


def keeps(name: str, state: bytes) -> bytes:
    """Return a silo's state under the name of its protocol, for its vault."""
    return _MARK + name.encode() + b"\n" + state


def name_of(kept: bytes) -> str:
    """Return the protocol of a stored state; one that names none is Paillier's."""
    if not kept.startswith(_MARK):
        return "paillier"
    return kept[len(_MARK) : kept.index(b"\n")].decode()


def kept_state(kept: bytes) -> bytes:
    """Undo `keeps`."""
    return kept[kept.index(b"\n") + 1 :]

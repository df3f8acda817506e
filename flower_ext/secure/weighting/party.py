"""A party of private weighting, and the steps of its dialogue with the other parties."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Generator, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Generic, TypeAlias, TypeVar

from flower_ext.errors import ProtocolError
from flower_ext.secure.threads import Progress
from flower_ext.secure.weighting.party_settings import PartySettings

SettingsT = TypeVar("SettingsT", bound=PartySettings)
T = TypeVar("T")

BEGIN, KEYS, COUNT, DRAW = "begin", "keys", "count", "draw"
"""Names of the steps; `server_party` has a table of their messages."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """A step of the protocol: what the server sends to silos, and what they answer.

    Parameters
    ----------
    name : str
    questions : Mapping[int, bytes]
        The message to each silo that takes the step.
    length : int
        Length of an answer in bytes.
    answering : Collection[int], optional
        Silos whose answers hold bytes; the others only confirm. By default all.
    """

    name: str
    questions: Mapping[int, bytes]
    length: int
    answering: Collection[int] | None = None


Dialogue: TypeAlias = Generator[Step, Mapping[int, bytes], T]
"""Steps that the server takes one by one: it yields each, and receives the silos' answers."""


class Stage(Enum):
    """Progress of a party's set-up."""

    NEW = auto()
    KEYED = auto()
    SEEDED = auto()
    COUNTED = auto()


class Party(ABC, Generic[SettingsT]):
    """A party of one run.

    Parameters
    ----------
    settings : PartySettings
    workers : int
        Number of threads.
    watch : Callable[[str], Progress], optional
        Returns, for the name of a long piece of work, a function to report its progress to.
    """

    def __init__(
        self,
        settings: SettingsT,
        *,
        workers: int = 1,
        watch: Callable[[str], Progress | None] = lambda work: None,
    ) -> None:
        self.settings = settings
        self._workers, self._watch = workers, watch
        self._stage = Stage.NEW
        self._last_round = 0

    @property
    @abstractmethod
    def _name(self) -> str:
        """Name of the party in errors."""

    def _expect(self, stage: Stage) -> None:
        if self._stage is not stage:
            raise ProtocolError(
                f"{self._name} is {self._stage.name.lower()}: expected it to be "
                f"{stage.name.lower()}"
            )

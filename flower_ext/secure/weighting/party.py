"""A party of private weighting: a stage, and a state that is stored whenever it changes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Generic, TypeVar

from flower_ext.errors import ProtocolError
from flower_ext.secure.weighting.party_settings import PartySettings
from flower_ext.secure.weighting.party_state import Stage

SettingsT = TypeVar("SettingsT", bound=PartySettings)


class Party(ABC, Generic[SettingsT]):
    """A party whose state outlives its process.

    Parameters
    ----------
    settings : PartySettings
    save : callable, optional
        Stores `export_state` durably. The party calls it before it returns a message that must not
        be made twice, so that a party restored from the stored state reuses nothing.
    workers : int
        Number of threads.
    """

    def __init__(
        self,
        settings: SettingsT,
        *,
        save: Callable[[bytes], None] | None = None,
        workers: int = 1,
    ) -> None:
        self.settings = settings
        self._save = save
        self._workers = workers
        self._stage = Stage.NEW
        self._last_round = 0

    @property
    @abstractmethod
    def _name(self) -> str:
        """Name of the party in errors."""

    @abstractmethod
    def export_state(self) -> bytes:
        """Return the state that a restart needs, at any stage.

        It holds secrets in the clear. Store it where nobody else can read it, and never send it.
        """

    def _expect(self, stage: Stage) -> None:
        if self._stage is not stage:
            raise ProtocolError(
                f"{self._name} is {self._stage.name.lower()}: expected it to be "
                f"{stage.name.lower()}"
            )

    def _advance(self, stage: Stage) -> None:
        self._stage = stage
        self._store()

    def _store(self) -> None:
        if self._save is not None:
            self._save(self.export_state())

"""Behaviour that the server and the silos share: a stage, which is stored whenever it changes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Generic, TypeVar

from flower_ext.errors import ProtocolError
from flower_ext.secure.weighting.lattice.settings import LatticeSettings
from flower_ext.secure.weighting.lattice.state import ServerStage, SiloStage

Stage = TypeVar("Stage", SiloStage, ServerStage)


class Party(ABC, Generic[Stage]):
    """A party whose state outlives its process.

    Parameters
    ----------
    stage
        The stage it begins at.
    save : callable, optional
        Stores `export_state` durably.
    workers : int
        Number of threads.
    """

    def __init__(
        self,
        settings: LatticeSettings,
        stage: Stage,
        *,
        save: Callable[[bytes], None] | None,
        workers: int,
    ) -> None:
        self.settings = settings
        self._stage: Stage = stage
        self._save = save
        self._workers = workers

    @property
    @abstractmethod
    def _name(self) -> str:
        """Name of the party in errors."""

    @abstractmethod
    def export_state(self) -> bytes:
        """Return the state that a restart needs, at any stage. It holds secrets in the clear."""

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

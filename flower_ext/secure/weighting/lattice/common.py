"""Secrets that all silos derive from their common seed, so that they act as one receiver."""

from __future__ import annotations

from functools import cached_property

from flower_ext.secure.labels import derive
from flower_ext.secure.weighting.blinds import user_order
from flower_ext.secure.weighting.draw import chooser
from flower_ext.secure.weighting.lattice import draw
from flower_ext.secure.weighting.lattice.messages import LatticeWeights
from flower_ext.secure.weighting.lattice.settings import LatticeSettings
from flower_ext.secure.weighting.lattice.weights import OpenedWeights
from flower_ext.secure.weighting.oblivious import Receiver


class CommonSecrets:
    """Order of users, shifts and draws, by a seed that the server does not know.

    Parameters
    ----------
    seed : bytes
        The silos' common seed.
    transfer : bytes
        The server's element of the oblivious transfer of entry keys.
    public_seed : bytes
        The server's seed of all a_u.

    Raises
    ------
    ValueError
        ``transfer`` is not a group element.
    """

    def __init__(
        self,
        settings: LatticeSettings,
        seed: bytes,
        *,
        transfer: bytes,
        public_seed: bytes,
        workers: int,
    ) -> None:
        self.seed = seed
        self.order = user_order(seed, settings.users)
        self._settings = settings
        self._public_seed = public_seed
        self._workers = workers
        self._receiver = Receiver(
            transfer,
            derive(seed, "transfer"),
            run=settings.context,
            transfers=settings.users,
            choices=settings.choices,
            workers=workers,
        )

    @property
    def shifts(self) -> list[int]:
        """ρ_u of every place."""
        return self._receiver.choices

    @property
    def answer(self) -> bytes:
        """The silos' answer to the oblivious transfer of entry keys."""
        return self._receiver.answer

    @cached_property
    def entry_keys(self) -> list[bytes]:
        """The key K_{u,ρ_u} of every place."""
        return self._receiver.keys()

    def draw_answer(self, epoch: int, offer: bytes) -> bytes:
        """Return the silos' choices of a secret draw, for the server.

        Raises
        ------
        ProtocolError
            The settings have no ``draw_choices``.
        ValueError
            ``offer`` is not a group element.
        """
        return self._chooser(epoch, offer).answer

    def opened(self, message: LatticeWeights) -> OpenedWeights:
        """Return the weights of an epoch as silos use them.

        Raises
        ------
        ValueError
            The message is malformed, or was sealed for other silos or another draw.
        """
        columns = []
        if self._settings.draw_choices is not None:
            chosen = self._chooser(message.epoch, message.offer)
            columns = draw.opened(self._settings, chosen, message.columns)
        return OpenedWeights(
            self._settings,
            self._public_seed,
            message,
            keys=self.entry_keys,
            choices=self.shifts,
            columns=columns,
        )

    def _chooser(self, epoch: int, offer: bytes) -> Receiver:
        return chooser(self._settings, self.seed, epoch, offer, workers=self._workers)

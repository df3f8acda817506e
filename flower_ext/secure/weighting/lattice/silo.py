"""A silo's epochs and rounds of private weighting over ring-LWE; the package has the protocol."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from functools import cached_property

from numpy.typing import ArrayLike

from flower_ext.errors import ProtocolError
from flower_ext.secure.masks import PairKeys
from flower_ext.secure.threads import Progress
from flower_ext.secure.weighting.lattice.keys import public_key
from flower_ext.secure.weighting.lattice.messages import (
    DrawAnswer,
    DrawOffer,
    LatticeSum,
    LatticeWeights,
    RoundOpening,
    ServerKey,
    check_round_number,
)
from flower_ext.secure.weighting.lattice.ring import Reals
from flower_ext.secure.weighting.lattice.settings import LatticeSettings
from flower_ext.secure.weighting.lattice.silo_setup import SiloSetUp
from flower_ext.secure.weighting.lattice.state import SiloStage, SiloState
from flower_ext.secure.weighting.lattice.sums import EncryptedSum
from flower_ext.secure.weighting.lattice.weighing import Weighing
from flower_ext.secure.weighting.lattice.weights import OpenedWeights

_SUM = "sum"


class LatticeSilo(SiloSetUp):
    """One silo. Everything it holds is secret, except the messages that its methods return.

    Call `key`, `receive_keys`, then `seal_seed` and `answer_transfer` (silo 0) or `open_seed` (the
    others), then `mask_counts`, `receive_weights` in every epoch, and `weigh` in every round. If
    the settings have ``draw_choices``, one silo calls `answer_draw` before each epoch.

    Parameters
    ----------
    settings : LatticeSettings
    index : int
        Number of this silo, from zero.
    save : callable, optional
        Stores `export_state` durably. The silo calls it before it uses an epoch or a round, so that
        a silo restored from the stored state reuses none.
    workers : int
        Number of threads.
    """

    def __init__(
        self,
        settings: LatticeSettings,
        index: int,
        *,
        save: Callable[[bytes], None] | None = None,
        workers: int = 1,
    ) -> None:
        super().__init__(settings, index, save=save, workers=workers)
        self._last_epoch = self._last_round = 0
        self._digest = b""
        self._weights: OpenedWeights | None = None

    def __repr__(self) -> str:
        return f"LatticeSilo(index={self.index}, stage={self._stage.name.lower()})"

    @property
    def epoch(self) -> int | None:
        """The epoch whose weights this silo holds in memory."""
        return None if self._weights is None else self._weights.epoch

    @property
    def counted(self) -> tuple[int, ...]:
        """Users with records in this silo, each of whom has an update in every sum."""
        return tuple(user for user, count in enumerate(self._counts) if count)

    def answer_draw(self, message: DrawOffer) -> DrawAnswer:
        """Return the choices that all silos derive from their seed; the server cannot read them.

        Raises
        ------
        ProtocolError
            The counts were not masked yet, the settings have no ``draw_choices``, or the epoch is
            not above the last one.
        ValueError
            The offer is malformed.
        """
        self._expect(SiloStage.COUNTED)
        message.check(self.settings)
        self._check_epoch(message.epoch)
        answer = self._shared.draw_answer(message.epoch, message.public)
        return DrawAnswer(epoch=message.epoch, answer=answer)

    def receive_weights(self, message: LatticeWeights) -> None:
        """Take an epoch's weights. The silo stores that the epoch is used before it opens anything.

        The silo accepts the weights of its last epoch again, for example after a restart, if they
        are the same to the last bit.

        Raises
        ------
        ProtocolError
            The counts were not masked yet, the epoch is below the last one, or it is the last one
            with other weights. Other weights would reveal N_u.
        ValueError
            The message is malformed.
        """
        self._expect(SiloStage.COUNTED)
        message.check(self.settings)
        digest = hashlib.sha256(message.to_bytes()).digest()
        if message.epoch != self._last_epoch or digest != self._digest:
            self._check_epoch(message.epoch)
            self._last_epoch, self._digest, self._weights = message.epoch, digest, None
            self._store()
        if self._weights is None:
            self._weights = self._shared.opened(message)

    def begin(self, opening: RoundOpening) -> Weighing:
        """Begin a round. Add users' updates to the result, a few at a time.

        Raises
        ------
        ProtocolError
            The counts were not masked yet, the round number is not above the last one, or the silo
            does not hold the weights of the round's epoch.
        """
        self._check_round(opening)
        counts = {user: count for user, count in enumerate(self._counts) if count}
        assert self._weights is not None  # the round belongs to its epoch
        return Weighing(
            self.settings,
            opening,
            silo=self.index,
            counts=counts,
            places={user: place for place, user in enumerate(self._shared.order)},
            weights=self._weights,
            total=EncryptedSum(self.settings, self._public, workers=self._workers),
            masks=self._use_round,
        )

    def weigh(
        self,
        opening: RoundOpening,
        updates: Mapping[int, ArrayLike],
        noise: ArrayLike,
        *,
        progress: Progress | None = None,
    ) -> LatticeSum:
        """Return Σ_u (n_su / N_u) Δ_su + z_s under encryption, masked and re-randomised.

        Parameters
        ----------
        updates : Mapping[int, ArrayLike]
            Clipped update of every user with records in this silo, by user. Each has shape
            (coordinates,) and an L2 norm of at most C. Arrays may be memory-mapped.
        noise : ArrayLike
            This silo's share of the noise, of shape (coordinates,).
        progress : callable, optional
            Called with the number of finished parts of the work, and of all parts.

        Raises
        ------
        ProtocolError
            As `begin`.
        ValueError
            Updates belong to other users than those with records here; shapes are wrong; values are
            not finite or out of bounds; or the noise is too small. Nothing has left the silo then,
            so call `weigh` again for the same round.
        """
        weighing = self.begin(opening)
        weighing.check_noise(noise)
        weighing.add(updates, progress=progress)
        return weighing.finish(noise)

    def export_state(self) -> bytes:
        """Return the state that a restart needs, at any stage.

        It holds secrets in the clear. Store it where nobody else can read it, and never send it.
        """
        state = SiloState(
            index=self.index,
            stage=self._stage,
            private=self._pairs.private,
            silo_keys=[key for _, key in sorted(self._silo_keys.items())],
            server_key=b"" if self._server_key is None else self._server_key.to_bytes(),
            seed=b"" if self._common is None else self._common.seed,
            counts=self._counts,
            last_epoch=self._last_epoch,
            weights_digest=self._digest,
            last_round=self._last_round,
        )
        return state.encode(self.settings)

    @classmethod
    def from_state(
        cls,
        settings: LatticeSettings,
        state: bytes,
        *,
        save: Callable[[bytes], None] | None = None,
        workers: int = 1,
    ) -> LatticeSilo:
        """Return a silo at the stage of the exported one.

        Its epochs and rounds stay used. It needs the weights of its epoch again.

        Raises
        ------
        ValueError
            ``state`` is malformed or was exported under other settings.
        """
        kept = SiloState.decode(state, settings)
        silo = cls(settings, kept.index, workers=workers)
        silo._pairs = PairKeys(context=settings.context, index=kept.index, private=kept.private)
        if kept.stage is not SiloStage.NEW:
            silo._silo_keys = dict(enumerate(kept.silo_keys))
            silo._server_key = ServerKey.from_bytes(kept.server_key, settings)
            silo._pairs.agree(silo._silo_keys, server_key=kept.server_key)
        if kept.stage in (SiloStage.SEEDED, SiloStage.COUNTED):
            silo._common = silo._derived(kept.seed)
        silo._counts = kept.counts
        silo._last_epoch, silo._digest = kept.last_epoch, kept.weights_digest
        silo._last_round = kept.last_round
        silo._stage = kept.stage
        silo._save = save
        return silo

    @cached_property
    def _public(self) -> Reals:
        return public_key(self._told.public_seed, self._told.words)

    def _check_epoch(self, epoch: int) -> None:
        if epoch <= self._last_epoch:
            raise ProtocolError(
                f"epoch {epoch}: expected an epoch above the last one, {self._last_epoch}"
            )

    def _check_round(self, opening: RoundOpening) -> None:
        self._expect(SiloStage.COUNTED)
        check_round_number(opening.round_number, self._last_round, self.settings)
        if self.epoch != opening.epoch:
            raise ProtocolError(
                f"round of epoch {opening.epoch}: expected weights of epoch {self.epoch}"
            )

    def _use_round(self, opening: RoundOpening) -> list[tuple[bytes, bool]]:
        """Store that the round is used, and return the keys of its masks."""
        self._check_round(opening)
        self._last_round = opening.round_number
        self._store()
        return self._pairs.mask_keys(_SUM, opening.round_number)

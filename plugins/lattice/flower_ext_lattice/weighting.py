"""Private weighting over ring-LWE: its settings, and the server's end of a run.

Experimental: no outsider has reviewed it. The package has the protocol.

====================  =====================================================
protocol              here
====================  =====================================================
steps 1 to 5          `PartyServerEnd.set_up`; silo 0 adds its choices of the transfer
epoch, round          `LatticeServerEnd.open_round`, with every training message
secret draw           ``draw`` (to silo 0), before the epoch of a round
====================  =====================================================
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from logging import getLogger
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from flower_ext.algorithms.uldp.weighting.party_ends import WEIGHTS, PartyServerEnd
from flower_ext.algorithms.uldp.weighting.protocol import (
    HIDDEN_BY_TRANSFER,
    SHOWN_PLACES,
    SHOWN_TIME,
    Silos,
    WeightingProtocol,
    checked_answers,
    cores,
    winning_choices,
)
from flower_ext.checks import require_at_least_one
from flower_ext.errors import InvalidValue
from flower_ext.federation import Remaining
from flower_ext.privacy import AdversaryView
from flower_ext.privacy.mechanisms.noised_sum import NoisedSum
from flower_ext.privacy.theorems.assumptions import HONEST_COUNTS
from flower_ext_lattice.messages import LatticeKey, LatticeSum, LatticeWeights, TransferAnswer
from flower_ext_lattice.server import LatticeServer
from flower_ext_lattice.settings import LatticeSettings
from flower_ext_lattice.silo_end import OPENING, LatticeSiloEnd

log = getLogger("flwr")

_EXPERIMENTAL = (
    "private weighting over ring-LWE is experimental and not externally reviewed: its proof is in "
    "docs/lattice-weighting.md, and nobody outside this project has checked it"
)
_RING = (
    "ring-LWE is hard in Z_q[X]/(X^4096 + 1) for q of 96 bits, ternary secrets and errors of "
    "variance 10.5"
)
_TRANSFER = (
    "oblivious transfer: the computational Diffie-Hellman problem is hard in the prime-order group "
    "of Ed25519, and BLAKE2b acts as a random oracle and, keyed, as a pseudorandom function"
)
_CHANNELS = (
    "channels between silos and server are confidential and authenticated: who reads what one silo "
    "receives, and colludes with the other silos, learns its numbers of records"
)
_ROUNDED = 2.0**-7
"""Most steps by which one silo's rounding moves a coordinate. A step is 2²⁴ words. The silo drops
two bytes of a word (2⁻⁸), and rounds words of c1 (2048 · 2⁻²⁴); r · e + e2 · s is below 2⁻³⁷."""
_LARGEST_APPROXIMATION_ERROR = 1e-3
"""Largest distance of all sums of a run from exact ones, in standard deviations of their noise."""


@dataclass(frozen=True, kw_only=True)
class LatticeWeighting(WeightingProtocol):
    """Settings of private weighting over ring-LWE. Experimental: no outsider has reviewed it.

    Parameters
    ----------
    max_records_per_user : int
        The most records of one user in any one silo, if ``silo_record_limits`` is not given.
    silo_record_limits : tuple of int, optional
        The most records of one user in each silo. Every silo checks its own records, so that no
        user can exceed the sum of the limits. The set-up and every draw of users take time in
        proportion to this sum, so give limits close to the data.
    draw_choices : int, optional
        As for `WeightingProtocol`.

    Raises
    ------
    ValueError
        A field is out of range.
    """

    name: ClassVar[str] = LatticeSiloEnd.protocol
    silo_end = LatticeSiloEnd
    secure_sum: ClassVar[str] = (
        f"{_EXPERIMENTAL}; no silo colludes with the server, which relays keys unchanged; in every "
        f"word of a sum one silo's noise and dither are as the protocol says; {_RING}; "
        f"{_TRANSFER}; X25519 and ChaCha20 are not broken"
    )

    def __post_init__(self) -> None:
        require_at_least_one("max_records_per_user", self.max_records_per_user)
        if self.draw_choices is not None and self.draw_choices < 2:
            raise InvalidValue(f"draw_choices={self.draw_choices!r}: expected an integer >= 2")
        limits = self.silo_record_limits
        if limits is not None:
            object.__setattr__(self, "silo_record_limits", tuple(limits))

    @property
    def hidden_draw(self) -> str:
        """Assumption that hides the drawn users from the server; empty without ``draw_choices``."""
        return "" if self.draw_choices is None else f"{HIDDEN_BY_TRANSFER}; {_RING}"

    @property
    def shown(self) -> Sequence[str]:
        """Facts that no guarantee covers: a silo's running time, and the places of drawn users.

        A secret draw hides the places.
        """
        return (SHOWN_TIME,) if self.hidden_draw else (SHOWN_PLACES, SHOWN_TIME)

    def assumptions(self, view: AdversaryView) -> Sequence[str]:
        """Return the assumptions of a provable guarantee besides ``secure_sum``."""
        common = (HONEST_COUNTS, _CHANNELS)
        if view is AdversaryView.SUM_ONLY:
            return common
        if view is AdversaryView.RELEASED_MODELS:
            hints = f"{_RING}, also for who sees the released models (hint-RLWE)"
            return _EXPERIMENTAL, hints, _TRANSFER, "ChaCha20 is not broken", *common
        return _EXPERIMENTAL, *common

    def describe(self) -> str:
        """Return a line for the log: the protocol, its warning and its record limits."""
        limits = self.silo_record_limits
        most = (
            f"at most {self.max_records_per_user} records of a user in a silo"
            if limits is None
            else f"at most {', '.join(map(str, limits))} records of a user in the silos"
        )
        drawn = "" if self.draw_choices is None else f", users drawn 1-out-of-{self.draw_choices}"
        name = "private weighting over ring-LWE (EXPERIMENTAL, not externally reviewed)"
        return f"{name}: {most}{drawn}"

    def server(self, plan: NoisedSum, *, silos: int, coordinates: int) -> LatticeServerEnd:
        """Return the server's end of a new run.

        Raises
        ------
        ValueError
            As `LatticeSettings`; or the plan's noise is too small to hide the protocol's errors.
        """
        limits = self.silo_record_limits
        stddev = plan.client_noise_stddev(silos)
        try:
            settings = LatticeSettings(
                run=secrets.token_hex(16),
                users=plan.sampling.population,
                silos=silos,
                coordinates=coordinates,
                silo_record_limits=(self.max_records_per_user,) * silos
                if limits is None
                else limits,
                clipping_norm=plan.clipping_norm,
                noise_stddev=stddev,
                rounds=plan.rounds,
                draw_choices=self.draw_choices,
                winning_choices=winning_choices(plan, self.draw_choices),
            )
        except InvalidValue as error:
            if not str(error).startswith("noise_stddev"):
                raise
            raise InvalidValue(
                f"noise_multiplier={plan.noise_multiplier:g} of the plan, shared by {silos} "
                f"silos: {error}"
            ) from error
        server = LatticeServerEnd(settings)
        least = math.sqrt(plan.rounds) * server.approximation_error / _LARGEST_APPROXIMATION_ERROR
        if plan.noise_multiplier < least:
            raise InvalidValue(
                f"noise_multiplier={plan.noise_multiplier:g} of the plan: protocol='lattice' needs "
                f"{least:.2g} at least to hide its errors in {plan.rounds} sums; expected more "
                "noise, fewer rounds, smaller silo_record_limits, or protocol='paillier'"
            )
        return server


class LatticeServerEnd(PartyServerEnd[LatticeServer]):
    """The server's end of one run; keys and the public seed are fresh.

    Parameters
    ----------
    settings : LatticeSettings
    """

    protocol = LatticeSiloEnd.protocol
    sum_type = LatticeSum
    settings: LatticeSettings

    def __init__(self, settings: LatticeSettings) -> None:
        super().__init__(settings)
        self._weights: bytes | None = None

    @property
    def sensitivity(self) -> float:
        """Most clipping norms by which one user moves a decoded sum."""
        norm = self.settings.clipping_norm
        return self.settings.contribution_bound(norm) / norm

    @property
    def approximation_error(self) -> float:
        """Most clipping norms between a sum and one that reveals no secret.

        Given the dithers, an error of t steps in a coordinate moves its rounded sum by at most
        t + 1 steps. The errors e_u add at most `error_bound` for every user, drawn or not. Rounding
        and re-randomising add less than 2⁻⁷ steps per silo. One silo's share of the noise must hide
        all of this, so the sum of these errors counts √|S| times.
        """
        settings, silos = self.settings, self.settings.silos
        carries = (1 + silos * _ROUNDED) * math.sqrt(settings.coordinates) * settings.step
        errors = settings.users * settings.error_bound
        return math.sqrt(silos) * (carries + errors) / settings.clipping_norm

    def open_round(
        self, number: int, sampled: Sequence[int] | None, silos: Silos
    ) -> Mapping[str, bytes]:
        """Encrypt the weights of the round's users, in a new epoch if users are drawn."""
        if self.settings.draw_choices is not None:
            self._weights = self._draw_epoch(silos).to_bytes()
        elif self._weights is None or sampled is not None:
            self._weights = self.party.open_epoch(sampled=sampled).to_bytes()
        opening = self.party.open_round(number)
        return {WEIGHTS: self._weights, OPENING: opening.to_bytes()}

    def _draw_epoch(self, silos: Silos) -> LatticeWeights:
        """Return the weights of an epoch of which no party knows who was drawn."""
        answer = self._draw(self.party.offer_draw(), silos)
        with checked_answers():
            return self.party.open_drawn_epoch(answer)

    def _new_party(self) -> LatticeServer:
        return LatticeServer(self.settings, workers=cores())

    def _server_key(self) -> LatticeKey:
        return self.party.public_key

    def _decrypt(self, messages: list[LatticeSum], progress: Remaining) -> NDArray[np.float64]:
        return self.party.close_round(messages, progress=progress)

    def _log_costs(self) -> None:
        log.info(
            "private weighting: a silo sends %.1f MB per round and receives weights of %.1f MB",
            LatticeSum.size(self.settings) / 1e6,
            LatticeWeights.size(self.settings) / 1e6,
        )

    def _added_bytes(self) -> int:
        return TransferAnswer.size(self.settings)

    def _take_added(self, data: bytes) -> None:
        self.party.receive_answer(TransferAnswer.from_bytes(data, self.settings))

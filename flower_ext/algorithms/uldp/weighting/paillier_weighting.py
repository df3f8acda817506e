"""Protocol 1 over Paillier: its settings, and the server's end of a run.

====================  =====================================================
paper                 here
====================  =====================================================
setup (a)–(f)         `PartyServerEnd.set_up`: keys, the seed R, masked counts
weighting (a)         `PaillierServerEnd.open_round`: Enc(B_inv(N_u)) of every user
weighting (b), (c)    `PaillierSiloEnd.open_sum`; `PartyServerEnd.close_round`
oblivious transfer    step ``draw`` (to silo 0) before weighting (a); ``draw_choices``: P
N_max, P              ``max_records_per_user``, ``precision``
====================  =====================================================
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from logging import getLogger
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from flower_ext.algorithms.uldp.weighting.paillier_end import PaillierSiloEnd, pool_pays
from flower_ext.algorithms.uldp.weighting.party_ends import WEIGHTS, PartyServerEnd
from flower_ext.algorithms.uldp.weighting.protocol import (
    HIDDEN_BY_TRANSFER,
    NOISE_ROOM,
    SHOWN_PLACES,
    SHOWN_TIME,
    Silos,
    WeightingProtocol,
    checked_answers,
    cores,
    winning_choices,
)
from flower_ext.errors import InvalidValue
from flower_ext.federation import Remaining
from flower_ext.privacy import AdversaryView
from flower_ext.privacy.mechanisms.noised_sum import NoisedSum
from flower_ext.privacy.theorems.assumptions import HONEST_COUNTS
from flower_ext.secure import WeightingServer, WeightingSettings, estimate_round
from flower_ext.secure.weighting.paillier_messages import MaskedSum, PaillierKey

log = getLogger("flwr")

_LARGEST_STEP = 0.25
"""Largest step of the encoding in standard deviations of a silo's noise; larger ones lose noise."""


@dataclass(frozen=True, kw_only=True)
class PrivateWeighting(WeightingProtocol):
    """Settings of Protocol 1 over Paillier. Sums that could overflow are refused before any run.

    Parameters
    ----------
    max_records_per_user : int
        N_max: the most records that one user may have over all silos.
    allowed_totals : tuple of int, optional
        Numbers of records that a user may have over all silos, besides zero. A short list saves
        work.
    silo_record_limits : tuple of int, optional
        The most records of one user in each silo, with a sum of at most N_max, so that no user can
        exceed N_max. Without them, an excess spoils every sum, and the run ends after three.
    precision : float
        P: largest rounding error of a coordinate of the sum over silos. It must be fine against the
        silos' noise.
    draw_choices : int, optional
        As for `WeightingProtocol`.
    key_bits : int
        Length of the Paillier modulus.
    allow_insecure_key_size : bool
        Accept short keys in tests and simulations. Silos that refuse seeded noise refuse them.

    Raises
    ------
    ValueError
        A field is out of range.
    """

    name: ClassVar[str] = PaillierSiloEnd.protocol
    silo_end = PaillierSiloEnd
    secure_sum: ClassVar[str] = (
        "private weighting: no silo colludes with the server, which relays keys unchanged; "
        "Paillier encryption, X25519 and ChaCha20 are not broken"
    )

    allowed_totals: tuple[int, ...] | None = None
    precision: float = 1e-10
    key_bits: int = 3072
    allow_insecure_key_size: bool = False

    def __post_init__(self) -> None:
        silos = 2 if self.silo_record_limits is None else len(self.silo_record_limits)
        sizes = {"users": 1, "silos": silos, "coordinates": 1}
        bounds = {"update_bound": self.precision, "noise_bound": self.precision}
        self.settings(run="check", **sizes, **bounds)

    @property
    def assumed_totals(self) -> str:
        """Assumption on users' totals that no silo can check by itself; empty if there is none.

        A total that breaks it makes a sum out of bounds, and a server may then try totals on it.
        """
        if self.allowed_totals is not None:
            totals = " or ".join(str(total) for total in self.allowed_totals)
            foreseen = f"{totals} records over all silos, or none"
        elif self.silo_record_limits is None:
            foreseen = f"at most {self.max_records_per_user} records over all silos"
        else:
            return ""
        return (
            f"every user has {foreseen}: otherwise the run ends, and the server may find that "
            "user's number of records"
        )

    def settings(self, **of_run: Any) -> WeightingSettings:
        """Return the protocol's settings for one run.

        Raises
        ------
        ValueError
            As `WeightingSettings`.
        """
        return WeightingSettings(**asdict(self), **of_run)

    @property
    def hidden_draw(self) -> str:
        """Assumption under which even the server does not learn the draw, with ``draw_choices``."""
        return "" if self.draw_choices is None else HIDDEN_BY_TRANSFER

    @property
    def shown(self) -> Sequence[str]:
        """Facts that no guarantee covers: users without records, drawn places, running times."""
        return (
            "how many users have no record in any silo (not which): the server",
            *(() if self.hidden_draw else (SHOWN_PLACES,)),
            SHOWN_TIME,
        )

    def assumptions(self, view: AdversaryView) -> Sequence[str]:
        """Return the assumptions on counts: that nobody lies, and the totals no silo can check."""
        return tuple(filter(None, (HONEST_COUNTS, self.assumed_totals)))

    def describe(self) -> str:
        """Return one line for the log."""
        totals = self.allowed_totals
        return (
            f"private weighting: keys of {self.key_bits} bits"
            + (" (INSECURE: simulation only)" if self.allow_insecure_key_size else "")
            + f", precision {self.precision:g}, at most {self.max_records_per_user} records a user"
            + (f", one of {totals}" if totals else "")
            + ("" if self.draw_choices is None else f", users drawn 1-out-of-{self.draw_choices}")
        )

    def server(self, plan: NoisedSum, *, silos: int, coordinates: int) -> PaillierServerEnd:
        """Return the server's end of a new run.

        Raises
        ------
        ValueError
            As `WeightingSettings`; or the encoding's steps are coarse against a silo's noise.
        """
        stddev = plan.client_noise_stddev(silos)
        settings = self.settings(
            run=secrets.token_hex(16),
            users=plan.sampling.population,
            silos=silos,
            coordinates=coordinates,
            winning_choices=winning_choices(plan, self.draw_choices),
            update_bound=plan.clipping_norm,
            noise_bound=NOISE_ROOM * stddev,
        )
        if settings.step > (largest := _LARGEST_STEP * stddev):
            raise InvalidValue(
                f"precision={settings.precision!r}: it rounds to steps of {settings.step:.3g}, too "
                f"coarse for a silo's noise of standard deviation {stddev:.3g}; expected at most "
                f"about {settings.precision * largest / settings.step:.3g}"
            )
        return PaillierServerEnd(settings)


class PaillierServerEnd(PartyServerEnd[WeightingServer]):
    """The server's end of one run; keys are fresh.

    Parameters
    ----------
    settings : WeightingSettings
        ``update_bound`` is the clipping norm.
    """

    protocol = PaillierSiloEnd.protocol
    sum_type = MaskedSum
    settings: WeightingSettings

    @property
    def sensitivity(self) -> float:
        """Most clipping norms by which one user moves a decoded sum."""
        norm = self.settings.update_bound
        return self.settings.contribution_bound(norm) / norm

    def open_round(
        self, number: int, sampled: Sequence[int] | None, silos: Silos
    ) -> Mapping[str, bytes]:
        """Encrypt the weights of the round's users (weighting (a)), the same for all silos."""
        progress = Remaining(f"round {number}: encryptions")
        if self.settings.draw_choices is None:
            plain = self.party.open_round(number, sampled=sampled, progress=progress)
            return {WEIGHTS: plain.to_bytes()}
        answer = self._draw(self.party.offer_draw(number), silos)
        with checked_answers():
            drawn = self.party.open_drawn_round(answer, progress=progress)
        return {WEIGHTS: drawn.to_bytes()}

    def _new_party(self) -> WeightingServer:
        return WeightingServer(self.settings, workers=cores())

    def _server_key(self) -> PaillierKey:
        return self.party.public_key

    def _decrypt(self, messages: list[MaskedSum], progress: Remaining) -> NDArray[np.float64]:
        return self.party.close_round(messages, progress=progress)

    def _log_costs(self) -> None:
        settings = self.settings
        guess = estimate_round(settings, prepared=pool_pays(settings))
        log.info(
            "private weighting: on one core a round takes %.0f s in a silo with all %d users "
            "(%.0f s less if all users take part, %.0f s more in the first round) and %.0f s in "
            "the server, which has %d cores; a silo sends %.1f MB and receives %.1f MB",
            guess.silo,
            settings.users,
            guess.fold + guess.tables,
            guess.prepare,
            guess.server,
            cores(),
            guess.upload_bytes / 1e6,
            guess.download_bytes / 1e6,
        )

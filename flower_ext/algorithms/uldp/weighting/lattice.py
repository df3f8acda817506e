"""Private weighting over ring-LWE: its settings, and the server's end of a run.

Experimental: no outsider has reviewed it. `flower_ext.secure.weighting.lattice` has the protocol.

====================  =====================================================
protocol              here
====================  =====================================================
steps 1 and 2         ``begin`` (silos' keys), ``keys`` (of all, and the server's)
step 3                answer of silo 0 to ``keys``: sealed seeds, choices of the transfer
steps 4 and 5         ``count`` (the seed arrives, masked counts leave)
epoch, round          `LatticeServer`, with every training message
secret draw           ``draw`` (to silo 0), before the epoch of a round
====================  =====================================================
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from logging import getLogger
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from flower_ext.algorithms.uldp.weighting.lattice_silo import (
    COUNT,
    COUNTS,
    KEY,
    KEYS,
    NAME,
    OPENING,
    SEALED,
    SEED,
    SERVER_KEY,
    SILO_KEYS,
    WEIGHTS,
    settings_to_facts,
)
from flower_ext.algorithms.uldp.weighting.protocol import (
    ANSWER,
    BEGIN,
    DRAW,
    HIDDEN_BY_TRANSFER,
    OFFER,
    PROTOCOL,
    SHOWN_PLACES,
    SHOWN_TIME,
    ServerEnd,
    Silos,
    Upload,
    WeightingProtocol,
    as_record,
    checked_answers,
    cores,
    draw_hits,
)
from flower_ext.checks import require_at_least_one
from flower_ext.errors import InvalidValue
from flower_ext.federation import Remaining, records
from flower_ext.privacy import AdversaryView, ReleasePlan
from flower_ext.privacy.theorems.assumptions import HONEST_COUNTS
from flower_ext.secure.weighting.lattice.messages import (
    DrawAnswer,
    LatticeSum,
    LatticeWeights,
    MaskedCounts,
    SealedSeed,
    SiloKey,
    TransferAnswer,
)
from flower_ext.secure.weighting.lattice.server import LatticeServer as Party
from flower_ext.secure.weighting.lattice.settings import LatticeSettings

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
    "oblivious transfer: the computational Diffie-Hellman problem is hard in the 3072-bit group of "
    "RFC 3526, HKDF-SHA256 acts as a random oracle and keyed BLAKE2b as a pseudorandom function"
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
        If given, users are drawn by 1-out-of-``draw_choices`` oblivious transfer. No party then
        learns which users take part, so the draw amplifies privacy against the server as well. The
        plan's ``sampling_rate`` must be a multiple of 1 / ``draw_choices``.

    Raises
    ------
    ValueError
        A field is out of range.
    """

    name: ClassVar[str] = NAME
    secure_sum: ClassVar[str] = (
        f"{_EXPERIMENTAL}; no silo colludes with the server, which relays keys unchanged; in every "
        f"word of a sum one silo's noise and dither are as the protocol says; {_RING}; "
        f"{_TRANSFER}; X25519 and ChaCha20 are not broken"
    )

    max_records_per_user: int = 2000
    silo_record_limits: tuple[int, ...] | None = None
    draw_choices: int | None = None

    def __post_init__(self) -> None:
        require_at_least_one("max_records_per_user", self.max_records_per_user)
        if self.draw_choices is not None and self.draw_choices < 2:
            raise InvalidValue(f"draw_choices={self.draw_choices!r}: expected an integer >= 2")
        limits = self.silo_record_limits
        if limits is not None:
            object.__setattr__(self, "silo_record_limits", tuple(limits))

    @property
    def hidden_draw(self) -> str:
        """Assumption under which even the server does not learn the draw, with ``draw_choices``."""
        return "" if self.draw_choices is None else f"{HIDDEN_BY_TRANSFER}; {_RING}"

    @property
    def shown(self) -> Sequence[str]:
        """Revealed facts: the drawn places, if the server knows them, and a silo's running time."""
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

    def server(self, plan: ReleasePlan, *, silos: int, coordinates: int) -> LatticeServer:
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
                draw_hits=draw_hits(plan, self.draw_choices),
            )
        except InvalidValue as error:
            if not str(error).startswith("noise_stddev"):
                raise
            raise InvalidValue(
                f"noise_multiplier={plan.noise_multiplier:g} of the plan, shared by {silos} "
                f"silos: {error}"
            ) from error
        server = LatticeServer(settings)
        least = math.sqrt(plan.rounds) * server.approximation_error / _LARGEST_APPROXIMATION_ERROR
        if plan.noise_multiplier < least:
            raise InvalidValue(
                f"noise_multiplier={plan.noise_multiplier:g} of the plan: protocol='lattice' needs "
                f"{least:.2g} at least to hide its errors in {plan.rounds} sums; expected more "
                "noise, fewer rounds, smaller silo_record_limits, or protocol='paillier'"
            )
        return server


class LatticeServer(ServerEnd):
    """The server's end of one run; keys and the public seed are fresh.

    Parameters
    ----------
    settings : LatticeSettings
    """

    def __init__(self, settings: LatticeSettings) -> None:
        self.settings = settings
        self._weights: bytes | None = None

    @cached_property
    def party(self) -> Party:
        """The server of `flower_ext.secure`, which makes its keys at first use."""
        return Party(self.settings, workers=cores())

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

    @property
    def sum_bytes(self) -> int:
        """Length of a silo's masked sum in bytes."""
        return LatticeSum.size(self.settings)

    @checked_answers()
    def set_up(self, silos: Silos) -> None:
        """Exchange keys, transfer the keys of the weights, and receive masked counts."""
        settings, party = self.settings, self.party
        log.info(
            "private weighting: a silo sends %.1f MB per round and receives weights of %.1f MB",
            settings.upload_bytes / 1e6,
            settings.weights_bytes / 1e6,
        )
        facts = {PROTOCOL: NAME, **settings_to_facts(settings)}
        told = silos.ask(BEGIN, KEY, SiloKey.size(settings), facts=facts)
        keys = party.relay_keys(
            [replace(SiloKey.from_bytes(key, settings), silo=silo) for silo, key in told.items()]
        )
        public = {
            SERVER_KEY: records.to_bytes_array(party.public_key.to_bytes()),
            SILO_KEYS: np.stack([records.to_bytes_array(key.to_bytes()) for key in keys]),
        }
        shared = {silo: {KEYS: records.to_record(public)} for silo in told}
        one, others = SealedSeed.size(settings), settings.silos - 1
        length = one * others + TransferAnswer.size(settings)
        sealed = silos.ask(KEYS, SEALED, length, own=shared, only=(0,))[0]
        seeds = party.relay_seed(
            [
                SealedSeed.from_bytes(sealed[at : at + one], settings)
                for at in range(0, one * others, one)
            ]
        )
        party.receive_answer(TransferAnswer.from_bytes(sealed[one * others :], settings))
        for_one = {seed.receiver: {SEED: as_record({SEED: seed.to_bytes()})} for seed in seeds}
        counts = silos.ask(COUNT, COUNTS, MaskedCounts.size(settings), own=for_one)
        party.receive_counts(
            [
                replace(MaskedCounts.from_bytes(masked, settings), silo=silo)
                for silo, masked in counts.items()
            ]
        )

    def open_round(
        self, number: int, sampled: Sequence[int] | None, silos: Silos
    ) -> Mapping[str, bytes]:
        """Encrypt the weights of the round's users, in a new epoch if users are drawn."""
        if self.settings.draw_choices is not None:
            self._weights = self._drawn(silos).to_bytes()
        elif self._weights is None or sampled is not None:
            self._weights = self.party.open_epoch(sampled=sampled).to_bytes()
        opening = self.party.open_round(number)
        return {WEIGHTS: self._weights, OPENING: opening.to_bytes()}

    def _drawn(self, silos: Silos) -> LatticeWeights:
        """Return the weights of an epoch of which no party knows who was drawn."""
        party, settings = self.party, self.settings
        offer = as_record({OFFER: party.offer_draw().to_bytes()})
        length = DrawAnswer.size(settings)
        told = silos.ask(DRAW, ANSWER, length, own={0: {OFFER: offer}}, asked=(0,))
        with checked_answers():
            return party.open_drawn_epoch(DrawAnswer.from_bytes(told[0], settings))

    def check_upload(self, silo: int, upload: Upload) -> None:
        """Refuse an upload that is not a masked sum of this round."""
        self.party.check_sum(self._sum(silo, upload))

    def close_round(self, uploads: Mapping[int, Upload]) -> NDArray[np.float64]:
        """Decrypt the sum over all silos."""
        sums = [self._sum(*one) for one in uploads.items()]
        return self.party.close_round(sums, progress=Remaining("decryption"))

    def _sum(self, silo: int, upload: Upload) -> LatticeSum:
        """Return the sum under the number of its sender, which the transport knows."""
        found = LatticeSum.from_bytes(upload.data, self.settings)
        return replace(found, silo=silo, round_number=upload.round_number)

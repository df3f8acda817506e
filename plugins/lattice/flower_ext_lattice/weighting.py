"""Private weighting over ring-LWE: the caller's options, and the settings of a run.

Experimental: no outsider has reviewed it. `flower_ext_lattice` describes the protocol.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from flower_ext.checks import Count
from flower_ext.errors import InvalidValue
from flower_ext.privacy import AdversaryView
from flower_ext.privacy.mechanisms.noised_sum import NoisedSum
from flower_ext.privacy.theorems.assumptions import HONEST_COUNTS
from flower_ext.secure.weighting.protocol import (
    HIDDEN_BY_TRANSFER,
    WeightingProtocol,
)
from flower_ext_lattice.server import LatticeServer
from flower_ext_lattice.settings import LatticeSettings, UnsuitableNoise
from flower_ext_lattice.silo import LatticeSilo

_EXPERIMENTAL = (
    "private weighting over ring-LWE is experimental and not externally reviewed: its proof is in "
    "docs/proved/lattice.md, and nobody outside this project has checked it"
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
    "channels between silos and server are confidential and authenticated: an eavesdropper who "
    "reads what one silo receives, and colludes with the other silos, learns that silo's numbers "
    "of records"
)
_LARGEST_APPROXIMATION_ERROR = 1e-3
"""Largest total distance of a run's sums from exact sums, in standard deviations of the noise."""


@dataclass(frozen=True, kw_only=True)
class LatticeWeighting(WeightingProtocol):
    """Options of private weighting over ring-LWE. Experimental: no outsider has reviewed it.

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

    server_type = LatticeServer
    silo_type = LatticeSilo
    secure_sum: ClassVar[str] = (
        f"{_EXPERIMENTAL}; no silo colludes with the server, which relays keys unchanged; in every "
        f"word of a sum one silo's noise and dither are as the protocol says; {_RING}; "
        f"{_TRANSFER}; X25519 and ChaCha20 are not broken"
    )
    secret_draw: ClassVar[str] = f"{HIDDEN_BY_TRANSFER}; {_RING}"

    max_records_per_user: Count = 2000
    silo_record_limits: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(limits := self.silo_record_limits, list):
            object.__setattr__(self, "silo_record_limits", tuple(limits))

    def assumptions(self, view: AdversaryView) -> Sequence[str]:
        """Return the assumptions of a guarantee against ``view``, besides ``secure_sum``."""
        common = (HONEST_COUNTS, _CHANNELS)
        if view is AdversaryView.SUM_ONLY:
            return common
        if view is AdversaryView.RELEASED_MODELS:
            hints = f"{_RING}, also if an adversary sees the released models (hint-RLWE)"
            return _EXPERIMENTAL, hints, _TRANSFER, "ChaCha20 is not broken", *common
        return _EXPERIMENTAL, *common

    def __str__(self) -> str:
        """Return the settings and a warning, for the log."""
        return f"{self!r} over ring-LWE (EXPERIMENTAL, not externally reviewed)"

    def settings_of(self, mechanism: NoisedSum, *, silos: int, coordinates: int) -> LatticeSettings:
        """Return the settings of a new run.

        Raises
        ------
        ValueError
            As `LatticeSettings`; or the plan's noise is too small to hide the protocol's errors.
        """
        limits = self.silo_record_limits
        stddev = mechanism.client_noise_stddev(silos)
        try:
            settings = LatticeSettings(
                **self.settings_of_run(mechanism, silos=silos, coordinates=coordinates),
                silo_record_limits=(self.max_records_per_user,) * silos
                if limits is None
                else limits,
                clipping_norm=mechanism.clipping_norm,
                noise_stddev=stddev,
                rounds=mechanism.rounds,
            )
        except UnsuitableNoise as refusal:
            raise InvalidValue(
                f"noise_multiplier={mechanism.noise_multiplier:g} of the plan, shared by {silos} "
                f"silos: {refusal}"
            ) from refusal
        error = settings.approximation_error
        least = math.sqrt(mechanism.rounds) * error / _LARGEST_APPROXIMATION_ERROR
        if mechanism.noise_multiplier < least:
            raise InvalidValue(
                f"noise_multiplier={mechanism.noise_multiplier:g} of the plan: protocol='lattice' "
                f"needs {least:.2g} at least to hide its errors in {mechanism.rounds} sums; "
                "use more noise, fewer rounds, smaller silo_record_limits, or protocol='paillier'"
            )
        return settings

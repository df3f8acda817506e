"""Protocol 1 over Paillier: the caller's options, and the settings of a run made from them."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import ClassVar

from flower_ext.errors import InvalidValue
from flower_ext.privacy import AdversaryView
from flower_ext.privacy.mechanisms.noised_sum import NoisedSum
from flower_ext.privacy.theorems.assumptions import HONEST_COUNTS
from flower_ext.secure.weighting.paillier_server import PaillierServer
from flower_ext.secure.weighting.paillier_settings import PaillierOptions, PaillierSettings
from flower_ext.secure.weighting.paillier_silo import PaillierSilo
from flower_ext.secure.weighting.protocol import WeightingProtocol

_NOISE_ROOM = 64.0
"""Bound on a silo's encoded noise, in standard deviations, so high that noise never reaches it."""
_LARGEST_STEP = 0.25
"""Largest step of the encoding, in standard deviations of a silo's noise. Rounding to longer steps
would lose part of the noise."""


@dataclass(frozen=True, kw_only=True)
class PrivateWeighting(PaillierOptions, WeightingProtocol):
    """Options of Protocol 1 over Paillier.

    `settings_of` refuses a run whose sums could overflow.

    Parameters
    ----------
    max_records_per_user : int
        N_max: the most records that one user may have over all silos.
    allowed_totals : tuple of int, optional
        Numbers of records that a user may have over all silos; zero is always allowed. By default,
        every number up to N_max is allowed. With a short list, a run needs less work.
    silo_record_limits : tuple of int, optional
        The most records of one user in each silo. These limits sum to at most N_max, so that no
        user can exceed N_max. Without them, a user with more than N_max records makes every sum
        useless, and the run ends after three such sums.
    precision : float
        P: largest rounding error of a coordinate of the sum over silos. It must be small compared
        to each silo's noise.
    draw_choices : int, optional
        See `WeightingProtocol`.
    key_bits : int
        Length of the Paillier modulus.
    allow_insecure_key_size : bool
        Accept short keys in tests and simulations. Silos that refuse seeded noise also refuse
        short keys.

    Raises
    ------
    ValueError
        A field is out of range.
    """

    server_type = PaillierServer
    silo_type = PaillierSilo
    secure_sum: ClassVar[str] = (
        "private weighting: no silo colludes with the server, which relays keys unchanged; "
        "Paillier encryption, X25519 and ChaCha20 are not broken"
    )

    @property
    def assumed_totals(self) -> str:
        """Assumption on how many records a user has over all silos; no silo can check it alone.

        This string is empty if ``silo_record_limits`` are given and ``allowed_totals`` are not,
        because the limits then keep every user within N_max. If a user breaks the assumption, the
        sum is out of bounds. From such a sum, the server may find this user's number of records by
        testing every possible number.
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

    @property
    def disclosures(self) -> Sequence[str]:
        """Facts that a run reveals outside any guarantee, such as how many users lack records."""
        nobody = "how many users have no record in any silo (not which): the server"
        return nobody, *super().disclosures

    def assumptions(self, view: AdversaryView) -> Sequence[str]:
        """Return `HONEST_COUNTS` and, unless it is empty, `assumed_totals`."""
        return tuple(filter(None, (HONEST_COUNTS, self.assumed_totals)))

    def settings_of(
        self, mechanism: NoisedSum, *, silos: int, coordinates: int
    ) -> PaillierSettings:
        """Return the settings of a new run; refuse steps too coarse for a silo's noise."""
        stddev = mechanism.client_noise_stddev(silos)
        settings = PaillierSettings(
            **asdict(self) | self.settings_of_run(mechanism, silos=silos, coordinates=coordinates),
            update_bound=mechanism.clipping_norm,
            noise_bound=_NOISE_ROOM * stddev,
        )
        if settings.step > (largest := _LARGEST_STEP * stddev):
            raise InvalidValue(
                f"precision={settings.precision!r}: expected at most about "
                f"{settings.precision * largest / settings.step:.3g}, because rounding to steps of "
                f"{settings.step:.3g} is too coarse for a silo's noise of standard deviation "
                f"{stddev:.3g}"
            )
        return settings

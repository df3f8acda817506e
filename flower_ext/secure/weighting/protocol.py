"""Interface of a protocol for private weighting: its options, and its server and silos.

`federation.sums.weighted` runs the parties over Flower. To add a protocol, a Python package
declares an entry point in the group ``flower_ext.weighting``. The entry point has the name of the
protocol and refers to a subclass of `WeightingProtocol`. Loading a protocol needs the extra
``weighting``; importing this module does not.
"""

from __future__ import annotations

import json
import secrets
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint
from typing import TYPE_CHECKING, Any, ClassVar

from flower_ext import plugins
from flower_ext.checks import Checked, Several
from flower_ext.errors import InvalidValue
from flower_ext.privacy import AdversaryView, PoissonSampling
from flower_ext.privacy.mechanisms.noised_sum import NoisedSum
from flower_ext.secure.weighting.agreement import PartySettings

if TYPE_CHECKING:  # these modules need the extra
    from flower_ext.secure.weighting.server_party import ServerParty
    from flower_ext.secure.weighting.silo_party import SiloParty

_GROUP = "flower_ext.weighting"
"""Group of the entry points of further protocols."""
_PAILLIER = EntryPoint(
    name="paillier",
    value="flower_ext.secure.weighting.private_weighting:PrivateWeighting",
    group=_GROUP,
)
_EXTRA = ("gmpy2", "nacl", "phe")

DRAWN_PLACES = "which places of the silos' secret order of users were drawn: the server"
RUNNING_TIME = "how long a silo takes, which grows with the number of its users: whoever times it"
HIDDEN_BY_TRANSFER = (
    "who was drawn is hidden by oblivious transfer: no silo colludes with the server, all parties "
    "follow the protocol; the computational Diffie-Hellman problem is hard in the prime-order "
    "group of Ed25519, and BLAKE2b acts as a random oracle"
)


@dataclass(frozen=True, kw_only=True)
class WeightingProtocol(Checked, ABC):
    """The caller's options of one protocol. Subclasses are frozen dataclasses with defaults.

    Parameters
    ----------
    draw_choices : int, optional
        If given, users are drawn by 1-out-of-``draw_choices`` oblivious transfer. No party then
        learns which users take part, so the draw amplifies privacy against the server as well. The
        plan's ``sampling_rate`` must be a multiple of 1 / ``draw_choices``.
    """

    server_type: ClassVar[type[ServerParty[Any, Any]]]
    silo_type: ClassVar[type[SiloParty]]
    secure_sum: ClassVar[str]
    """Assumption under which the server sees only the sum of the silos' uploads."""
    secret_draw: ClassVar[str] = HIDDEN_BY_TRANSFER
    """Assumption under which, with ``draw_choices``, no party knows the drawn users."""

    draw_choices: Several | None = None

    @property
    def hidden_draw(self) -> str | None:
        """Assumption under which no party knows the drawn users; None if the server draws them."""
        return None if self.draw_choices is None else self.secret_draw

    @property
    def disclosures(self) -> Sequence[str]:
        """Texts on what a run reveals outside any guarantee, such as running times, and to whom."""
        return (RUNNING_TIME,) if self.hidden_draw else (DRAWN_PLACES, RUNNING_TIME)

    def assumptions(self, view: AdversaryView) -> Sequence[str]:
        """Return the assumptions that this protocol adds to a guarantee against ``view``."""
        return ()

    @abstractmethod
    def settings_of(self, mechanism: NoisedSum, *, silos: int, coordinates: int) -> PartySettings:
        """Return the settings of a new run, under a name that no other run has.

        Refuse a plan that does not fit the protocol; the error says what to change.
        """

    def settings_of_run(
        self, mechanism: NoisedSum, *, silos: int, coordinates: int
    ) -> dict[str, Any]:
        """Return the fields of a new run's settings that `PartySettings` describes.

        A user takes part if the draw picks one of ``winning_choices`` among ``draw_choices``
        choices. ``winning_choices`` is ``draw_choices`` times the rate at which users are drawn. It
        must be an integer below ``draw_choices``.
        """
        choices, winning = self.draw_choices, 1
        if choices is not None:
            sampling = mechanism.sampling
            rate = sampling.rate if isinstance(sampling, PoissonSampling) else 1.0
            winning = round(rate * choices)
            if not (0 < winning < choices and abs(rate - winning / choices) < 1e-12):
                raise InvalidValue(
                    f"draw_choices={choices}: users are drawn at the rate {rate:g}; expected a "
                    f"multiple of 1/{choices} below 1; change the rate or draw_choices"
                )
        return {
            "run": secrets.token_hex(16),
            "users": mechanism.sampling.population,
            "silos": silos,
            "coordinates": coordinates,
            "draw_choices": choices,
            "winning_choices": winning,
        }


@cache
def protocols() -> Mapping[str, EntryPoint]:
    """Return the entry points of all installed protocols by name."""
    return {point.name: point for point in (*plugins.points(_GROUP), _PAILLIER)}


def load_protocol(name: str) -> type[WeightingProtocol]:
    """Import and return the protocol ``name``.

    Raises
    ------
    ValueError
        No such protocol is installed; the message says what to install.
    ModuleNotFoundError
        The extra is not installed.
    """
    if name not in protocols():
        raise InvalidValue(
            f"protocol={name!r}: expected one of {', '.join(sorted(protocols()))}; if a separate "
            "package provides this protocol, install that package first: "
            f"{plugins.how_to_install(f'flower-ext-{name}')}"
        )
    try:
        protocol: type[WeightingProtocol] = protocols()[name].load()
    except ModuleNotFoundError as error:
        missing = str(error.name).partition(".")[0]
        if missing not in _EXTRA:
            raise
        raise ModuleNotFoundError(
            f"private weighting needs {missing}: pip install 'flower-ext[weighting]'", name=missing
        ) from error
    return protocol


def protocol_of(data: bytes) -> type[WeightingProtocol]:
    """Return the protocol that is named in ``data``: a run's settings, or a silo's state."""
    values = json.loads(data)
    if not isinstance(values, dict) or "kind" not in values:
        raise InvalidValue("settings: expected JSON that names a protocol as its 'kind'")
    return load_protocol(str(values["kind"]))

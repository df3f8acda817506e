"""The silos' side of a secret draw of users: their seed chooses which texts they open.

Both protocols of private weighting use it: over Paillier the texts are ciphertexts, and over
ring-LWE they are keys.
"""

from __future__ import annotations

from typing import Protocol

from flower_ext.errors import InvalidValue, ProtocolError
from flower_ext.secure.labels import derive
from flower_ext.secure.weighting.oblivious import SEAL_BYTES, Receiver


class DrawSettings(Protocol):
    """Settings of a protocol that may draw users in secret."""

    @property
    def context(self) -> bytes:
        """Hash of all settings, the run's name among them."""
        ...

    @property
    def users(self) -> int:
        """Number of users."""
        ...

    @property
    def draw_choices(self) -> int | None:
        """P: number of texts per user, of which the silos open one; None without a draw."""
        ...

    @property
    def draw_hits(self) -> int:
        """Number of a user's texts with which the user takes part."""
        ...


def check_draw(settings: DrawSettings) -> None:
    """Refuse a draw that always or never takes a user.

    Raises
    ------
    ValueError
        ``draw_hits`` is not between zero and ``draw_choices``.
    """
    choices, hits = settings.draw_choices, settings.draw_hits
    if choices is not None and not 0 < hits < choices:
        raise InvalidValue(
            f"draw_hits={hits!r}: expected an integer from 1 to draw_choices - 1 = {choices - 1}"
        )


def chooser(
    settings: DrawSettings, seed: bytes, number: int, public: bytes, *, workers: int
) -> Receiver:
    """Return the receiver of one draw's oblivious transfers, which is the same at all silos.

    Parameters
    ----------
    seed : bytes
        The silos' common seed.
    number : int
        Number of the round or epoch that the draw is for.
    public : bytes
        The server's offer.

    Raises
    ------
    ProtocolError
        The settings have no ``draw_choices``.
    ValueError
        ``public`` is not a group element.
    """
    return Receiver(
        public,
        derive(seed, "draw", number),
        run=settings.context,
        transfers=settings.users,
        choices=_choices(settings),
        workers=workers,
    )


def opened(settings: DrawSettings, receiver: Receiver, sealed: bytes, *, size: int) -> list[bytes]:
    """Return the chosen text of each user, by place in the secret order.

    Parameters
    ----------
    sealed : bytes
        P sealed texts for each user.
    size : int
        Length of a text in bytes before it was sealed.

    Raises
    ------
    ProtocolError
        The settings have no ``draw_choices``.
    ValueError
        The length is wrong, or a text was sealed for other silos or another draw.
    """
    choices, size = _choices(settings), size + SEAL_BYTES
    if len(sealed) != size * choices * settings.users:
        raise InvalidValue(
            f"sealed weights of {len(sealed)} bytes: expected {choices} texts of {size} bytes for "
            f"each of {settings.users} users"
        )
    texts = [sealed[at : at + size] for at in range(0, len(sealed), size)]
    return receiver.open([texts[at : at + choices] for at in range(0, len(texts), choices)])


def _choices(settings: DrawSettings) -> int:
    if settings.draw_choices is None:
        raise ProtocolError(
            "the settings have no draw_choices: expected weights of users that the server named"
        )
    return settings.draw_choices

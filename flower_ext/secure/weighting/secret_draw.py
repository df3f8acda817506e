"""The silos' side of a secret draw of users: their seed chooses which texts they open."""

from __future__ import annotations

from flower_ext.errors import InvalidValue, ProtocolError
from flower_ext.secure.labels import derive
from flower_ext.secure.weighting.oblivious import SEAL_BYTES, Receiver
from flower_ext.secure.weighting.party_settings import PartySettings


def draw_receiver(
    settings: PartySettings, seed: bytes, number: int, public: bytes, *, workers: int
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
        ``public`` is not a point of the group.
    """
    return Receiver(
        public,
        derive(seed, "draw", number),
        run=settings.context,
        transfers=settings.users,
        places=_draw_choices(settings),
        workers=workers,
    )


def open_texts(
    settings: PartySettings, receiver: Receiver, sealed: bytes, *, size: int
) -> list[bytes]:
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
    choices, size = _draw_choices(settings), size + SEAL_BYTES
    if len(sealed) != size * choices * settings.users:
        raise InvalidValue(
            f"sealed weights of {len(sealed)} bytes: expected {choices} texts of {size} bytes for "
            f"each of {settings.users} users"
        )
    texts = [sealed[at : at + size] for at in range(0, len(sealed), size)]
    return receiver.open([texts[at : at + choices] for at in range(0, len(texts), choices)])


def _draw_choices(settings: PartySettings) -> int:
    if settings.draw_choices is None:
        raise ProtocolError(
            "the settings have no draw_choices: expected weights of users that the server named"
        )
    return settings.draw_choices

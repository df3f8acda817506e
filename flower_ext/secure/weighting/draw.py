"""The silos' side of a secret draw of users: their seed chooses which ciphertexts they open."""

from __future__ import annotations

from flower_ext.errors import InvalidValue, ProtocolError
from flower_ext.secure.labels import derive
from flower_ext.secure.weighting.agreement import WeightingSettings
from flower_ext.secure.weighting.messages import SealedWeights
from flower_ext.secure.weighting.oblivious import SEAL_BYTES, Receiver


def chooser(
    settings: WeightingSettings, seed: bytes, round_number: int, public: bytes, *, workers: int
) -> Receiver:
    """Return the receiver of a round's oblivious transfers, which is the same at all silos.

    Raises
    ------
    ProtocolError
        The settings have no ``draw_choices``.
    ValueError
        ``public`` is not a group element.
    """
    if settings.draw_choices is None:
        raise ProtocolError(
            "the settings have no draw_choices: expected EncryptedWeights from "
            "`WeightingServer.open_round`, and no draw"
        )
    return Receiver(
        public,
        derive(seed, "draw", round_number),
        transfers=settings.users,
        choices=settings.draw_choices,
        workers=workers,
    )


def opened(
    settings: WeightingSettings, seed: bytes, message: SealedWeights, *, workers: int
) -> bytes:
    """Return the chosen ciphertext of each user, by place in the secret order.

    Raises
    ------
    ProtocolError
        The settings have no ``draw_choices``.
    ValueError
        The message is malformed.
    """
    receiver = chooser(settings, seed, message.round_number, message.public, workers=workers)
    size, choices = settings.ciphertext_bytes + SEAL_BYTES, settings.draw_choices or 1
    if len(message.sealed) != size * choices * settings.users:
        raise InvalidValue(
            f"sealed weights of {len(message.sealed)} bytes: expected {choices} texts of {size} "
            f"bytes for each of {settings.users} users"
        )
    texts = [message.sealed[at : at + size] for at in range(0, len(message.sealed), size)]
    return b"".join(
        receiver.open([texts[at : at + choices] for at in range(0, len(texts), choices)])
    )

"""A draw of users that neither the server nor the silos know, by a second key for every entry.

Here y_u is 1 if user u is drawn, and 0 otherwise. The server writes every entry of a user's weights
in two columns, one for y_u = 0 and one for y_u = 1, in an order that it draws at random for each
user. Each column has a key of its own. By 1-out-of-P oblivious transfer, where P is
``draw_choices``, the silos receive the number and the key of one column. For ``winning_choices`` of
the P choices it is the column with y_u = 1, and for the other choices the column with y_u = 0.

The server does not know which choice the silos made. The silos do not know which column they
opened, because the order is random and an encryption of zero looks like any other.
"""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from flower_ext.errors import InvalidValue
from flower_ext.secure.keys_and_ciphers import KEY_BYTES
from flower_ext.secure.weighting.oblivious import Receiver, Sender
from flower_ext_lattice.settings import DRAW_TEXT_BYTES, LatticeSettings


@dataclass(frozen=True)
class Columns:
    """The columns of all users' entries, by place in the silos' secret order.

    Parameters
    ----------
    drawn : tuple of tuple of int
        y_u of each column: 0 or 1.
    keys : tuple of tuple of bytes
        Key of each column. Empty if the server names the drawn users: every user then has a single
        column without a key.
    """

    drawn: Sequence[tuple[int, ...]]
    keys: Sequence[tuple[bytes, ...]] = ()


def draw_columns(settings: LatticeSettings) -> Columns:
    """Return the two columns of every user, in random order and with fresh keys."""
    drawn = [secrets.choice(((0, 1), (1, 0))) for _ in range(settings.users)]
    keys = [(secrets.token_bytes(KEY_BYTES), secrets.token_bytes(KEY_BYTES)) for _ in drawn]
    return Columns(drawn, keys)


def seal_columns(
    settings: LatticeSettings, columns: Columns, sender: Sender, answer: bytes
) -> bytes:
    """Return ``draw_choices`` sealed texts per user, of which the silos can open one.

    Each text holds the number and the key of one of the user's columns.

    Parameters
    ----------
    answer : bytes
        The silos' choices, from `Receiver.answer`.

    Raises
    ------
    ValueError
        ``answer`` does not hold one point of the group for each user.
    """
    choices = range(settings.draw_choices or 1)
    texts = []
    for drawn, keys in zip(columns.drawn, columns.keys, strict=True):
        winning_choices = secrets.SystemRandom().sample(choices, settings.winning_choices)
        numbers = [drawn.index(int(choice in winning_choices)) for choice in choices]
        texts.append([bytes([number]) + keys[number] for number in numbers])
    return sender.seal(answer, texts)


def open_columns(receiver: Receiver, sealed: bytes) -> list[tuple[int, bytes]]:
    """Return the number and the key of the column that the silos receive for each user.

    Parameters
    ----------
    receiver : Receiver
        The silos' choices of this draw.

    Raises
    ------
    ValueError
        A text is malformed, or was sealed for different silos or a different draw.
    """
    texts = receiver.open(sealed, DRAW_TEXT_BYTES)
    if any(text[0] > 1 for text in texts):
        raise InvalidValue("weights from the server: expected column 0 or 1 for every user")
    return [(text[0], text[1:]) for text in texts]

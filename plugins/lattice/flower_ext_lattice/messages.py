"""Messages of private weighting over ring-LWE, besides the messages that all schemes share.

A body holds words of polynomials as little-endian numbers of 6 bytes (residues, first parts of a
sum) or 8 bytes (second parts).
"""

from collections.abc import Mapping
from dataclasses import dataclass

from flower_ext.secure.messages import ProtocolMessage
from flower_ext.secure.weighting.agreement import SEED_BYTES, SumMessage
from flower_ext.secure.weighting.oblivious import POINT_BYTES, SEAL_BYTES
from flower_ext_lattice.layout import DEGREE
from flower_ext_lattice.ring import RESIDUE_BYTES
from flower_ext_lattice.settings import (
    DRAW_TEXT_BYTES,
    FIRST_WORD_BYTES,
    NONCE_BYTES,
    SECOND_WORD_BYTES,
    LatticeSettings,
)


@dataclass(frozen=True, kw_only=True)
class LatticeKey(ProtocolMessage):
    """The server's public key, for all silos.

    The key is a pair of polynomials, pk0 and pk1 (see `keys`). ``words`` holds the words of pk0.
    ``public_seed`` determines pk1. The seed and the nonce of a set of weights determine the
    polynomials a_u of this set (see `weights`). ``transfer`` is the point A with which the server
    begins the oblivious transfer.
    """

    kind = b"LWsk"

    public_seed: bytes
    transfer: bytes
    words: bytes

    @classmethod
    def _lengths(cls, settings: LatticeSettings) -> Mapping[str, int]:
        words = 2 * RESIDUE_BYTES * DEGREE
        return {"public_seed": SEED_BYTES, "transfer": POINT_BYTES, "words": words}


@dataclass(frozen=True, kw_only=True)
class LatticeWeights(ProtocolMessage):
    """One epoch's encrypted weights, for all silos. ``epoch`` is the number of its first round.

    ``nonce`` is random. Every a_u and every pad depend on it, so no two messages have an a_u or a
    pad in common, even if they belong to one epoch. ``words`` holds the words of b_u except the
    word of the constant coefficient. ``sealed`` holds, for each user, M candidates for that word;
    the silos can open one of them. If the draw is secret, there are two columns of candidates.
    ``sealed_columns`` then holds the columns' sealed keys, and ``offer`` is the server's offer, for
    which silo 0 made all silos' choices. Without a secret draw, both are empty.
    """

    kind = b"LWew"

    epoch: int
    nonce: bytes
    words: bytes
    sealed: bytes
    offer: bytes = b""
    sealed_columns: bytes = b""

    @classmethod
    def _lengths(cls, settings: LatticeSettings) -> Mapping[str, int]:
        word = 2 * RESIDUE_BYTES
        hidden = settings.draw_choices is not None
        texts = settings.users * (settings.draw_choices or 0)
        return {
            "nonce": NONCE_BYTES,
            "words": settings.users * (DEGREE - 1) * word,
            "sealed": settings.users * settings.table_size * settings.num_columns * word,
            "offer": POINT_BYTES if hidden else 0,
            "sealed_columns": texts * (DRAW_TEXT_BYTES + SEAL_BYTES),
        }


@dataclass(frozen=True, kw_only=True)
class LatticeSum(SumMessage):
    """A silo's weighted, noised and masked sum of updates, for the server.

    ``first`` holds a word of c0 for each coordinate, and none for the padding of the last block.
    ``second`` holds all words of c1, because a coordinate depends on all words of its block.
    """

    kind = b"LWsu"

    first: bytes
    second: bytes

    @classmethod
    def _lengths(cls, settings: LatticeSettings) -> Mapping[str, int]:
        return {
            "first": settings.coordinates * FIRST_WORD_BYTES,
            "second": settings.blocks * DEGREE * SECOND_WORD_BYTES,
        }

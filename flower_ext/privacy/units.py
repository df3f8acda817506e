"""Who is protected, against which change, from whose eyes: the three words every ε needs."""

from __future__ import annotations

from enum import StrEnum


class PrivacyUnit(StrEnum):
    """Whose whole contribution the guarantee hides."""

    RECORD = "record"
    USER = "user"
    CLIENT = "client"


class NeighboringRelation(StrEnum):
    """How two neighbouring data sets differ.

    ``REPLACE_SPECIAL`` replaces one unit's contribution with nothing (zeros) while its place
    stays visible: the relation for an adversary who sees who took part.
    """

    ADD_OR_REMOVE_ONE = "add-or-remove-one"
    REPLACE_ONE = "replace-one"
    REPLACE_SPECIAL = "replace-special"

    @property
    def sensitivity_factor(self) -> float:
        """How far one unit moves a sum of vectors of norm at most 1 (L2)."""
        return 2.0 if self is NeighboringRelation.REPLACE_ONE else 1.0


class AdversaryView(StrEnum):
    """What the adversary sees.

    * ``EACH_UPLOAD`` — every single upload and who sent it (the honest-but-curious server
      without secure aggregation);
    * ``SUM_ONLY`` — each round's released sum and who took part, never a single upload
      (the server behind secure aggregation);
    * ``RELEASED_MODELS`` — the models after each round, neither who took part nor, unless it is
      fixed, how many (a third party; the server is trusted). A participant sees more: messages
      tell how many were asked, and it can take its own share of the noise off again.

    Amplification by sampling hides *who took part*: it is available in ``RELEASED_MODELS`` only.
    """

    EACH_UPLOAD = "each-upload"
    SUM_ONLY = "sum-only"
    RELEASED_MODELS = "released-models"

    @property
    def sees(self) -> str:
        """The same in words."""
        return {
            AdversaryView.EACH_UPLOAD: "every upload and who sent it",
            AdversaryView.SUM_ONLY: "each round's sum and who took part",
            AdversaryView.RELEASED_MODELS: "the released models, not who took part",
        }[self]

"""The terms of an ε: the protected unit, the neighbouring relation, and what an adversary sees."""

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, TypeVar

Entry = TypeVar("Entry")


class PrivacyUnit(StrEnum):
    """The unit whose whole contribution a guarantee hides."""

    RECORD = "record"
    USER = "user"
    CLIENT = "client"


class NeighboringRelation(StrEnum):
    """The difference between two neighbouring data sets.

    ``REPLACE_SPECIAL`` replaces one unit's contribution by zeros, but the unit visibly takes
    part in both data sets. Use it against an adversary who sees which units took part.
    """

    ADD_OR_REMOVE_ONE = "add-or-remove-one"
    REPLACE_ONE = "replace-one"
    REPLACE_SPECIAL = "replace-special"

    @property
    def sensitivity_factor(self) -> float:
        """Largest L2 distance by which one unit moves a sum of vectors of norm at most 1."""
        return 2.0 if self is NeighboringRelation.REPLACE_ONE else 1.0


class AdversaryView(StrEnum):
    """The information that the adversary sees.

    * ``EACH_UPLOAD`` — every single upload and its sender: an honest-but-curious server without
      secure aggregation.
    * ``SUM_ONLY`` — each round's released sum and the clients in it, never a single upload: a
      server behind secure aggregation.
    * ``RELEASED_MODELS`` — the model after each round. The adversary is a third party, and the
      server is trusted. The adversary does not see which units took part. It knows the number of
      these units only if that number is fixed. A client of the run sees more than this view:
      messages tell the client the size of the cohort, and the client can subtract its own share of
      the noise.
    * ``MODELS_AND_COHORTS`` — the model after each round, and the units that took part in it. All
      else is as for ``RELEASED_MODELS``.

    Amplification by sampling needs an adversary that does not see *who took part*. It therefore
    holds for ``RELEASED_MODELS``, and for another view only if a protocol hides the draw from the
    server.
    """

    EACH_UPLOAD = "each-upload"
    SUM_ONLY = "sum-only"
    RELEASED_MODELS = "released-models"
    MODELS_AND_COHORTS = "models-and-cohorts"

    def covering(self, by_view: Mapping[Any, Entry]) -> Entry | None:
        """Return the entry for this view or, without one, for the next view that sees more.

        A guarantee against an adversary that sees more also holds against this view. The result is
        None if there is no such entry.
        """
        views = BY_KNOWLEDGE[BY_KNOWLEDGE.index(self) :]
        return next((by_view[view] for view in views if view in by_view), None)

    @property
    def sees(self) -> str:
        """The adversary's view in words."""
        return _IN_WORDS[self]


_IN_WORDS = {
    AdversaryView.RELEASED_MODELS: "the released models, not who took part",
    AdversaryView.MODELS_AND_COHORTS: "the released models and who took part",
    AdversaryView.SUM_ONLY: "each round's sum and who took part",
    AdversaryView.EACH_UPLOAD: "every upload and who sent it",
}
BY_KNOWLEDGE = tuple(_IN_WORDS)
"""All views; each adversary sees at least as much as the one before."""

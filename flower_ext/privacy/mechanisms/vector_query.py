"""Queries beside the training: each client answers by a vector; a run releases the noised sum.

To add a query, subclass `VectorQuery` as a frozen dataclass, name it among the ``queries`` of a
`ReleasePlan`, and give its class to ``client_app(queries=...)``. Bound, noise, masks, ledger and
accounting work as for every secure sum.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from flower_ext.checks import require_at_least_one, require_positive


class LocalView(Protocol):
    """The part of a client that a query may read."""

    @property
    def data(self) -> Any:
        """The client's examples (`flower_ext.data.ClientData`)."""

    def scores(self, *, training: bool) -> Mapping[str, float]:
        """Return the scores of the model that the client would use, on its test examples.

        If ``training`` is True, the loss on the client's training examples is included.
        """


@dataclass(frozen=True, kw_only=True)
class VectorQuery(ABC):
    """A query to all clients, answered by the noised sum of one vector per client.

    Parameters
    ----------
    noise_multiplier : float
        Standard deviation of the noise on the sum, divided by `norm`.
    times : int
        Planned number of releases.

    Raises
    ------
    InvalidValue
        ``noise_multiplier`` or ``times`` is not above 0.
    """

    name: ClassVar[str]
    """Name in messages, accounts and logs."""
    schedule: ClassVar[Literal["first", "in evaluations"]] = "first"
    """Time of the query: "first", before the first training round; or "in evaluations", in each
    evaluation, in place of the scores that clients report."""

    noise_multiplier: float
    times: int = 1

    def __post_init__(self) -> None:
        require_positive("noise_multiplier", self.noise_multiplier)
        require_at_least_one("times", self.times)

    @property
    @abstractmethod
    def size(self) -> int:
        """Number of elements of a client's vector."""

    @property
    @abstractmethod
    def norm(self) -> float:
        """Bound on the L2 norm of a client's vector; clients clip to it."""

    @abstractmethod
    def vector(self, client: LocalView) -> NDArray[np.float64]:
        """Return one client's vector, of shape (size,).

        If the vector cannot be computed, has a different shape or is not finite, the client sends
        zeros instead.
        """

    @abstractmethod
    def answer(self, total: NDArray[np.float64], stddev: float) -> dict[str, float]:
        """Return the released numbers by name.

        Parameters
        ----------
        total : ndarray
            The noised sum, of shape (size,).
        stddev : float
            Standard deviation of the noise on each element.
        """

    def describe(self) -> str:
        """Return a few words for the log."""
        return f"{self.name} in secure sums, noise multiplier {self.noise_multiplier:.4g}"

"""Queries in addition to training: each client sends a vector, and the run releases a noised sum.

To add a query, subclass `VectorQuery` as a frozen dataclass. Add an object of this class to the
``queries`` of a `ReleasePlan`, and pass the class to ``client_app(queries=...)``. The package then
bounds, noises, masks and counts the vectors as in every other secure sum.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from flower_ext.checks import Checked, Count, Scale
from flower_ext.errors import InvalidValue


class LocalView(Protocol):
    """The data and scores of a client that a query may read."""

    @property
    def data(self) -> Any:
        """The client's examples (`flower_ext.data.ClientData`)."""

    def scores(self, *, training: bool) -> Mapping[str, float]:
        """Return the scores of the model that the client evaluates, on the client's test examples.

        If ``training`` is True, also return the loss on the client's training examples.
        """


@dataclass(frozen=True, kw_only=True)
class VectorQuery(Checked, ABC):
    """A query to all clients; its answer is the noised sum of one vector per client.

    Parameters
    ----------
    noise_multiplier : float
        Standard deviation of the noise on the sum, divided by `norm`.
    times : int
        Planned number of releases.

    Raises
    ------
    InvalidValue
        ``noise_multiplier`` or ``times`` is not above 0, or the class has no ``name``.
    """

    name: ClassVar[str]
    """Name of the query in messages, accounts and logs."""
    schedule: ClassVar[Literal["first", "in evaluations"]] = "first"
    """Time of the query: "first" is before the first training round; "in evaluations" is in each
    evaluation, and the answer replaces the scores that clients would report."""

    noise_multiplier: Scale
    times: Count = 1

    def __post_init__(self) -> None:
        if not isinstance(getattr(self, "name", None), str):
            raise InvalidValue(
                f"{type(self).__name__} has no name: set the class attribute name, such as "
                'name = "labels"'
            )
        super().__post_init__()

    @property
    @abstractmethod
    def size(self) -> int:
        """Number of elements of a client's vector."""

    @property
    @abstractmethod
    def norm(self) -> float:
        """Bound on the L2 norm of a client's vector. The client clips its vector to this bound."""

    @abstractmethod
    def vector(self, client: LocalView) -> NDArray[np.float64]:
        """Return one client's vector, of shape (size,).

        If the vector cannot be computed, has a different shape or is not finite, the client sends
        zeros instead.
        """

    @abstractmethod
    def answer(self, total: NDArray[np.float64], stddev: float) -> dict[str, float]:
        """Compute the released numbers, by name, from the noised sum, of shape (size,).

        ``stddev`` is the standard deviation of the noise on each element. Other errors are
        not in it: if clients fail or clip their vectors, the sum is further from the exact sum, and
        the server cannot know how far. An entry ``x_error`` is the standard error of ``x``.
        """

    def describe(self) -> str:
        """Return a short description of the query, for the log."""
        return f"{self.name} in secure sums, noise multiplier {self.noise_multiplier:.4g}"

"""A silo's sum of one round. The silo sends it even if its updates cannot be encrypted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from logging import getLogger
from typing import Any, Protocol

from numpy.typing import NDArray

from flower_ext.errors import ProtocolError

log = getLogger("flwr")


class SiloSum(Protocol):
    """A silo's sum of one round. Users' updates may be added as soon as they are trained."""

    def add(self, updates: Mapping[int, NDArray[Any]]) -> None:
        """Add clipped updates, each of shape (coordinates,), by user.

        Every user must have records in this silo, and may be added once.

        Raises
        ------
        ValueError
            A user has no records in this silo, a shape is wrong, or a value is not finite or out of
            bounds.
        """
        ...

    def finish(self, noise: NDArray[Any]) -> bytes:
        """Return the masked sum with this silo's share of the noise, and mark the round as used.

        If a user has records in this silo but nobody added its update, its update counts as zero.

        Raises
        ------
        ProtocolError, ValueError
            The weights are malformed, the noise is out of bounds, or a later round was used
            meanwhile. Nothing has left the silo then, and the round is unused.
        """
        ...


class SumOrZeros:
    """A silo's sum of one round. If an update cannot be encrypted, all updates count as zero.

    If the silo sent nothing instead, it would reveal that it holds an unusual record.

    Parameters
    ----------
    begin : Callable[[], SiloSum]
        Function that returns an empty sum of the round. It is called again if the first sum fails.
    """

    def __init__(self, begin: Callable[[], SiloSum]) -> None:
        self._begin, self._sum = begin, begin()
        self._error: Exception | None = None

    def add(self, updates: Mapping[int, NDArray[Any]]) -> None:
        """Add clipped updates, by user. Store an error instead of raising it.

        `finish` handles the error. Several silos may train in one batch, so an exception here would
        end the work of the other silos.
        """
        try:
            if self._error is None:
                self._sum.add(updates)
        except Exception as error:
            self._error = error

    def finish(self, noise: NDArray[Any]) -> bytes:
        """Return the masked sum with this silo's noise.

        Raises
        ------
        ProtocolError
            As `SiloSum.finish`.
        Exception
            Even a sum of zeros fails, so the updates are not the cause.
        """
        try:
            if self._error is not None:
                raise self._error
            return self._sum.finish(noise)
        except ProtocolError:
            raise
        except Exception as error:
            log.warning(
                "the updates of this silo cannot be encrypted (%s), so this silo adds zeros to "
                "the sum: check this silo's data and memory",
                type(error).__name__,
                exc_info=error,
            )
            # A fresh sum replaces the first one, which never leaves the silo.
            return self._begin().finish(noise)

"""A silo's end of a weighted sum: what it adds to the sum of a round.

`weighted` has the server's end and a table of all messages, and `weighted_setup` the silo's set-up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar, NoReturn

import numpy as np
import torch

from flower_ext.errors import InvalidValue, ProtocolError
from flower_ext.federation import records
from flower_ext.federation.records import Arrays, arrays_of, flattened, single_message
from flower_ext.federation.state.memory import ClientVault
from flower_ext.federation.sums.weighted import LOST, SUM, WEIGHTS
from flower_ext.federation.sums.weighted_setup import protocol_errors, stored_silo
from flower_ext.privacy.mechanisms.bounds import ArraysMap, clip_each_row
from flower_ext.privacy.mechanisms.updates import NamedArrays
from flower_ext.secure.weighting.silo_sum import SumOrZeros
from flower_ext.training import Params
from flower_ext.training.params import flat_rows

if TYPE_CHECKING:  # it needs the extra ``weighting``
    from flower_ext.secure.weighting.silo_party import SiloParty


@dataclass(frozen=True, kw_only=True)
class HiddenSum:
    """A sum over units that leaves the client only in encrypted form.

    Parameters
    ----------
    bound : float
        Largest L2 distance by which one unit can move the sum, as in `BoundedSum`.
    like : Params
        Names and shapes of the sum.
    encrypt : Callable[[Params], Mapping[str, np.ndarray]]
        Function that takes this client's share of the noise, in float64, and returns the upload:
        the sum plus the noise, as encrypted integer multiples of a public step. Pass the noise
        unrounded. The function rounds it to multiples of the step; noise that was already rounded
        to a coarser grid would not hide multiples of the step between the grid's points.
    """

    bound: float
    like: Params
    encrypt: Callable[[Params], Mapping[str, np.ndarray]]
    cell: ClassVar[None] = None

    def noised(self, add_noise: ArraysMap, draw_noise: ArraysMap) -> NamedArrays:
        """Return the encrypted sum of the units and one client's share of the noise."""
        zeros = {n: torch.zeros_like(p, dtype=torch.float64) for n, p in self.like.items()}
        return self.encrypt(dict(draw_noise(zeros)))

    def in_numbers(self) -> NoReturn:
        """Refuse to return the sum, because it leaves the client only in encrypted form."""
        raise InvalidValue.tellable(
            "diagnostics=True: expected False, because the client encrypts its sum"
        )


def open_part(
    message: Arrays | None,
    vault: ClientVault,
    number: int,
    users: int,
    clipping_norm: float,
    like: Params,
) -> SiloPart | LostPart | None:
    """Begin this silo's contribution to the weighted sum of round ``number``.

    Return a `SiloPart`, to which updates are added; or a `LostPart` if this silo has lost its keys.
    Return None if ``message`` is None, because the method then weights the users itself.

    Parameters
    ----------
    message : Mapping[str, ndarray], optional
        The arrays of the server's request that concern the weighted sum.
    users : int
        Number of users over all silos.
    like : Params
        Names and shapes of an update.

    Raises
    ------
    ProtocolError
        The silo has contributed to the round before, or ``users`` differs from the set-up.
    """
    if message is None:
        return None
    if (silo := stored_silo(vault)) is None:
        return LostPart(clipping_norm, like)
    with protocol_errors():
        _, weights = single_message(message, WEIGHTS)
        if users != silo.settings.users:
            raise ProtocolError(
                f"the server asks for a round with {users} users: expected {silo.settings.users}, "
                "the number of users in the set-up"
            )
        return SiloPart(silo, number, weights, clipping_norm, like)


class LostPart:
    """The contribution of a silo that has lost its keys: a notice to the server, and no sum."""

    def __init__(self, clipping_norm: float, like: Params) -> None:
        lost = {LOST: np.zeros(1, dtype=np.uint8)}
        self.value = HiddenSum(bound=clipping_norm, like=like, encrypt=lambda noise: lost)

    def counts(self, user: int) -> bool:
        """Return False, because a silo without keys adds no user's update."""
        return False

    def add(self, users: Sequence[int], rows: Params) -> None:
        """Add nothing."""


class SiloPart:
    """A silo's contribution to a round: one clipped update of each user whom the set-up counted.

    A silo that lost its data, or whose users came or left after the set-up, still sends a sum. In
    it, the update of a user without records is zero.

    Parameters
    ----------
    silo : SiloParty
    number : int
        Number of the round.
    weights : bytes
        The server's message of the round.
    clipping_norm : float
    like : Params
        Names and shapes of an update.
    """

    def __init__(
        self, silo: SiloParty, number: int, weights: bytes, clipping_norm: float, like: Params
    ) -> None:
        self._norm, self._like, self._counted = clipping_norm, like, frozenset(silo.counted)
        self._sum = SumOrZeros(partial(silo.open_sum, number, weights))

    @property
    def value(self) -> HiddenSum:
        """The sum so far; its ``encrypt`` is `seal`, which adds noise and masks."""
        return HiddenSum(bound=self._norm, like=self._like, encrypt=self.seal)

    def counts(self, user: int) -> bool:
        """Return True if the set-up counted the user; the weight of any other user is zero."""
        return user in self._counted

    def add(self, users: Sequence[int], rows: Params) -> None:
        """Clip one row of ``rows`` for each of ``users``, and add the rows to the sum."""
        clipped = clip_each_row(rows, self._norm)
        vectors = torch.cat([flat_rows(clipped[name]) for name in sorted(clipped)], dim=1)
        self._sum.add(dict(zip(users, vectors.cpu().numpy(), strict=True)))

    def seal(self, noise: Params) -> Arrays:
        """Return the masked sum with this silo's noise.

        Raises
        ------
        ProtocolError
            The silo has contributed to the round before.
        """
        with protocol_errors():
            masked = self._sum.finish(flattened(arrays_of(noise)))
        return {SUM: records.to_bytes_array(masked)}

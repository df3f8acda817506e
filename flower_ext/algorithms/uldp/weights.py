"""The weights of users in silos: where they come from, and the check that the guarantee rests on.

Source: Kato et al., Uldp-FL (PVLDB 2024), Section 4.1.

====================  =====================================================
paper                 here
====================  =====================================================
w_{s,u}               ``WeightSource.of_users``, a row a silo
n_{s,u}, N_u          ``histogram``, its sums over silos
====================  =====================================================

One user moves the sum over silos by Σ_s w_{s,u} clipping norms. What is sent to the silos is
checked, in every round, whatever source it comes from.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.serverapp import Grid

from flower_ext.data import ClientData, SiloData
from flower_ext.errors import InvalidValue, knowing_no_data, tellable
from flower_ext.federation import ClientWork, FederatedStrategy, Question, RefusedReply, records
from flower_ext.privacy.theorems.uldp import Weighting
from flower_ext.training import Params

USERS = "users"
"""Record of a round's users and one silo's weights; also the setting that tells their number."""
SAMPLED = "sampled"
WEIGHTS = "weights"
HISTOGRAM = "histogram"
MOST_RECORDS = 2**40
"""Records that one user may have in one silo: sums over silos stay exact."""
MOST_USERS = 2**24
"""Users that a silo makes room for, whatever number a server names."""
_ROUNDING = 1e-13
"""Far below the room that clipping leaves for the rounding of norms."""


class WeightSource(Protocol):
    """Where the weights come from. Another one changes nothing else.

    Attributes
    ----------
    weighting : {"equal", "by-records"}
        How the guarantee counts single uploads.
    needs_histogram : bool
        Whether silos tell the server how many records each user has.
    shown : Sequence[str]
        What the source shows to whom, outside any guarantee.
    """

    weighting: Weighting
    needs_histogram: bool
    shown: Sequence[str]

    def prepare(self, histogram: np.ndarray | None, num_silos: int) -> None:
        """Once, before the first round; the histogram (silos, users) where it is needed."""
        ...

    def of_users(self, users: Sequence[int]) -> np.ndarray:
        """Weights (silos, users), or (silos, 1) where all users have the same."""
        ...


class EqualWeights:
    """w_{s,u} = 1/|S|: no silo tells anything."""

    weighting: Weighting = "equal"
    needs_histogram = False
    shown: Sequence[str] = ()

    def __init__(self) -> None:
        self._num_silos = 0

    def prepare(self, histogram: np.ndarray | None, num_silos: int) -> None:
        """Remember how many silos there are."""
        self._num_silos = num_silos

    def of_users(self, users: Sequence[int]) -> np.ndarray:
        """1/|S| (silos, 1)."""
        return np.full((self._num_silos, 1), 1 / self._num_silos)


class WeightsByRecords:
    """w_{s,u} = n_{s,u}/N_u, 0 for a user without records; computed by the server in the clear."""

    weighting: Weighting = "by-records"
    needs_histogram = True
    shown: Sequence[str] = (
        "how many records each user has in each silo: the silos tell the server",
        "which share of each of its users' records a silo has: the server tells the silo",
    )

    def __init__(self) -> None:
        self._weights = np.empty((0, 0))

    def prepare(self, histogram: np.ndarray | None, num_silos: int) -> None:
        """Divide by the users' numbers of records."""
        assert histogram is not None
        self._weights = histogram / np.maximum(histogram.sum(axis=0), 1)

    def of_users(self, users: Sequence[int]) -> np.ndarray:
        """n_{s,u}/N_u (silos, users)."""
        return self._weights[:, np.asarray(users, dtype=np.int64)]


def weight_source(weighting: Weighting | WeightSource) -> WeightSource:
    """The source of a name, or the given one.

    Raises
    ------
    ValueError
        Unknown name.
    """
    if not isinstance(weighting, str):
        return weighting
    sources: dict[str, type[WeightSource]] = {
        "equal": EqualWeights,
        "by-records": WeightsByRecords,
    }
    if weighting not in sources:
        raise InvalidValue(
            f"weighting={weighting!r}: expected {', '.join(sources)}, or a WeightSource"
        )
    return sources[weighting]()


def check_weights(
    weights: np.ndarray,
    num_silos: int,
    users: Sequence[int],
    weighting: Weighting = "by-records",
) -> None:
    """Refuse weights by which one user could move the sum by more than the clipping norm.

    Equal weights are accounted as 1/|S| in single uploads, so none of them may be larger.

    Raises
    ------
    ValueError
        Another shape than (silos, users) or (silos, 1); a weight that is not in [0, 1], or above
        1/|S| where weights are equal; or a user whose weights sum to more than 1.
    """
    if weights.shape not in ((num_silos, len(users)), (num_silos, 1)):
        raise InvalidValue(
            f"weights of shape {weights.shape}: expected ({num_silos}, {len(users)}), one a silo "
            "and user"
        )
    if not ((weights >= 0) & (weights <= 1)).all():  # NaN is neither
        raise InvalidValue("weights: expected numbers in [0, 1]")
    if weighting == "equal" and (weights > (1 + _ROUNDING) / num_silos).any():
        raise InvalidValue(
            f"weights up to {weights.max():.6g}: expected at most 1/{num_silos}, as the source "
            "says that they are equal, or one user moves a single upload by more than is counted"
        )
    sums = weights.sum(axis=0)
    if (sums > 1 + _ROUNDING).any():
        worst = int(sums.argmax())
        whose = f"user {users[worst]}" if len(sums) == len(users) else "every user"
        raise InvalidValue(
            f"weights of {whose} sum to {sums[worst]:.6g} over the silos: expected at most 1, "
            "or one user moves the sum by more than the clipping norm"
        )


# What travels ------------------------------------------------------------------------------


def users_records(weights: np.ndarray, users: Sequence[int], num_users: int) -> list[ArrayRecord]:
    """For each silo the round's users, one bit each, and their weights in this silo."""
    chosen = np.zeros(num_users, dtype=bool)
    chosen[np.asarray(users, dtype=np.int64)] = True
    bits = np.packbits(chosen)
    return [records.to_record({SAMPLED: bits, WEIGHTS: row}) for row in weights]


def read_weights(work: ClientWork) -> np.ndarray:
    """w_{s,u} of this silo in this round for every user; 0 for those who are not sampled.

    Raises
    ------
    ValueError
        A weight is not in [0, 1], or there are more or fewer than sampled users.
    """
    with knowing_no_data():
        num_users, sent = int(work.settings[USERS]), work.state[USERS]
        bits, own = sent[SAMPLED].numpy(), sent[WEIGHTS].numpy()
        if bits.shape != (-(-num_users // 8),):
            raise InvalidValue(f"sampled users: expected {num_users} bits, got {bits.size} bytes")
        users = np.flatnonzero(np.unpackbits(bits, count=num_users))
        check_weights(own[np.newaxis], 1, users.tolist())
        weights = np.zeros(num_users)
        weights[users] = own
        return weights


def owned(data: ClientData, num_users: int) -> SiloData:
    """The silo's data, whose records have owners.

    Raises
    ------
    ValueError
        There are no owners, or one is out of range; or ``num_users`` is.
    """
    if not 1 <= num_users <= MOST_USERS:
        raise tellable(InvalidValue(f"{num_users} users: expected 1 … {MOST_USERS}"))
    if not isinstance(data, SiloData):
        raise tellable(
            InvalidValue(
                "data of the Task: expected SiloData, whose owners say which user each training "
                "example belongs to"
            )
        )
    if len(data.owners) and int(data.owners.max()) >= num_users:
        raise InvalidValue(
            f"owners: expected users 0 … {num_users - 1}, as the plan's population is "
            f"{num_users}, and one is {int(data.owners.max())}"
        )
    return data


def answer(question: Question) -> Params:
    """How many records each user has here, where the server asks; else only that all is well."""
    num_users = int(question.asked[USERS])
    owners = owned(question.data, num_users).owners
    if not question.asked[HISTOGRAM]:
        return {}
    return {HISTOGRAM: torch.bincount(owners.cpu().long(), minlength=num_users)}


def ask_silos(
    strategy: FederatedStrategy, grid: Grid, num_users: int, *, histogram: bool
) -> np.ndarray | None:
    """Whether every silo can take part and, if asked, n_{s,u} as int64 (silos, users).

    Raises
    ------
    FederationNotReady
        A silo cannot: it has no owners, or a user out of range; the message says which.
    """
    question = ConfigRecord({USERS: num_users, HISTOGRAM: histogram})
    if not histogram:
        strategy.exchange.ask_everyone(grid, question, records.read_answer)
        return None
    told = strategy.exchange.ask_everyone(
        grid, question, lambda reply: _read_counts(reply, num_users)
    )
    return np.stack([told[silo] for silo in sorted(told)])


def ask_company(strategy: FederatedStrategy, grid: Grid) -> dict[int, bool]:
    """Ask each silo whether its users train one by one; the answer rests on its machine alone.

    Raises
    ------
    FederationNotReady
        A silo does not answer.
    """
    trainings = records.training_records(strategy.training)
    content = {records.COMPANY: ConfigRecord(), **trainings}
    everyone = dict.fromkeys(range(strategy.population.num_nodes), content)
    return dict(sorted(strategy.exchange.query(grid, everyone, _read_company).items()))


def _read_company(reply: Message) -> bool:
    told = records.read_answer(reply)
    if set(told) != {records.COMPANY} or told[records.COMPANY].shape != ():
        raise RefusedReply(f"arrays {sorted(told)}: expected {records.COMPANY!r} alone, one number")
    return bool(told[records.COMPANY])


def _read_counts(reply: Message, num_users: int) -> np.ndarray:
    told = records.read_answer(reply)
    if set(told) != {HISTOGRAM}:
        raise RefusedReply(f"arrays {sorted(told)}: expected {HISTOGRAM!r} alone")
    counts = told[HISTOGRAM]
    if counts.shape != (num_users,) or counts.dtype.kind not in "iu":
        raise RefusedReply(f"{HISTOGRAM!r}: expected {num_users} integers")
    if not 0 <= counts.min() <= counts.max() <= MOST_RECORDS:
        raise RefusedReply(f"{HISTOGRAM!r}: expected numbers of records, 0 … 2^40")
    return counts.astype(np.int64)

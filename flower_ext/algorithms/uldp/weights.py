"""The weights of users in silos, and the check that the guarantee relies on.

Source: Kato et al., Uldp-FL (PVLDB 2024), Section 4.1.

====================  =====================================================
paper                 here
====================  =====================================================
w_{s,u}               `user_weights`, one row per silo
n_{s,u}, N_u          ``histogram``, its sums over silos
====================  =====================================================

User u moves the sum over silos by at most Σ_s w_{s,u} clipping norms. The server checks the weights
that it sends to the silos in every round.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from flower_ext.errors import InvalidValue, knowing_no_data
from flower_ext.federation import Arrays, ClientWork
from flower_ext.privacy import PoissonSampling
from flower_ext.privacy.theorems.uldp_theorem import Weighting

NUM_USERS = "num-users"
"""Name of the setting with the number of users, |U|."""
USER_WEIGHTS = "user-weights"
"""Name of the group with a round's users and their weights in one silo."""
SAMPLED = "sampled"
"""Name of the array in this group with a bit per user, set if the user takes part."""
WEIGHTS = "weights"
"""Name of the array in this group with a weight for each user that takes part."""
RATE = "user-sampling-rate"
"""Name of the setting with q, if the silos draw the users; missing if the server draws them."""
DISCLOSURES: Mapping[Weighting, Sequence[str]] = {
    "equal": (),
    "by-records": (
        "how many records each user has in each silo: the silos tell the server",
        "which fraction of each of its users' records a silo has: the server tells the silo",
    ),
}
"""Facts that unencrypted weights reveal, and to whom. No guarantee covers them."""
_ROUNDING = 1e-13
"""Tolerance for rounding in the checks of weights, far below the tolerance of clipping."""


def user_weights(weighting: Weighting, histogram: np.ndarray) -> np.ndarray:
    """Return the weights w_{s,u}.

    If ``weighting`` is "equal", every weight is 1/|S|, and the result has shape (silos, 1). The
    function then uses only the number of rows of ``histogram``. If ``weighting`` is "by-records",
    ``histogram`` holds n_{s,u}, and the weights are n_{s,u}/N_u. Both have shape (silos, users). A
    user without records has weight 0.
    """
    if weighting == "equal":
        return np.full((len(histogram), 1), 1 / len(histogram))
    return np.asarray(histogram / np.maximum(histogram.sum(axis=0), 1))


def check_weights(
    weights: np.ndarray, num_silos: int, users: Sequence[int], weighting: Weighting = "by-records"
) -> None:
    """Refuse weights with which one user could move the sum by more than the clipping norm.

    The shape is (silos, users), or (silos, 1) if all users have the same weights. If ``weighting``
    is "equal", refuse also every weight above 1/|S|, because the guarantee assumes that a user
    moves a single upload by at most 1/|S| clipping norms.
    """
    if weights.shape not in ((num_silos, len(users)), (num_silos, 1)):
        raise InvalidValue(
            f"weights of shape {weights.shape}: expected ({num_silos}, {len(users)}), one weight "
            "per silo and user"
        )
    if not ((weights >= 0) & (weights <= 1)).all():  # NaN is neither
        raise InvalidValue("weights: expected numbers in [0, 1]")
    if weighting == "equal" and (weights > (1 + _ROUNDING) / num_silos).any():
        raise InvalidValue(
            f"weights up to {weights.max():.6g} with weighting='equal': expected at most "
            f"1/{num_silos}, because ε assumes that a user moves an upload by at most C/{num_silos}"
        )
    sums = weights.sum(axis=0)
    if (sums > 1 + _ROUNDING).any():
        worst = int(sums.argmax())
        whose = f"user {users[worst]}" if len(sums) == len(users) else "every user"
        raise InvalidValue(
            f"weights of {whose} sum to {sums[worst]:.6g} over the silos: expected at most 1, "
            "because a user could otherwise move the sum by more than the clipping norm"
        )


def users_groups(weights: np.ndarray, users: Sequence[int], num_users: int) -> list[Arrays]:
    """Return a group per silo: a bit per user, set if it takes part, and the weights."""
    chosen = np.zeros(num_users, dtype=bool)
    chosen[np.asarray(users, dtype=np.int64)] = True
    bits = np.packbits(chosen)
    return [{SAMPLED: bits, WEIGHTS: row} for row in weights]


def weights_of_round(work: ClientWork) -> np.ndarray:
    """Return the weight of each user in this silo in a round, of shape (users,).

    The weight of a user that does not take part is 0. If the silos draw the users, this function
    draws them. A round for which this silo has already drawn then raises a `ProtocolError`.
    """
    with knowing_no_data():
        num_users, sent = int(work.settings[NUM_USERS]), work.state[USER_WEIGHTS]
        bits, of_sampled = sent[SAMPLED].numpy(), sent[WEIGHTS].numpy()
        if bits.shape != (-(-num_users // 8),):
            raise InvalidValue(f"sampled users: expected a bit for each of {num_users} users")
        users = np.flatnonzero(np.unpackbits(bits, count=num_users))
        check_weights(of_sampled[np.newaxis], 1, users.tolist())
        weights = np.zeros(num_users)
        weights[users] = of_sampled
        if RATE in work.settings:  # the server listed all users, and the silos draw among them
            drawn = work.draw_users(PoissonSampling(num_users, work.settings[RATE]))
            weights[np.setdiff1d(users, drawn)] = 0.0
        return weights

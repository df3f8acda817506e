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

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message

from flower_ext.data.users import owned
from flower_ext.errors import InvalidValue, knowing_no_data
from flower_ext.federation import Clients, ClientWork, Question, RefusedReply, records
from flower_ext.federation.client.user_draws import FINGERPRINT_BYTES
from flower_ext.federation.replies import read_answer
from flower_ext.federation.roster import FederationNotReady
from flower_ext.privacy import PoissonSampling
from flower_ext.privacy.theorems.uldp import Weighting
from flower_ext.training import LocalTraining, Params, trains_one_by_one

USERS = "users"
"""Name of the `ArrayRecord` with a round's users and a silo's weights, and of the setting |U|."""
SAMPLED = "sampled"
WEIGHTS = "weights"
HISTOGRAM, ONE_BY_ONE, FINGERPRINT = "histogram", "one-by-one", "draw-fingerprint"
RATE = "user-sampling-rate"
"""Name of the setting with q, if the silos draw the users; missing if the server draws them."""
MOST_RECORDS = 2**40
"""Largest number of records of one user in one silo, so that sums over silos stay exact."""
DISCLOSURES: Mapping[Weighting, Sequence[str]] = {
    "equal": (),
    "by-records": (
        "how many records each user has in each silo: the silos tell the server",
        "which share of each of its users' records a silo has: the server tells the silo",
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


def users_records(weights: np.ndarray, users: Sequence[int], num_users: int) -> list[ArrayRecord]:
    """Return an `ArrayRecord` per silo: a bit per user, set if it takes part, and the weights."""
    chosen = np.zeros(num_users, dtype=bool)
    chosen[np.asarray(users, dtype=np.int64)] = True
    bits = np.packbits(chosen)
    return [records.to_record({SAMPLED: bits, WEIGHTS: row}) for row in weights]


def read_weights(work: ClientWork) -> np.ndarray:
    """Return the weight of each user in this silo, of shape (users,).

    The weight of a user that does not take part in this round is 0. If the silos draw the users, a
    round for which this silo has already drawn raises a `ProtocolError`.
    """
    with knowing_no_data():
        num_users, sent = int(work.settings[USERS]), work.state[USERS]
        bits, of_sampled = sent[SAMPLED].numpy(), sent[WEIGHTS].numpy()
        if bits.shape != (-(-num_users // 8),):
            raise InvalidValue(f"sampled users: expected {num_users} bits, got {bits.size} bytes")
        users = np.flatnonzero(np.unpackbits(bits, count=num_users))
        check_weights(of_sampled[np.newaxis], 1, users.tolist())
        weights = np.zeros(num_users)
        weights[users] = of_sampled
        if RATE in work.settings:
            drawn = work.draw_users(PoissonSampling(num_users, work.settings[RATE]))
            weights[np.setdiff1d(users, drawn)] = 0.0
        return weights


def answer_server(question: Question) -> Params:
    """Tell the server whether this silo would train its users one by one instead of in batches.

    The silo sends two further facts only if the server asks for them: each user's number of
    records, and the fingerprint of the key from which silos draw users.
    """
    num_users, examples = int(question.values[USERS]), question.data.train
    owners = owned(question.data, num_users).owners
    apart = len(examples) > 0 and any(
        trains_one_by_one(question.task, examples, training)
        for training in question.training.values()
    )
    answer = {ONE_BY_ONE: torch.tensor(int(apart))}
    if question.values[HISTOGRAM]:
        answer[HISTOGRAM] = torch.bincount(owners.cpu().long(), minlength=num_users)
    if question.values[FINGERPRINT]:
        answer[FINGERPRINT] = torch.tensor([*question.draw_fingerprint()], dtype=torch.uint8)
    return answer


def ask_silos(
    clients: Clients,
    num_users: int,
    *,
    trainings: Mapping[str, LocalTraining],
    histogram: bool,
    silos_draw: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    """Ask each silo whether it trains its users one by one, and how many records each user has.

    Parameters
    ----------
    trainings : Mapping[str, LocalTraining]
        Trainings to ask about. The answer depends on the silo's machine.
    histogram : bool
        True to ask for the numbers of records as well.
    silos_draw : bool
        True to check that all silos draw the same users in each round.

    Returns
    -------
    numpy.ndarray
        bool (silos,): True for a silo that trains its users one by one.
    numpy.ndarray
        n_{s,u} as int64 (silos, users); of shape (silos, 0) without ``histogram``.

    Raises
    ------
    FederationNotReady
        A silo's data do not name the user of each record, a user's number is out of range, or
        silos that draw the users have different keys. The message names the silo.
    """
    question = ConfigRecord({USERS: num_users, HISTOGRAM: histogram, FINGERPRINT: silos_draw})
    content = {records.QUESTION: question, **records.training_records(trainings)}
    answers = clients.ask_all(
        dict.fromkeys(clients.nodes, content),
        lambda reply: _read_answer(reply, num_users if histogram else 0, silos_draw),
    )
    one_by_one, counts, keys = zip(*(answers[silo] for silo in sorted(answers)), strict=True)
    for silo, key in zip(sorted(answers), keys, strict=True):
        if key != keys[0]:
            raise FederationNotReady(
                f"silos {min(answers)} and {silo} would draw different users, because their keys "
                "or their versions of NumPy differ: give all silos the same key, which "
                "`flower-ext link key` writes, and the same version of NumPy"
            )
    return np.array(one_by_one), np.stack(counts)


def _read_answer(
    reply: Message, num_users: int, silos_draw: bool
) -> tuple[bool, np.ndarray, bytes]:
    arrays = read_answer(reply)
    optional = {HISTOGRAM: num_users > 0, FINGERPRINT: silos_draw}
    expected = {ONE_BY_ONE, *(name for name, is_expected in optional.items() if is_expected)}
    if set(arrays) != expected or arrays[ONE_BY_ONE].shape != ():
        raise RefusedReply(f"arrays {sorted(arrays)}: expected {sorted(expected)}")
    if arrays[ONE_BY_ONE].dtype.kind not in "biu":
        raise RefusedReply(f"{ONE_BY_ONE!r}: expected true or false")
    counts = arrays.get(HISTOGRAM, np.empty(0, dtype=np.int64))
    if counts.shape != (num_users,) or counts.dtype.kind not in "iu":
        raise RefusedReply(f"{HISTOGRAM!r}: expected {num_users} integers")
    if not 0 <= counts.min(initial=0) <= counts.max(initial=0) <= MOST_RECORDS:
        raise RefusedReply(f"{HISTOGRAM!r}: expected numbers of records from 0 to 2^40")
    key = arrays.get(FINGERPRINT, np.empty(0, dtype=np.uint8))
    if key.dtype != np.uint8 or key.shape != ((FINGERPRINT_BYTES,) if silos_draw else (0,)):
        raise RefusedReply(f"{FINGERPRINT!r}: expected {FINGERPRINT_BYTES} bytes")
    return bool(arrays[ONE_BY_ONE]), counts.astype(np.int64), key.tobytes()

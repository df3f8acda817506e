"""The silos' answers before the first round: whose records they hold, and how they draw users."""

import numpy as np
import torch

from flower_ext.algorithms.uldp.weights import NUM_USERS
from flower_ext.data.users import owned
from flower_ext.federation import Arrays, Connected, Question, RefusedReply
from flower_ext.federation.client.user_draws import FINGERPRINT_BYTES
from flower_ext.federation.messages.roster import FederationNotReady
from flower_ext.training import Params

HISTOGRAM, FINGERPRINT = "histogram", "draw-fingerprint"
MOST_RECORDS = 2**40
"""Largest number of records of one user in one silo, so that sums over silos stay exact."""


def answer_server(question: Question) -> Params:
    """Check that each record has a user, and return the arrays for which the server asks.

    The arrays hold each user's number of records, and the fingerprint of the key from which silos
    draw users. If the server asks for neither, the answer is empty and reveals nothing, not even
    whether the silo has a record.
    """
    num_users = int(question.values[NUM_USERS])
    owners = owned(question.data, num_users).owners
    answer = {}
    if question.values[HISTOGRAM]:
        answer[HISTOGRAM] = torch.bincount(owners.cpu().long(), minlength=num_users)
    if question.values[FINGERPRINT]:
        answer[FINGERPRINT] = torch.tensor([*question.draw_fingerprint()], dtype=torch.uint8)
    return answer


def ask_silos(
    connected: Connected, num_users: int, *, histogram: bool, silos_draw: bool = False
) -> np.ndarray:
    """Ask each silo to check its records' users and, with ``histogram``, to count the records.

    Parameters
    ----------
    histogram : bool
        True to ask for the numbers of records.
    silos_draw : bool
        True to check that all silos draw the same users in each round.

    Returns
    -------
    numpy.ndarray
        Numbers of records as int64 (silos, users); of shape (silos, 0) without ``histogram``.

    Raises
    ------
    FederationNotReady
        A silo's data do not name the user of each record, a user's number is out of range, or
        silos that draw the users have different keys. The message names the silo.
    """
    answers = connected.ask(
        {NUM_USERS: num_users, HISTOGRAM: histogram, FINGERPRINT: silos_draw},
        lambda arrays: read_silo_answer(arrays, num_users if histogram else 0, silos_draw),
    )
    counts, keys = zip(*(answers[silo] for silo in sorted(answers)), strict=True)
    for silo, key in zip(sorted(answers), keys, strict=True):
        if key != keys[0]:
            raise FederationNotReady(
                f"silos {min(answers)} and {silo} would draw different users, because their keys "
                "or their versions of NumPy differ: give all silos the same key, which "
                "`flower-ext link key` writes, and the same version of NumPy"
            )
    return np.stack(counts)


def read_silo_answer(arrays: Arrays, num_users: int, silos_draw: bool) -> tuple[np.ndarray, bytes]:
    """Return a silo's counts and its key's fingerprint; each is empty if it was not requested."""
    optional = {HISTOGRAM: num_users > 0, FINGERPRINT: silos_draw}
    expected = {name for name, is_expected in optional.items() if is_expected}
    if set(arrays) != expected:
        raise RefusedReply(f"arrays {sorted(arrays)}: expected {sorted(expected)}")
    counts = arrays.get(HISTOGRAM, np.empty(0, dtype=np.int64))
    if counts.shape != (num_users,) or counts.dtype.kind not in "iu":
        raise RefusedReply(f"{HISTOGRAM!r}: expected {num_users} integers")
    if not 0 <= counts.min(initial=0) <= counts.max(initial=0) <= MOST_RECORDS:
        raise RefusedReply(f"{HISTOGRAM!r}: expected numbers of records from 0 to 2^40")
    key = arrays.get(FINGERPRINT, np.empty(0, dtype=np.uint8))
    if key.dtype != np.uint8 or key.shape != ((FINGERPRINT_BYTES,) if silos_draw else (0,)):
        raise RefusedReply(f"{FINGERPRINT!r}: expected {FINGERPRINT_BYTES} bytes")
    return counts.astype(np.int64), key.tobytes()

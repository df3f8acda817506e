"""A silo's side of a weighted sum: the set-up, then training, clipping and encryption.

Each protocol has its own set-up and encryption. They are the `SiloEnd` in the protocol's module in
`weighting`, which this module calls.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from logging import getLogger

import numpy as np

from flower_ext.algorithms.uldp.silo_training import (
    CLIPPING_NORM,
    SiloJob,
    silo_job,
    users_updates,
)
from flower_ext.algorithms.uldp.weighting.protocol import (
    BEGIN,
    LOST,
    PROTOCOL,
    STEP,
    SUM,
    WEIGHTED,
    Arrays,
    SiloEnd,
    SiloSum,
    load_protocol,
)
from flower_ext.algorithms.uldp.weighting.silo_store import StoredSilo
from flower_ext.algorithms.uldp.weights import USERS, owned
from flower_ext.errors import InvalidValue, tellable
from flower_ext.federation import (
    ClientVault,
    ClientWork,
    HiddenSum,
    LocalResult,
    Question,
    Steps,
    Training,
    records,
)
from flower_ext.privacy.mechanisms.bounds import clip_each_row
from flower_ext.secure import ProtocolError
from flower_ext.training import Params, Task

log = getLogger("flwr")


def is_weighted(work: ClientWork) -> bool:
    """Return True if the server asks for a part of a weighted sum."""
    return WEIGHTED in work.state


def is_step(question: Question) -> bool:
    """Return True if the server asks for a step of a weighted sum's protocol."""
    return STEP in question.asked


def answer(question: Question) -> Arrays:
    """Take this silo's part of the set-up, or of a secret draw: one step per message."""
    with _protocol():
        silo = resume(question.vault)
        if question.asked[STEP] == BEGIN:
            if silo is not None and silo.run == question.asked.get("run"):
                raise ProtocolError("the set-up of this run began before: expected a new run")
            return _end_of(str(question.asked[PROTOCOL])).begin(question)
        if silo is None:
            lost = f"silo {question.partition} has lost its keys: start the run anew"
            raise ProtocolError(lost)
        return silo.answer(question)


def resume(vault: ClientVault) -> SiloEnd | None:
    """Return the silo as it was stored last, under any protocol; None if none was stored."""
    stored = vault.load()
    return None if stored is None else _end_of(StoredSilo.read(stored).protocol).resume(vault)


def _end_of(protocol: str) -> type[SiloEnd]:
    try:
        return load_protocol(protocol).silo_end
    except InvalidValue as error:
        raise ProtocolError(str(error)) from error


@contextmanager
def _protocol() -> Iterator[None]:
    """Let the server see errors of the protocol, which depend only on steps, rounds and silos."""
    try:
        yield
    except ProtocolError as error:
        raise tellable(error) from None


@dataclass(kw_only=True)
class HiddenJob(SiloJob):
    """The trainings of a silo's users; their clipped updates go into one encrypted sum."""

    into: Adding


class Adding:
    """Open sum of one update for each user whom the silo counted in the set-up.

    A user without an update here counts as zero: silos that lost their data, or whose users came
    or left since the set-up, still send a sum. So do those that cannot encrypt their updates. A
    missing sum would tell everybody that a record here is odd.

    Parameters
    ----------
    begin : Callable[[], SiloSum]
        Begins the sum of the round; a second sum may replace the first one, which never leaves.
    users : Collection[int]
        The counted users. Updates of others are left out, as their weight is zero.
    """

    def __init__(self, begin: Callable[[], SiloSum], users: Collection[int]) -> None:
        self._begin, self._into = begin, begin()
        self._users, self._missing = users, set(users)
        self._error: Exception | None = None
        self.seconds = 0.0

    def __call__(self, updates: Mapping[int, np.ndarray]) -> None:
        """Add updates by user, each user's once; `finish` deals with errors.

        Several silos may train in one batch, and an error of one must not end the others.
        """
        started = time.monotonic()
        chosen = {user: update for user, update in updates.items() if user in self._missing}
        self._missing -= chosen.keys()
        try:
            if self._error is None:
                self._into.add(chosen)
        except Exception as error:
            self._error = error
        self.seconds += time.monotonic() - started

    def finish(self, noise: np.ndarray) -> bytes:
        """Return the masked sum, of zeros if the updates cannot be added or encrypted.

        Raises
        ------
        ProtocolError
            The round was used before.
        Exception
            Zeros cannot be encrypted either, which is not due to the updates.
        """
        started = time.monotonic()
        try:
            if self._error is not None:
                raise self._error
            masked = self._finished(self._into, self._missing, noise)
        except ProtocolError:
            raise
        except Exception as error:
            log.warning(
                "the updates of this silo cannot be encrypted (%s), so they all count as zero: "
                "check this silo's data and memory",
                type(error).__name__,
                exc_info=error,
            )
            masked = self._finished(self._begin(), self._users, noise)
        self.seconds += time.monotonic() - started
        return masked

    @staticmethod
    def _finished(into: SiloSum, missing: Collection[int], noise: np.ndarray) -> bytes:
        """Return a masked sum after adding zeros for the missing users."""
        into.add(dict.fromkeys(missing, np.zeros_like(noise)))
        return into.finish(noise)


def local_update(work: ClientWork) -> Steps[LocalResult]:
    """Train and clip every user of the silo, and return an encrypted sum (weighting (b))."""
    bound, silo = float(work.settings[CLIPPING_NORM]), resume(work.vault)
    if silo is None:
        return LocalResult(update=HiddenSum(bound=bound, encrypt=lambda noise: _lost()))
    if work.settings[USERS] != silo.users:
        error = f"{USERS}={work.settings[USERS]!r}: expected {silo.users}"
        raise tellable(ProtocolError(error))
    users = owned(work.data, silo.users).by_user()
    sent = {name: array.numpy().tobytes() for name, array in work.state[WEIGHTED].items()}
    with _protocol():
        adding = Adding(lambda: silo.open_sum(work.round, sent), silo.counted)
    started = time.monotonic()
    job = silo_job(work, users, {})
    job_fields = {field.name: getattr(job, field.name) for field in fields(job)}
    yield Training(
        task=work.task,
        job=HiddenJob(**job_fields, into=adding),
        trained=lambda name: True,
        solve=add_clipped,
    )
    trained = time.monotonic() - started - adding.seconds

    def encrypt(noise: Params) -> Mapping[str, np.ndarray]:
        with _protocol():
            masked = adding.finish(flat(noise))
        log.info(
            "silo %d, round %d: %.1f s of training, %.1f s of encryption",
            silo.index,
            work.round,
            trained,
            adding.seconds,
        )
        return {SUM: records.to_bytes_array(masked)}

    return LocalResult(update=HiddenSum(bound=bound, encrypt=encrypt))


def add_clipped(
    task: Task, jobs: Sequence[HiddenJob], *, trained: Callable[[str], bool], memory_limit: int
) -> list[None]:
    """Train all users, clip their updates, and add each to its silo's sum."""
    for silo, users, rows in users_updates(task, jobs, trained=trained, memory_limit=memory_limit):
        clipped = clip_each_row(rows, jobs[silo].clipping_norm)
        jobs[silo].into(
            {
                user: flat({name: part[row] for name, part in clipped.items()})
                for row, user in enumerate(users)
            }
        )
    return [None] * len(jobs)


def flat(params: Params) -> np.ndarray:
    """Return all parameters in one vector, in the order of their names."""
    return np.concatenate([params[name].cpu().numpy().ravel() for name in sorted(params)])


def _lost() -> Mapping[str, np.ndarray]:
    return {LOST: np.zeros(1, dtype=np.uint8)}

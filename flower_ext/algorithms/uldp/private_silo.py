"""A silo's side of `PrivateUldpAvg`: the set-up, then training, clipping and encryption.

What a protocol does in each of them is the `SiloEnd` of its module in `weighting`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from logging import getLogger
from typing import cast

import numpy as np

from flower_ext.algorithms.uldp.averaging import CLIPPING_NORM, SiloJob, silo_job, users_updates
from flower_ext.algorithms.uldp.weighting.protocol import (
    BEGIN,
    LOST,
    NUMBER,
    PROTOCOL,
    STEP,
    SUM,
    Arrays,
    SiloEnd,
    SiloProtocol,
    name_of,
)
from flower_ext.algorithms.uldp.weights import USERS, owned
from flower_ext.errors import tellable
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
from flower_ext.privacy.bounds import clip_each_row
from flower_ext.secure import ProtocolError
from flower_ext.training import Params, Task

log = getLogger("flwr")

_PACKAGE = "flower_ext.algorithms.uldp.weighting"
_SILOS = {"paillier": f"{_PACKAGE}.paillier_silo", "lattice": f"{_PACKAGE}.lattice_silo"}


def answer(question: Question) -> Arrays:
    """Take this silo's part of the set-up, or of a draw that nobody knows: one step a message."""
    with _protocol():
        silo = resume(question.vault)
        if question.asked[STEP] == BEGIN:
            if silo is not None and silo.run == question.asked.get("run"):
                raise ProtocolError("the set-up of this run began before")
            return _silo_protocol(str(question.asked.get(PROTOCOL, "paillier"))).begin(question)
        if silo is None:
            lost = f"silo {question.partition} has lost its keys: start the run anew"
            raise ProtocolError(lost)
        return silo.answer(question)


def resume(vault: ClientVault) -> SiloEnd | None:
    """Return the silo as it was stored last, under whichever protocol; None if there is none."""
    kept = vault.load()
    return None if kept is None else _silo_protocol(name_of(kept)).resume(vault)


def _silo_protocol(name: str) -> SiloProtocol:
    if name not in _SILOS:
        raise ProtocolError(f"protocol={name!r}: expected one of {', '.join(_SILOS)}")
    return cast(SiloProtocol, import_module(_SILOS[name]))


@contextmanager
def _protocol() -> Iterator[None]:
    """Let errors of the protocol travel: they know of steps, rounds and silos alone."""
    try:
        yield
    except ProtocolError as error:
        raise tellable(error) from None


def local_update(work: ClientWork) -> Steps[LocalResult]:
    """Weighting (b): train and clip every user of the silo; what leaves is encrypted."""
    bound, silo = float(work.settings[CLIPPING_NORM]), resume(work.vault)
    if silo is None:
        return LocalResult(update=HiddenSum(bound=bound, encrypt=lambda noise: _lost()))
    if work.settings[USERS] != silo.users:
        error = f"{USERS}={work.settings[USERS]!r}: expected {silo.users}"
        raise tellable(ProtocolError(error))
    users = owned(work.data, silo.users).by_user()
    started = time.monotonic()
    updates: dict[int, np.ndarray] = yield Training(
        task=work.task,
        job=silo_job(work, users, {}),
        trained=lambda name: True,
        solve=clipped_updates,
    )

    trained = time.monotonic()

    def encrypt(noise: Params) -> Mapping[str, np.ndarray]:
        sent = {name: array.numpy().tobytes() for name, array in work.state[USERS].items()}
        began = time.monotonic()
        with _protocol():
            masked = silo.weigh(work.round, sent, updates, flat(noise))
        log.info(
            "silo %d, round %d: %.1f s of training, %.1f s of encryption",
            silo.index,
            work.round,
            trained - started,
            time.monotonic() - began,
        )
        number = np.array(work.round, dtype=np.int64)
        return {SUM: records.to_bytes_array(masked), NUMBER: number}

    return LocalResult(update=HiddenSum(bound=bound, encrypt=encrypt))


def clipped_updates(
    task: Task, jobs: Sequence[SiloJob], *, trained: Callable[[str], bool], memory_limit: int
) -> list[dict[int, np.ndarray]]:
    """For each silo every user's clipped update, as one vector in float64."""
    found: list[dict[int, np.ndarray]] = [{} for _ in jobs]
    for silo, users, rows in users_updates(task, jobs, trained=trained, memory_limit=memory_limit):
        clipped = clip_each_row(rows, jobs[silo].clipping_norm)
        for row, user in enumerate(users):
            found[silo][user] = flat({name: part[row] for name, part in clipped.items()})
    return found


def flat(params: Params) -> np.ndarray:
    """All parameters in one vector, in the order of their names."""
    return np.concatenate([params[name].cpu().numpy().ravel() for name in sorted(params)])


def _lost() -> Mapping[str, np.ndarray]:
    return {LOST: np.zeros(1, dtype=np.uint8)}

"""A silo's side of `PrivateUldpAvg`: the set-up, then training, clipping and encryption.

Every step begins from what the vault holds, and has stored its outcome there before anything leaves
(see `keeping`). Numbers that anybody could read anything from travel as arrays of bytes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from logging import getLogger

import numpy as np
import torch

from flower_ext.algorithms.uldp import keeping
from flower_ext.algorithms.uldp.averaging import CLIPPING_NORM, SiloJob, silo_job, users_updates
from flower_ext.algorithms.uldp.weights import USERS, owned
from flower_ext.errors import knowing_no_data, tellable
from flower_ext.federation import (
    ClientWork,
    HiddenSum,
    LocalResult,
    Question,
    Remaining,
    Steps,
    Training,
    records,
)
from flower_ext.privacy.bounds import clip_each_row
from flower_ext.secure import (
    DrawOffer,
    EncryptedWeights,
    ProtocolError,
    SealedSeed,
    SealedWeights,
    SiloKey,
    WeightingSilo,
)
from flower_ext.training import Params, Task

log = getLogger("flwr")

STEP, BEGIN, KEYS, COUNT, DRAW = "step", "begin", "keys", "count", "draw"
"""Questions, and what names them."""
KEY, SILO_KEYS, SERVER_KEY, SEEDS, SEED, COUNTS = (
    "key",
    "silos",
    "server",
    "seeds",
    "seed",
    "counts",
)
OFFER, ANSWER, WEIGHTS, SUM, NUMBER, LOST = "offer", "answer", "weights", "sum", "round", "lost"
"""Arrays."""


def answer(question: Question) -> Mapping[str, np.ndarray]:
    """A silo's part of the set-up, and of a draw that nobody knows: one step a message."""
    steps = {BEGIN: _begin, KEYS: _take_keys, COUNT: _count, DRAW: _draw}
    step = str(question.asked[STEP])
    if step not in steps:
        raise tellable(ProtocolError(f"step={step!r}: expected one of {', '.join(steps)}"))
    with _protocol():
        return steps[step](question)


def _begin(question: Question) -> Mapping[str, np.ndarray]:
    facts = {name: value for name, value in question.asked.items() if name != STEP}
    with knowing_no_data():
        settings = keeping.settings_from_facts(facts)
        if settings.allow_insecure_key_size and not question.may_simulate:
            raise PermissionError(
                f"the server asks for keys of {settings.key_bits} bits that may be insecure: this "
                "client takes part only in simulation (client_app(..., allow_seeded_noise=True))"
            )
    owned(question.data, settings.users)
    earlier = keeping.resume(question.vault)
    if earlier is not None and earlier.settings.run == settings.run:
        raise ProtocolError("the set-up of this run began before")
    silo = WeightingSilo(settings, question.partition)
    keeping.keep(silo, question.vault)
    return {KEY: records.to_bytes_array(silo.key.public)}


def _take_keys(question: Question) -> Mapping[str, np.ndarray]:
    silo, sent = _resumed(question), question.arrays[KEYS]
    public = [bytes(key) for key in sent[SILO_KEYS]]
    keys = [SiloKey(silo=number, public=key) for number, key in enumerate(public)]
    silo.receive_keys(sent[SERVER_KEY].tobytes(), keys)
    log.info("silo %d: fingerprint of all silos' keys %s", silo.index, silo.fingerprint)
    sealed = [seed.sealed for seed in silo.seal_seed()] if silo.index == 0 else []
    keeping.keep(silo, question.vault)
    return {SEEDS: records.to_bytes_array(b"".join(sealed))} if sealed else {}


def _count(question: Question) -> Mapping[str, np.ndarray]:
    silo = _resumed(question)
    if silo.index != 0:
        sealed = question.arrays[SEED][SEED].tobytes()
        silo.open_seed(SealedSeed(receiver=silo.index, sealed=sealed))
    owners = owned(question.data, silo.settings.users).owners.cpu().long()
    counts = torch.bincount(owners, minlength=silo.settings.users).tolist()
    blinded = silo.blind_counts(counts)
    return {COUNTS: records.to_bytes_array(blinded.counts)}


def _draw(question: Question) -> Mapping[str, np.ndarray]:
    number, public = int(question.asked[NUMBER]), question.arrays[OFFER][OFFER].tobytes()
    answer = _resumed(question).answer_draw(DrawOffer(round_number=number, public=public))
    return {ANSWER: records.to_bytes_array(answer.answer)}


@contextmanager
def _protocol() -> Iterator[None]:
    """Let errors of the protocol travel: they know of steps, rounds and silos alone."""
    try:
        yield
    except ProtocolError as error:
        raise tellable(error) from None


def _resumed(question: Question) -> WeightingSilo:
    silo = keeping.resume(question.vault)
    if silo is None:
        raise ProtocolError(f"silo {question.partition} has lost its keys: start the run anew")
    return silo


def local_update(work: ClientWork) -> Steps[LocalResult]:
    """Weighting (b): train and clip every user of the silo; what leaves is encrypted."""
    bound, silo = float(work.settings[CLIPPING_NORM]), keeping.resume(work.vault)
    if silo is None:
        return LocalResult(update=HiddenSum(bound=bound, encrypt=lambda noise: _lost()))
    if work.settings[USERS] != silo.settings.users:
        error = f"{USERS}={work.settings[USERS]!r}: expected {silo.settings.users}"
        raise tellable(ProtocolError(error))
    users = owned(work.data, silo.settings.users).by_user()
    started = time.monotonic()
    updates: dict[int, np.ndarray] = yield Training(
        task=work.task,
        job=silo_job(work, users, {}),
        trained=lambda name: True,
        solve=clipped_updates,
    )

    trained = time.monotonic()

    def encrypt(noise: Params) -> Mapping[str, np.ndarray]:
        message = _weights(work)
        began = time.monotonic()
        keeping.prepare(silo)
        progress = Remaining(f"silo {silo.index}, round {work.round}: coordinates")
        with _protocol():
            masked = silo.weigh(message, updates, flat(noise), progress=progress)
        keeping.remember(silo)
        log.info(
            "silo %d, round %d: %.1f s of training, %.1f s of encryption",
            silo.index,
            work.round,
            trained - started,
            time.monotonic() - began,
        )
        number = np.array(masked.round_number, dtype=np.int64)
        return {SUM: records.to_bytes_array(masked.ciphertexts), NUMBER: number}

    return LocalResult(update=HiddenSum(bound=bound, encrypt=encrypt))


def _weights(work: ClientWork) -> EncryptedWeights | SealedWeights:
    sent = {name: array.numpy().tobytes() for name, array in work.state[USERS].items()}
    if OFFER not in sent:
        return EncryptedWeights(round_number=work.round, weights=sent[WEIGHTS])
    return SealedWeights(round_number=work.round, public=sent[OFFER], sealed=sent[WEIGHTS])


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

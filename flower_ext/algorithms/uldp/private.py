"""ULDP-AVG-w and ULDP-SGD-w with weights n_su / N_u that nobody learns.

Source: Protocol 1 of Kato et al., "Uldp-FL" (PVLDB 2024), as `flower_ext.secure` has it.

====================  =====================================================
paper                 here
====================  =====================================================
setup (a)–(c)         queries ``begin`` (silos' keys) and ``keys`` (of all; silo 0 seals R)
setup (d)–(f)         query ``count`` (R arrives, blinded counts leave)
weighting (a)         `PrivateUldpAvg.weigh`: Enc(B_inv(N_u)) of every user
weighting (b), (c)    ``encrypt`` in `local_update`; `PrivateUldpAvg.combine`
N_max, P              ``protocol.max_records_per_user``, ``protocol.precision``
====================  =====================================================

Clipping, noise and local training are those of `UldpAvg`. The server draws users by their places in
an order that the silos keep to themselves, and silos do not learn who was drawn: they train all
their users, and those not drawn get weight zero under encryption.

Numbers that anybody could read anything from travel as arrays of bytes. A silo's secrets are in its
vault; errors that might tell something about its data stay in its own log.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from logging import getLogger
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.serverapp import Grid

from flower_ext.algorithms.uldp import keeping
from flower_ext.algorithms.uldp.averaging import (
    CLIPPING_NORM,
    SiloJob,
    UldpAvg,
    UldpSgd,
    local_model,
    silo_job,
    users_updates,
)
from flower_ext.algorithms.uldp.weights import USERS, owned
from flower_ext.federation import (
    ClientMethod,
    ClientWork,
    HiddenSum,
    LocalResult,
    Question,
    RefusedReply,
    Remaining,
    Steps,
    Training,
    records,
)
from flower_ext.privacy import (
    Aggregate,
    FullParticipation,
    ReleasePlan,
    RoundDiscarded,
    SecureNoise,
    Weighting,
    clip_each_row,
)
from flower_ext.secure import (
    BlindedCounts,
    EncryptedWeights,
    IncompleteRound,
    MaskedSum,
    ProtocolError,
    SealedSeed,
    SiloKey,
    WeightingPlan,
    WeightingServer,
    WeightingSilo,
    estimate_round,
)
from flower_ext.training import Params, Task

log = getLogger("flwr")

STEP, BEGIN, KEYS, COUNT = "step", "begin", "keys", "count"
KEY, SILO_KEYS, SERVER_KEY, SEEDS, SEED, COUNTS = (
    "key",
    "silos",
    "server",
    "seeds",
    "seed",
    "counts",
)
WEIGHTS, SUM, NUMBER, LOST = "weights", "sum", "round", "lost"
_KEY_BYTES = 32
_SEALED_BYTES = 60
_NOISE_ROOM = 64.0
"""Standard deviations of a silo's noise that encoding has room for; noise never gets there."""


@dataclass(frozen=True, kw_only=True)
class PrivateWeighting:
    """Settings of the protocol. What could overflow is refused before anything is encrypted.

    Parameters
    ----------
    max_records_per_user : int
        N_max: the most records that one user may have over all silos.
    allowed_totals : tuple of int, optional
        If given, every user has one of these numbers of records over all silos, or none: less work.
    silo_record_limits : tuple of int, optional
        The most records of one user in each silo. Where they sum to N_max at most, no user can
        exceed it; without them an excess ends the run when the first sum is decrypted.
    precision : float
        P: largest error of a coordinate of the sum over silos.
    key_bits : int
        Length of the Paillier modulus.
    allow_insecure_key_size : bool
        For tests and simulation; silos that refuse seeded noise refuse small keys.

    Raises
    ------
    ValueError
        A field is out of range.
    """

    max_records_per_user: int = 2000
    allowed_totals: tuple[int, ...] | None = None
    silo_record_limits: tuple[int, ...] | None = None
    precision: float = 1e-10
    key_bits: int = 3072
    allow_insecure_key_size: bool = False

    def __post_init__(self) -> None:
        silos = 2 if self.silo_record_limits is None else len(self.silo_record_limits)
        facts = {"users": 1, "silos": silos, "coordinates": 1}
        self.plan(run="check", **facts, update_bound=self.precision, noise_bound=self.precision)

    def plan(self, **facts: Any) -> WeightingPlan:
        """The public facts of one run.

        Raises
        ------
        ValueError
            As `WeightingPlan`.
        """
        return WeightingPlan(**asdict(self), **facts)


class PrivateWeights:
    """n_su / N_u, which no party can tell: there is nothing that the server could hand out."""

    weighting: Weighting = "by-records"
    needs_histogram = False
    shown: Sequence[str] = (
        "how many users have no record in any silo (not which): the server",
        "which places of the silos' secret order of users were drawn: the server",
        "how long a silo takes, which grows with the number of its users: whoever times it",
    )

    def prepare(self, histogram: np.ndarray | None, num_silos: int) -> None:
        """Nothing is known."""

    def of_users(self, users: Sequence[int]) -> np.ndarray:
        """Never called: weights travel under encryption."""
        raise ProtocolError("private weights are in no party's hands")


# Silos -------------------------------------------------------------------------------------


def answer(question: Question) -> Mapping[str, np.ndarray]:
    """A silo's part of the set-up: one step a message, the outcome kept before it is sent."""
    steps = {BEGIN: _begin, KEYS: _take_keys, COUNT: _count}
    step = str(question.asked[STEP])
    if step not in steps:
        raise ProtocolError(f"step={step!r}: expected one of {', '.join(steps)}")
    return steps[step](question)


def _begin(question: Question) -> Mapping[str, np.ndarray]:
    facts = {name: value for name, value in question.asked.items() if name != STEP}
    plan = keeping.plan_from_facts(facts)
    if plan.allow_insecure_key_size and not question.may_simulate:
        raise PermissionError(
            f"the server asks for keys of {plan.key_bits} bits that may be insecure: this client "
            "takes part only in simulation (client_app(..., allow_seeded_noise=True))"
        )
    owned(question.data, plan.users)
    earlier = keeping.resume(question.vault)
    if earlier is not None and earlier.plan.run == plan.run:
        raise ProtocolError("the set-up of this run began before")
    silo = WeightingSilo(plan, question.partition)
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
    owners = owned(question.data, silo.plan.users).owners.cpu().long()
    counts = torch.bincount(owners, minlength=silo.plan.users).tolist()
    return {COUNTS: records.to_bytes_array(silo.blind_counts(counts).counts)}


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
    if work.settings[USERS] != silo.plan.users:
        raise ProtocolError(f"{USERS}={work.settings[USERS]!r}: expected {silo.plan.users}")
    users = owned(work.data, silo.plan.users).by_user()
    updates: dict[int, np.ndarray] = yield Training(
        task=work.task,
        job=silo_job(work, users, {}),
        trained=lambda name: True,
        solve=clipped_updates,
    )

    def encrypt(noise: Params) -> Mapping[str, np.ndarray]:
        weights = work.state[USERS][WEIGHTS].numpy().tobytes()
        message = EncryptedWeights(round_number=work.round, weights=weights)
        keeping.prepare(silo)
        try:
            progress = Remaining(f"silo {silo.index}, round {work.round}: coordinates")
            masked = silo.weigh(message, updates, flat(noise), progress=progress)
        except ValueError:  # it may say something about the data, and errors reach the server
            log.exception("silo %d cannot encrypt its sum", silo.index)
            raise ProtocolError(
                f"silo {silo.index} cannot encrypt its sum; why is in its own log"
            ) from None
        keeping.remember(silo)
        number = np.array(masked.round_number, dtype=np.int64)
        return {SUM: records.to_bytes_array(masked.ciphertexts), NUMBER: number}

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


# Server ------------------------------------------------------------------------------------


class PrivateUldpAvg(UldpAvg):
    """`UldpAvg` weighted by records, without anyone learning how many records a user has where.

    Equal to ``UldpAvg(weighting="by-records")`` within ``protocol.precision`` in every coordinate
    of the sum over silos. Where a silo does not answer, nothing is decrypted.

    Parameters
    ----------
    plan : ReleasePlan
        As for `UldpAvg`, with ``dropout_policy="discard"``.
    num_silos : int
        Two at least.
    protocol : PrivateWeighting, optional
    **options
        Those of `UldpAvg`.
    """

    client = ClientMethod(
        name="uldp_avg_private",
        local_update=local_update,
        local_model=local_model,
        memoryless=True,
        answer=answer,
    )

    def __init__(
        self,
        *,
        plan: ReleasePlan,
        num_silos: int,
        protocol: PrivateWeighting | None = None,
        **options: Any,
    ) -> None:
        if "weighting" in options:
            raise ValueError("weighting: private weights are by records; UldpAvg has others")
        if plan.dropout_policy != "discard":
            raise ValueError(
                f"dropout_policy={plan.dropout_policy!r} of the plan: expected 'discard', as a sum "
                "without all silos stays masked"
            )
        if options.get("diagnostics"):
            raise ValueError("diagnostics=True: norms of updates stay hidden; expected False")
        super().__init__(plan=plan, num_silos=num_silos, weighting=PrivateWeights(), **options)
        self.protocol = protocol or PrivateWeighting()
        self._weighting_plan(coordinates=1)  # refuses what could overflow
        self._server: WeightingServer | None = None

    def summary(self) -> None:
        """Log the method, its plan and the protocol."""
        super().summary()
        one, totals = self.protocol, self.protocol.allowed_totals
        log.info(
            "private weighting: keys of %d bits%s, precision %g, at most %d records a user%s",
            one.key_bits,
            " (INSECURE: simulation only)" if one.allow_insecure_key_size else "",
            one.precision,
            one.max_records_per_user,
            f", one of {totals}" if totals else "",
        )

    def prepare(self, grid: Grid) -> None:
        """Set up the protocol: keys, the silos' seed, blinded counts."""
        plan = self._weighting_plan(coordinates=sum(a.size for a in self._base.values()))
        norm = self.plan.clipping_norm
        self.plan = replace(self.plan, sensitivity=plan.contribution_bound(norm) / norm)
        self._log_estimate(plan)
        server = WeightingServer(plan, workers=keeping.cores())
        begin = ConfigRecord({STEP: BEGIN, **keeping.plan_to_facts(plan)})
        keys = self._told(grid, begin, KEY, _KEY_BYTES)
        relayed = server.relay_keys([SiloKey(silo=s, public=key) for s, key in keys.items()])
        public = {
            SERVER_KEY: records.to_bytes_array(server.public_key),
            SILO_KEYS: np.stack([records.to_bytes_array(key.public) for key in relayed]),
        }
        shared = {KEYS: records.to_record(public)}
        length = _SEALED_BYTES * (plan.silos - 1)
        sealed = self._told(
            grid,
            ConfigRecord({STEP: KEYS}),
            SEEDS,
            length,
            own=dict.fromkeys(keys, shared),
            only=(0,),
        )[0]
        parts = [sealed[at : at + _SEALED_BYTES] for at in range(0, length, _SEALED_BYTES)]
        seeds = server.relay_seed(
            [SealedSeed(receiver=s, sealed=part) for s, part in enumerate(parts, start=1)]
        )
        for_one = {
            seed.receiver: {
                SEED: records.to_record({SEED: records.to_bytes_array(seed.sealed)}),
            }
            for seed in seeds
        }
        length = plan.users * plan.residue_bytes
        counts = self._told(grid, ConfigRecord({STEP: COUNT}), COUNTS, length, own=for_one)
        server.receive_counts([BlindedCounts(silo=s, counts=c) for s, c in counts.items()])
        self._server = server

    def weigh(self, number: int, users: Sequence[int]) -> Sequence[ArrayRecord]:
        """Weighting (a): the same encryptions for all silos."""
        everyone = isinstance(self.plan.sampling, FullParticipation)
        message = self._connected.open_round(
            number,
            sampled=None if everyone else users,
            progress=Remaining(f"round {number}: encryptions"),
        )
        sent = records.to_record({WEIGHTS: records.to_bytes_array(message.weights)})
        return [sent] * self.num_silos

    def combine(self, updates: Mapping[int, records.Update]) -> Aggregate:
        """Weighting (c): the sum over all silos, or nothing.

        Raises
        ------
        RoundDiscarded
            A silo's sum is missing; nothing was decrypted.
        ProtocolError
            A silo has lost its keys: no later round could be decrypted either.
        OverflowError
            Some user has more records than ``protocol`` allows.
        """
        if lost := [silo for silo, update in updates.items() if LOST in update.arrays]:
            raise ProtocolError(f"silos {lost} have lost their keys: start the run anew")
        sums = [
            MaskedSum(
                round_number=int(update.arrays[NUMBER]),
                silo=silo,
                ciphertexts=update.arrays[SUM].tobytes(),
            )
            for silo, update in updates.items()
        ]
        try:
            total = self._connected.close_round(sums, progress=Remaining("decryptions"))
        except IncompleteRound as missing:
            raise RoundDiscarded(f"{missing}; nothing was decrypted") from missing
        aggregate = self.plan.aggregate(
            [self._unflat(total)], cohort_size=1, noise=SecureNoise(), like=self._base
        )
        return replace(aggregate, answered=len(sums))

    def count_participations(self, answered: int) -> None:
        """The sampled places took part. Who missed a silo's part of a sum saw no sum at all."""
        self.participations.record(self._users, self.num_silos, asked=self.num_silos)

    @property
    def secure_sum(self) -> str:
        """The protocol, and what it rests on."""
        return (
            "private weighting: no silo colludes with the server, which relays keys unchanged; "
            "Paillier encryption, X25519 and ChaCha20 are not broken"
        )

    def _read_update(self, reply: Message) -> records.Update:
        arrays = records.read_answer(reply, records.UPDATE)
        if set(arrays) == {LOST} and records.read_bytes(arrays, LOST, 1) == b"\0":
            return records.Update(arrays, {})
        if set(arrays) != {SUM, NUMBER} or arrays[NUMBER].shape or arrays[NUMBER].dtype != np.int64:
            raise RefusedReply(f"arrays {sorted(arrays)}: expected {SUM!r} and one {NUMBER!r}")
        plan = self._connected.plan
        data = records.read_bytes(arrays, SUM, plan.ciphertexts * plan.ciphertext_bytes)
        number = int(arrays[NUMBER])
        try:
            self._connected.check_sum(MaskedSum(round_number=number, silo=0, ciphertexts=data))
        except (ProtocolError, ValueError) as error:
            raise RefusedReply(str(error)) from error
        return records.Update(arrays, records.read_metrics(reply))

    @property
    def _connected(self) -> WeightingServer:
        if self._server is None:
            raise ProtocolError("no round before the set-up")
        return self._server

    def _weighting_plan(self, *, coordinates: int) -> WeightingPlan:
        stddev = self.plan.client_noise_stddev(self.num_silos)
        return self.protocol.plan(
            run=secrets.token_hex(16),
            users=self.plan.sampling.population,
            silos=self.num_silos,
            coordinates=coordinates,
            update_bound=self.plan.clipping_norm,
            noise_bound=_NOISE_ROOM * stddev,
        )

    def _told(
        self,
        grid: Grid,
        question: ConfigRecord,
        name: str,
        length: int,
        *,
        own: Mapping[int, Mapping[str, ArrayRecord]] | None = None,
        only: Sequence[int] | None = None,
    ) -> dict[int, bytes]:
        """Bytes of that name and length from each silo, or from ``only`` some of them."""
        speakers = {self._exchange.nodes[s] for s in only or range(self.num_silos)}

        def read(reply: Message) -> bytes:
            arrays = records.read_answer(reply)
            if reply.metadata.src_node_id not in speakers:
                return b""
            return records.read_bytes(arrays, name, length)

        return self.ask_everyone(grid, question, read, own)

    def _unflat(self, total: np.ndarray) -> records.Arrays:
        names = sorted(self._base)
        ends = np.cumsum([self._base[name].size for name in names])[:-1]
        parts = zip(names, np.split(total, ends), strict=True)
        return {name: part.reshape(self._base[name].shape) for name, part in parts}

    def _log_estimate(self, plan: WeightingPlan) -> None:
        guess = estimate_round(plan, prepared=keeping.pool_pays(plan))
        log.info(
            "private weighting: on one core a round takes %.0f s in a silo that has all %d users "
            "(%.0f s less while nobody is drawn, %.0f s more in the first) and %.0f s in the "
            "server, which has %d cores; a silo sends %.1f MB and receives %.1f MB",
            guess.silo,
            plan.users,
            guess.fold + guess.tables,
            guess.prepare,
            guess.server,
            keeping.cores(),
            guess.upload_bytes / 1e6,
            guess.download_bytes / 1e6,
        )


class PrivateUldpSgd(PrivateUldpAvg, UldpSgd):
    """`UldpSgd` weighted by records, privately; see `PrivateUldpAvg`.

    Parameters
    ----------
    plan, num_silos, protocol, **options
        Those of `PrivateUldpAvg`, but ``local``.
    """

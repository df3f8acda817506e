"""ULDP-AVG-w and ULDP-SGD-w with weights n_su / N_u that nobody learns.

Source: Protocol 1 of Kato et al., "Uldp-FL" (PVLDB 2024), as `flower_ext.secure` has it.

====================  =====================================================
paper                 here
====================  =====================================================
setup (a)–(c)         queries ``begin`` (silos' keys) and ``keys`` (of all; silo 0 seals R)
setup (d)–(f)         query ``count`` (R arrives, blinded counts leave)
weighting (a)         `PrivateUldpAvg.weigh`: Enc(B_inv(N_u)) of every user
weighting (b), (c)    `private_silo.local_update`; `PrivateUldpAvg.combine`
oblivious transfer    query ``draw`` (to silo 0) before weighting (a); ``protocol.draw_choices``: P
N_max, P              ``protocol.max_records_per_user``, ``protocol.precision``
====================  =====================================================

Clipping, noise and local training are those of `UldpAvg`. The server draws users by their places in
an order that the silos keep to themselves, or with ``draw_choices`` not even so. Silos do not learn
who was drawn: they train all their users, and those not drawn get weight zero under encryption.

The silos' side is `private_silo`.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from logging import getLogger
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.serverapp import Grid

from flower_ext.algorithms.one_phase import shared_model
from flower_ext.algorithms.uldp.averaging import UldpAvg, UldpSgd
from flower_ext.algorithms.uldp.private_setup import ask_bytes, set_up
from flower_ext.algorithms.uldp.private_silo import (
    ANSWER,
    DRAW,
    LOST,
    NUMBER,
    OFFER,
    STEP,
    SUM,
    WEIGHTS,
    answer,
    local_update,
)
from flower_ext.algorithms.uldp.private_weights import PrivateWeighting, PrivateWeights
from flower_ext.algorithms.uldp.weights import ask_company
from flower_ext.errors import InvalidValue
from flower_ext.federation import (
    ClientMethod,
    FederationNotReady,
    RefusedReply,
    Remaining,
    records,
)
from flower_ext.federation.population import Cohort, HiddenUsers
from flower_ext.privacy import FullParticipation, Guarantee, ReleasePlan, SecureNoise
from flower_ext.privacy.plan import Aggregate, RoundDiscarded
from flower_ext.privacy.run_facts import RunFacts
from flower_ext.secure import (
    DrawAnswer,
    IncompleteRound,
    MaskedSum,
    ProtocolError,
    WeightingServer,
    WeightingSettings,
)
from flower_ext.secure.weighting.oblivious import ELEMENT_BYTES

log = getLogger("flwr")

_SENSITIVITY = "sensitivity"
_NOISE_ROOM = 64.0
"""Standard deviations of a silo's noise that encoding has room for; noise never gets there."""
_LARGEST_STEP = 0.25
"""Of the encoding, in standard deviations of a silo's noise; coarser steps round noise away."""


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

    never_repeats = True  # keys, blinds and dither are secret
    secure_sum = (
        "private weighting: no silo colludes with the server, which relays keys unchanged; "
        "Paillier encryption, X25519 and ChaCha20 are not broken"
    )
    population: HiddenUsers
    client = ClientMethod(
        name="uldp_avg_private",
        local_update=local_update,
        local_model=shared_model,
        memoryless=True,
        answer=answer,
        keeps_memory=False,  # of rounds: keys and blinds are set up anew where a run goes on
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
            raise InvalidValue("weighting: private weights are by records; UldpAvg has others")
        if plan.dropout_policy != "discard":
            raise InvalidValue(
                f"dropout_policy={plan.dropout_policy!r} of the plan: expected 'discard', as a sum "
                "without all silos stays masked"
            )
        if plan.secure_aggregation is not None:
            raise InvalidValue(
                "secure_aggregation of the plan: expected None, as private weighting has a secure "
                "sum of its own"
            )
        if options.get("diagnostics"):
            raise InvalidValue("diagnostics=True: norms of updates stay hidden; expected False")
        self.protocol = protocol or PrivateWeighting()
        hidden = self.protocol.draw_choices is not None
        self._sensitivity = plan.sensitivity
        super().__init__(
            plan=plan,
            num_silos=num_silos,
            weighting=PrivateWeights(hidden_draw=hidden),
            population=HiddenUsers(plan.sampling, num_silos, oblivious=hidden),
            **options,
        )
        self._weighting_settings(coordinates=1)  # refuses what could overflow
        self._server: WeightingServer | None = None
        self._not_drawn = ""

    def summary(self) -> None:
        """Log the method, its plan and the protocol."""
        super().summary()
        one, totals = self.protocol, self.protocol.allowed_totals
        log.info(
            "private weighting: keys of %d bits%s, precision %g, at most %d records a user%s%s",
            one.key_bits,
            " (INSECURE: simulation only)" if one.allow_insecure_key_size else "",
            one.precision,
            one.max_records_per_user,
            f", one of {totals}" if totals else "",
            "" if one.draw_choices is None else f", users drawn 1-out-of-{one.draw_choices}",
        )

    @property
    def accounted(self) -> ReleasePlan:
        """The plan with how far one user moves a sum of rounded numbers; known once prepared."""
        return replace(self.plan, sensitivity=self._sensitivity)

    def prepare(self, grid: Grid) -> None:
        """Set up the protocol: keys, the silos' seed, blinded counts."""
        started = time.monotonic()
        self.apart = ask_company(self, grid)
        settings = self._weighting_settings(coordinates=sum(a.size for a in self.sent.values()))
        norm = self.plan.clipping_norm
        self._sensitivity = settings.contribution_bound(norm) / norm
        self._server = set_up(self, grid, settings)
        self.progress.row["setup_seconds"] = time.monotonic() - started

    def begin_round(self, number: int, cohort: Cohort, grid: Grid) -> Cohort:
        """Weighting (a): encrypt the weights of the round's users.

        All silos are asked, or none: where silo 0 does not answer for them all.
        """
        self._not_drawn = ""
        if self.protocol.draw_choices is None:
            return super().begin_round(number, cohort, grid)
        try:
            self._users_records = self._drawn(number, grid)
        except FederationNotReady as missing:
            self._not_drawn = str(missing)
            return replace(cohort, asked=())
        return cohort

    def weigh(self, number: int, users: Sequence[int]) -> Sequence[ArrayRecord]:
        """Weighting (a): the same encryptions for all silos."""
        everyone = isinstance(self.plan.sampling, FullParticipation)
        started = time.monotonic()
        message = self._connected.open_round(
            number,
            sampled=None if everyone else users,
            progress=Remaining(f"round {number}: encryptions"),
        )
        self.progress.row["encryption_seconds"] = time.monotonic() - started
        sent = records.to_record({WEIGHTS: records.to_bytes_array(message.weights)})
        return [sent] * self.num_silos

    def _drawn(self, number: int, grid: Grid) -> Sequence[ArrayRecord]:
        """Weighting (a) for users whom nobody knows: the same for all silos."""
        offer = self._connected.offer_draw(number)
        told = ask_bytes(
            self,
            grid,
            ConfigRecord({STEP: DRAW, NUMBER: number}),
            ANSWER,
            self.plan.sampling.population * ELEMENT_BYTES,
            own={0: {OFFER: records.to_record({OFFER: records.to_bytes_array(offer.public)})}},
            asked=(0,),
        )
        started = time.monotonic()
        message = self._connected.open_drawn_round(
            DrawAnswer(round_number=number, answer=told[0]),
            progress=Remaining(f"round {number}: encryptions"),
        )
        self.progress.row["encryption_seconds"] = time.monotonic() - started
        sent = {OFFER: message.public, WEIGHTS: message.sealed}
        record = records.to_record({n: records.to_bytes_array(data) for n, data in sent.items()})
        return [record] * self.num_silos

    def combine(self, updates: Iterable[tuple[int, records.Update]]) -> Aggregate:
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
        if self._not_drawn:
            raise RoundDiscarded(f"no users were drawn: {self._not_drawn}")
        uploads = dict(updates)
        if lost := [silo for silo, update in uploads.items() if LOST in update.arrays]:
            raise ProtocolError(f"silos {lost} have lost their keys: start the run anew")
        sums = [
            MaskedSum(
                round_number=int(update.arrays[NUMBER]),
                silo=silo,
                ciphertexts=update.arrays[SUM].tobytes(),
            )
            for silo, update in uploads.items()
        ]
        started = time.monotonic()
        try:
            total = self._connected.close_round(sums, progress=Remaining("decryptions"))
        except IncompleteRound as missing:
            raise RoundDiscarded(f"{missing}; nothing was decrypted") from missing
        self.progress.row["decryption_seconds"] = time.monotonic() - started
        aggregate = self.accounted.aggregate(
            [self._unflat(total)], cohort_size=1, noise=SecureNoise(), like=self.sent
        )
        return replace(aggregate, answered=len(sums))

    def state(self) -> Mapping[str, records.Arrays]:
        """How far one user moves the sum, as encoding has it."""
        return {_SENSITIVITY: {_SENSITIVITY: np.asarray(self._sensitivity)}}

    def restore(self, state: Mapping[str, records.Arrays]) -> None:
        """The set-up was made anew: places are those of a new order, the larger bound counts."""
        saved = float(state[_SENSITIVITY][_SENSITIVITY])
        self._sensitivity = max(self._sensitivity, saved)
        self.population.forget_order()

    def claims(self, run: RunFacts) -> list[Guarantee]:
        """And what the provable ones need of the users' records, unless silos see to it."""
        claims = super().claims(run)
        if not (assumed := self.protocol.assumed_totals):
            return claims
        return [
            replace(one, assumptions=(*one.assumptions, assumed))
            if one.basis == "provable"
            else one
            for one in claims
        ]

    @property
    def hidden_draw(self) -> str:
        """With ``protocol.draw_choices`` not even the server learns who was drawn."""
        if self.protocol.draw_choices is None:
            return ""
        return (
            "who was drawn is hidden by oblivious transfer: no silo colludes with the server, all "
            "parties follow the protocol; the computational Diffie-Hellman problem is hard in the "
            "3072-bit group of RFC 3526"
        )

    def read_update(self, reply: Message) -> records.Update:
        """A silo's masked sum of this round, or that it has lost its keys."""
        arrays = records.read_answer(reply, records.UPDATE)
        if set(arrays) == {LOST} and records.read_bytes(arrays, LOST, 1) == b"\0":
            return records.Update(arrays, {})
        if set(arrays) != {SUM, NUMBER} or arrays[NUMBER].shape or arrays[NUMBER].dtype != np.int64:
            raise RefusedReply(f"arrays {sorted(arrays)}: expected {SUM!r} and one {NUMBER!r}")
        settings = self._connected.settings
        size = settings.ciphertexts * settings.ciphertext_bytes
        data = records.read_bytes(arrays, SUM, size)
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

    def _weighting_settings(self, *, coordinates: int) -> WeightingSettings:
        stddev = self.plan.client_noise_stddev(self.num_silos)
        settings = self.protocol.settings(
            run=secrets.token_hex(16),
            users=self.plan.sampling.population,
            silos=self.num_silos,
            coordinates=coordinates,
            draw_hits=self.protocol.draw_hits(self.plan),
            update_bound=self.plan.clipping_norm,
            noise_bound=_NOISE_ROOM * stddev,
        )
        if settings.step > (largest := _LARGEST_STEP * stddev):
            raise InvalidValue(
                f"precision={settings.precision!r}: it rounds to steps of {settings.step:.3g}, too "
                f"coarse for a silo's noise of standard deviation {stddev:.3g}; expected at most "
                f"about {settings.precision * largest / settings.step:.3g}"
            )
        return settings

    def _unflat(self, total: np.ndarray) -> records.Arrays:
        names = sorted(self.sent)
        ends = np.cumsum([self.sent[name].size for name in names])[:-1]
        parts = zip(names, np.split(total, ends), strict=True)
        return {name: part.reshape(self.sent[name].shape) for name, part in parts}


class PrivateUldpSgd(PrivateUldpAvg, UldpSgd):
    """`UldpSgd` weighted by records, privately; see `PrivateUldpAvg`.

    Parameters
    ----------
    plan, num_silos, protocol, **options
        Those of `PrivateUldpAvg`, but ``local``.
    """

"""ULDP-AVG-w and ULDP-SGD-w with weights n_su / N_u that no party learns.

Source: Protocol 1 of Kato et al., "Uldp-FL" (PVLDB 2024). A `WeightingProtocol` (package
`weighting`) keeps the weights private: over Paillier, as in the paper, or one of a plug-in.

Clipping, noise and local training are those of `UldpAvg`. The server draws users by their places in
an order that only the silos know, unless the protocol itself draws them. Silos do not learn which
users were drawn: they train all their users, and users that were not drawn have weight zero under
encryption.

The silos' side is `private_silo`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from logging import getLogger
from typing import Any

import numpy as np
from flwr.app import Message
from flwr.serverapp import Grid

from flower_ext.algorithms.one_phase import shared_model
from flower_ext.algorithms.uldp.averaging import UldpAvg, UldpSgd
from flower_ext.algorithms.uldp.private_silo import answer, local_update
from flower_ext.algorithms.uldp.private_weights import PrivateWeights
from flower_ext.algorithms.uldp.weighting.protocol import (
    LOST,
    SUM,
    ServerEnd,
    Silos,
    WeightingProtocol,
    as_record,
    load_protocol,
)
from flower_ext.algorithms.uldp.weights import ask_company
from flower_ext.errors import IncompleteRound, InvalidValue, ProtocolError
from flower_ext.federation import ClientMethod, FederationNotReady, RefusedReply, records
from flower_ext.federation.population import Cohort, HiddenUsers
from flower_ext.privacy import FullParticipation, Guarantee, ReleasePlan, SecureNoise
from flower_ext.privacy.mechanisms.plan import Aggregate, RoundDiscarded
from flower_ext.privacy.mechanisms.run_facts import RunFacts

log = getLogger("flwr")

_SPOILED_AT_FIRST = 3
"""Number of sums after which a run ends if all of them were spoiled, as later ones will be."""
_SENSITIVITY = "sensitivity"
_RESIDUE = "residue"


class PrivateUldpAvg(UldpAvg):
    """`UldpAvg` weighted by records, without any party learning a user's records in other silos.

    Each coordinate of the sum over silos equals that of ``UldpAvg(weighting="by-records")`` within
    the precision of ``protocol``. If a silo does not answer, nothing is decrypted.

    Parameters
    ----------
    plan : ReleasePlan
        As for `UldpAvg`, with ``dropout_policy="discard"``.
    num_silos : int
        Number of silos, at least two.
    protocol : str or WeightingProtocol, optional
        Settings of a protocol, or its name for default settings: ``"paillier"``
        (`PrivateWeighting`, the default), or the name of an installed plug-in.
    **options
        Options of `UldpAvg`.
    """

    never_repeats = True  # keys, blinds and dither are secret
    population: HiddenUsers
    client = ClientMethod(
        name="uldp_avg_private",
        local_update=local_update,
        local_model=shared_model,
        memoryless=True,
        answer=answer,
        keeps_memory=False,  # between rounds: a resumed run sets up keys and blinds anew
    )

    def __init__(
        self,
        *,
        plan: ReleasePlan,
        num_silos: int,
        protocol: str | WeightingProtocol = "paillier",
        **options: Any,
    ) -> None:
        if "weighting" in options:
            raise InvalidValue("weighting: expected none, as private weights are by records")
        if plan.dropout_policy != "discard":
            raise InvalidValue(
                f"dropout_policy={plan.dropout_policy!r} of the plan: expected 'discard', because "
                "the masks cancel only in the sum over all silos"
            )
        if plan.secure_aggregation is not None:
            raise InvalidValue(
                "secure_aggregation of the plan: expected None, as private weighting has a secure "
                "sum of its own"
            )
        if options.get("diagnostics"):
            raise InvalidValue("diagnostics=True: expected False, as norms of updates stay hidden")
        self.protocol = load_protocol(protocol)() if isinstance(protocol, str) else protocol
        self.secure_sum = self.protocol.secure_sum
        hidden = bool(self.protocol.hidden_draw)
        self._costs = {_SENSITIVITY: plan.sensitivity}
        super().__init__(
            plan=plan,
            num_silos=num_silos,
            weighting=PrivateWeights(shown=self.protocol.shown),
            population=HiddenUsers(plan.sampling, num_silos, oblivious=hidden),
            **options,
        )
        # Refuse settings that do not fit the plan before the server asks a silo.
        self.protocol.server(plan, silos=num_silos, coordinates=1)
        self._server: ServerEnd | None = None
        self._not_begun = ""
        self._keys_lost = False
        """True if a silo may have lost its keys, so that all set up anew before the next round."""
        self._spoiled: int | None = 0
        """Number of sums so far that were spoiled; None once a sum was not."""

    def summary(self) -> None:
        """Log the method, its plan and the protocol."""
        super().summary()
        log.info("%s", self.protocol.describe())

    @property
    def accounted(self) -> ReleasePlan:
        """The plan, which includes the protocol's own costs in privacy after `prepare`."""
        return replace(
            self.plan,
            sensitivity=self._costs[_SENSITIVITY],
            residue=self._costs.get(_RESIDUE, 0.0),
        )

    def prepare(self, grid: Grid) -> None:
        """Set up the protocol between the silos and the server."""
        started = time.monotonic()
        self.apart = ask_company(self, grid)
        self._set_up(grid)
        self.progress.row["setup_seconds"] = time.monotonic() - started

    def _set_up(self, grid: Grid) -> None:
        """Set up fresh keys, seeds and counts; the larger costs of all set-ups of a run count."""
        coordinates = sum(array.size for array in self.sent.values())
        server = self.protocol.server(self.plan, silos=self.num_silos, coordinates=coordinates)
        self._raise_costs({_SENSITIVITY: server.sensitivity, _RESIDUE: server.residue})
        server.set_up(Silos(self, grid))
        self._server, self._keys_lost = server, False

    def _raise_costs(self, costs: Mapping[str, float]) -> None:
        for name, cost in costs.items():
            self._costs[name] = max(self._costs.get(name, 0.0), cost)

    def begin_round(self, number: int, cohort: Cohort, grid: Grid) -> Cohort:
        """Encrypt the weights of the round's users.

        The cohort is all silos, or empty if a silo did not answer for a secret draw. If a silo has
        lost its keys, the silos set up anew first, in a new secret order of users.
        """
        self._not_begun = ""
        hidden = self.protocol.hidden_draw or isinstance(self.plan.sampling, FullParticipation)
        started = time.monotonic()
        step = "the new set-up"
        try:
            if self._keys_lost:
                self._set_up(grid)
                self.population.forget_order()
            step = "the secret draw of users"
            sent = self._connected.open_round(
                number, None if hidden else cohort.units, Silos(self, grid)
            )
        except FederationNotReady as missing:
            self._keys_lost = self._keys_lost or self.protocol.hidden_draw != ""
            self._not_begun = f"{step} failed without a silo's answer: {missing}"
            return replace(cohort, asked=())
        self.progress.row["encryption_seconds"] = time.monotonic() - started
        if not self.protocol.hidden_draw:
            self.progress.row["users"] = len(cohort.units)
        self._users_records = [as_record(sent)] * self.num_silos
        return cohort

    def combine(self, updates: Iterable[tuple[int, records.Update]]) -> Aggregate:
        """Decrypt the sum over all silos, or refuse and decrypt nothing.

        Raises
        ------
        RoundDiscarded
            A silo's sum is missing, so nothing was decrypted; or the sum is spoiled.
        FederationNotReady
            The first sums of the run were all spoiled.
        """
        if self._not_begun:
            raise RoundDiscarded(self._not_begun)
        received = dict(updates)
        if lost := [silo for silo, update in received.items() if LOST in update.arrays]:
            self._keys_lost = True
            raise RoundDiscarded(
                f"silos {lost} have lost their keys, so nothing was decrypted; all silos set up "
                "anew before the next round: name a state-folder in the node config, so that keys "
                "outlive the SuperNode"
            )
        started = time.monotonic()
        try:
            total = self._connected.close_round(
                {silo: update.arrays[SUM].tobytes() for silo, update in received.items()}
            )
        except IncompleteRound as missing:
            raise RoundDiscarded(f"{missing}; nothing was decrypted") from missing
        except OverflowError as error:
            raise self._discarding(f"{error}, or a silo sent what is no sum") from error
        self.progress.row["decryption_seconds"] = time.monotonic() - started
        summed = self._unflat(total)
        try:
            self.accounted.refuse_spoiled(
                summed, bound=self._largest_sum, stddev=self.plan.noise_stddev
            )
        except RoundDiscarded as reason:
            raise self._discarding(str(reason)) from reason
        self._spoiled = None
        aggregate = self.accounted.aggregate(
            [summed], cohort_size=1, noise=SecureNoise(), like=self.sent
        )
        return replace(aggregate, answered=len(received))

    @property
    def _largest_sum(self) -> float:
        """Largest norm of a sum before noise: C of every user, and what the encoding adds."""
        norms = self.plan.sampling.population * sum(self._costs.values())
        return norms * self.plan.clipping_norm

    def _discarding(self, reason: str) -> RoundDiscarded | FederationNotReady:
        """Return the error that discards a spoiled sum, or ends a run that has no other sums."""
        if self._spoiled is not None:
            self._spoiled += 1
            if self._spoiled >= _SPOILED_AT_FIRST:
                return FederationNotReady(
                    f"the first {self._spoiled} sums were all spoiled, so later ones will be as "
                    f"well, and each costs privacy: {reason}"
                )
        return RoundDiscarded(reason)

    def state(self) -> Mapping[str, records.Arrays]:
        """Return the protocol's costs in privacy beyond the plan's noise."""
        return {_SENSITIVITY: {name: np.asarray(cost) for name, cost in self._costs.items()}}

    def restore(self, state: Mapping[str, records.Arrays]) -> None:
        """Keep the larger costs. The new set-up has a new order, so old places mean nothing."""
        self._raise_costs({name: float(saved) for name, saved in state[_SENSITIVITY].items()})
        self.population.forget_order()

    def claims(self, run: RunFacts) -> list[Guarantee]:
        """Add the protocol's assumptions to the provable guarantees."""
        assumed = self.protocol.assumptions
        return [
            replace(one, assumptions=(*one.assumptions, *assumed(one.view)))
            if one.basis == "provable"
            else one
            for one in super().claims(run)
        ]

    @property
    def hidden_draw(self) -> str:
        """Assumption under which no party knows the drawn users; empty if the server draws."""
        return self.protocol.hidden_draw

    def read_update(self, reply: Message) -> records.Update:
        """Return a silo's masked sum of this round, or its notice that it has lost its keys."""
        arrays = records.read_answer(reply, records.UPDATE)
        if set(arrays) == {LOST} and records.read_bytes(arrays, LOST, 1) == b"\0":
            return records.Update(arrays, {})
        if set(arrays) != {SUM}:
            raise RefusedReply(f"arrays {sorted(arrays)}: expected {SUM!r}")
        data = records.read_bytes(arrays, SUM, self._connected.sum_bytes)
        try:
            silo = self.exchange.partition_of(reply)
            self._connected.check_sum(silo, data)
        except (ProtocolError, ValueError) as error:
            raise RefusedReply(str(error)) from error
        return records.Update(arrays, records.read_metrics(reply))

    @property
    def _connected(self) -> ServerEnd:
        if self._server is None:
            raise ProtocolError("a round before the set-up: call prepare first")
        return self._server

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
        Options of `PrivateUldpAvg`, without ``local``.
    """

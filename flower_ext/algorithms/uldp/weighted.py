"""Weighted sums: users' updates weighted by n_su / N_u, which no party learns.

Source: Protocol 1 of Kato et al., "Uldp-FL" (PVLDB 2024). A `WeightingProtocol` (package
`weighting`) keeps the weights private: over Paillier, as in the paper, or one of a plug-in.

Clipping, noise and local training are those of `UldpAvg`. The server draws users by their places in
an order that only the silos know, unless the protocol itself draws them. Silos do not learn which
users were drawn: they train all their users, and users that were not drawn have weight zero under
encryption. If a silo does not answer, nothing is decrypted.

The silos' side is `private_silo`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from logging import getLogger

import numpy as np
from flwr.app import ArrayRecord, Message

from flower_ext.algorithms.uldp.weighting.protocol import (
    LOST,
    SUM,
    WEIGHTED,
    ServerEnd,
    Silos,
    WeightingProtocol,
    as_record,
    load_protocol,
)
from flower_ext.errors import IncompleteRound, InvalidValue, ProtocolError
from flower_ext.federation import (
    Arrays,
    Clients,
    FederationNotReady,
    Opening,
    OpenSum,
    RefusedReply,
    Summation,
    Update,
    records,
)
from flower_ext.federation.population import HiddenUsers
from flower_ext.privacy import (
    AdversaryView,
    FullParticipation,
    SecureNoise,
)
from flower_ext.privacy.mechanisms.noised_sum import NoisedSum
from flower_ext.privacy.mechanisms.plan import Aggregate, RoundDiscarded, RoundMechanism
from flower_ext.privacy.mechanisms.run_facts import MethodTraits

log = getLogger("flwr")

_SPOILED_AT_FIRST = 3
"""Number of sums after which a run ends if all of them were spoiled, as later ones will be."""
_STATE, _SENSITIVITY, _ERROR = "sum.costs", "sensitivity", "approximation_error"


def weighted_sum(
    protocol: str | WeightingProtocol = "paillier",
) -> Callable[[RoundMechanism], WeightedSum]:
    """Return the ``sum=`` of a `FederatedStrategy` whose method is `UldpAvg` or `UldpSgd`.

    Each coordinate of a sum over silos equals that of ``UldpAvg(weighting="by-records")`` within
    the precision of ``protocol``. A round without all silos is discarded.

    Parameters
    ----------
    protocol : str or WeightingProtocol
        Settings of a protocol, or its name for default settings: ``"paillier"``
        (`PrivateWeighting`), or the name of an installed plug-in.
    """
    settings = load_protocol(protocol)() if isinstance(protocol, str) else protocol
    return partial(WeightedSum, settings)


class WeightedSum(Summation):
    """Sums of users' updates over silos, under weights that no party learns.

    Parameters
    ----------
    protocol : WeightingProtocol
    mechanism : NoisedSum
        That of the plan. Once the protocol is set up, it has the protocol's own costs in privacy.

    Raises
    ------
    InvalidValue
        The plan does not fit.
    """

    repeats = False  # keys, blinds and dither are secret
    brings_weights = True
    mechanism: NoisedSum

    def __init__(self, protocol: WeightingProtocol, mechanism: RoundMechanism) -> None:
        if not isinstance(mechanism, NoisedSum):
            raise InvalidValue(f"plan={type(mechanism).__name__}: expected a ReleasePlan of users")
        if mechanism.secure_sum is not None:
            raise InvalidValue(
                "noise_placement=SecureSum(…) of the plan: expected 'client', as private weighting "
                "has a secure sum of its own"
            )
        super().__init__(mechanism)
        self.protocol, self._plan = protocol, mechanism
        self.secure_sum, self.hidden_draw = protocol.secure_sum, protocol.hidden_draw
        self.disclosures = protocol.shown
        self._costs = {_SENSITIVITY: mechanism.sensitivity}
        self._num_silos = 0
        self._server: ServerEnd | None = None
        self._keys_lost = False
        self._spoiled: int | None = 0

    def check(self, method: MethodTraits, *, diagnostics: bool) -> None:
        """Refuse methods without silos or weights by records, and norms of hidden updates."""
        if method.num_silos is None or method.weighting != "by-records":
            raise InvalidValue(
                f"sum: expected none with weighting={method.weighting!r}, as private weights are "
                "by records; take UldpAvg(weighting='by-records')"
            )
        if diagnostics:
            raise InvalidValue("diagnostics=True: expected False, as norms of updates stay hidden")
        self._num_silos = method.num_silos
        # Refuse settings that do not fit the plan before the server asks a silo.
        self.protocol.server(self._plan, silos=self._num_silos, coordinates=1)

    def describe(self) -> str:
        """Return the protocol's line for the log."""
        return self.protocol.describe()

    def assumptions(self, view: AdversaryView) -> Sequence[str]:
        """Return the protocol's assumptions."""
        return self.protocol.assumptions(view)

    def connect(self, clients: Clients, model: Arrays) -> Mapping[str, float]:
        """Set up the protocol between the silos and the server."""
        started = time.monotonic()
        self._set_up(clients, model)
        return {"setup_seconds": time.monotonic() - started}

    def open(self, opening: Opening) -> OpenSum:
        """Encrypt the weights of the round's users.

        If a silo has lost its keys, the silos set up anew first, in a new secret order of users.

        Raises
        ------
        RoundDiscarded
            A silo did not answer for the new set-up, or for a secret draw.
        """
        population = opening.population
        assert isinstance(population, HiddenUsers)
        is_unnamed = self.hidden_draw or isinstance(self._plan.sampling, FullParticipation)
        step = "the new set-up"
        try:
            if self._keys_lost:
                self._set_up(opening.clients, opening.like)
                population.forget_order()
            step, started = "the secret draw of users", time.monotonic()
            users = None if is_unnamed else opening.cohort.units
            weights = self._connected.open_round(opening.number, users, Silos(opening.clients))
        except FederationNotReady as missing:
            self._keys_lost = self._keys_lost or self.hidden_draw != ""
            raise RoundDiscarded(f"{step} failed without a silo's answer: {missing}") from missing
        seconds = {"encryption_seconds": time.monotonic() - started}
        return OpenWeightedSum(self, opening, as_record(weights), seconds)

    def state(self) -> Mapping[str, Arrays]:
        """Return the protocol's costs in privacy beyond the plan's noise."""
        return {_STATE: {name: np.asarray(cost) for name, cost in self._costs.items()}}

    def restore(self, state: Mapping[str, Arrays]) -> None:
        """Keep the larger costs of the run's set-ups."""
        self._raise_costs({name: float(cost) for name, cost in state[_STATE].items()})

    def close(self, silo_sums: Mapping[int, bytes]) -> np.ndarray:
        """Decrypt a round's sum over all silos, of shape (coordinates,).

        Raises
        ------
        RoundDiscarded
            A silo's sum is missing, or the sum is spoiled.
        FederationNotReady
            The first sums of the run were all spoiled.
        """
        try:
            return self._connected.close_round(silo_sums)
        except IncompleteRound as missing:
            raise RoundDiscarded(f"{missing}; nothing was decrypted") from missing
        except OverflowError as error:
            raise self._discarding(f"{error}, or a silo sent what is no sum") from error

    def release(self, total: Arrays, like: Arrays) -> Aggregate:
        """Return the mean of a decrypted sum.

        Raises
        ------
        RoundDiscarded, FederationNotReady
            As `close`.
        """
        # C of every user, and what the encoding adds
        norms = self._plan.sampling.population * sum(self._costs.values())
        try:
            self.mechanism.refuse_spoiled(
                total, bound=norms * self._plan.clipping_norm, stddev=self._plan.noise_stddev
            )
        except RoundDiscarded as reason:
            raise self._discarding(str(reason)) from reason
        self._spoiled = None
        return self.mechanism.aggregate([total], cohort_size=1, noise=SecureNoise(), like=like)

    def keys_are_lost(self) -> None:
        """Let all silos set up anew before the next round, as one may have lost its keys."""
        self._keys_lost = True

    def check_sum(self, silo: int, data: bytes) -> None:
        """Refuse a silo's sum that is malformed or of another round."""
        self._connected.check_sum(silo, data)

    @property
    def sum_bytes(self) -> int:
        """Length of a silo's sum in bytes."""
        return self._connected.sum_bytes

    def _set_up(self, clients: Clients, model: Arrays) -> None:
        """Set up fresh keys, seeds and counts; the larger costs of all set-ups of a run count."""
        coordinates = sum(array.size for array in model.values())
        server = self.protocol.server(self._plan, silos=self._num_silos, coordinates=coordinates)
        self._raise_costs({_SENSITIVITY: server.sensitivity, _ERROR: server.approximation_error})
        server.set_up(Silos(clients))
        self._server, self._keys_lost = server, False

    def _raise_costs(self, costs: Mapping[str, float]) -> None:
        for name, cost in costs.items():
            self._costs[name] = max(self._costs.get(name, 0.0), cost)
        self.mechanism = replace(
            self._plan,
            sensitivity=self._costs[_SENSITIVITY],
            approximation_error=self._costs.get(_ERROR, 0.0),
        )

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

    @property
    def _connected(self) -> ServerEnd:
        if self._server is None:
            raise ProtocolError("a round before the set-up: call connect first")
        return self._server


class OpenWeightedSum(OpenSum):
    """The weighted sum of one round, whose weights are encrypted."""

    def __init__(
        self,
        summation: WeightedSum,
        opening: Opening,
        weights: ArrayRecord,
        seconds: Mapping[str, float],
    ) -> None:
        self._summation, self._opening, self._weights = summation, opening, weights
        self.cohort = opening.cohort
        self.measures = dict(seconds)

    def request(self, partition: int) -> Mapping[str, ArrayRecord]:
        """Return the encrypted weights, the same for all silos."""
        return {WEIGHTED: self._weights}

    def read(self, reply: Message) -> Update:
        """Return a silo's masked sum of this round, or its notice that it has lost its keys."""
        arrays = records.read_answer(reply, records.UPDATE)
        if set(arrays) == {LOST} and records.read_bytes(arrays, LOST, 1) == b"\0":
            return Update(arrays, {})
        if set(arrays) != {SUM}:
            raise RefusedReply(f"arrays {sorted(arrays)}: expected {SUM!r}")
        data = records.read_bytes(arrays, SUM, self._summation.sum_bytes)
        try:
            silo = self._opening.clients.exchange.partition_of(reply)
            self._summation.check_sum(silo, data)
        except (ProtocolError, ValueError) as error:
            raise RefusedReply(str(error)) from error
        return Update(arrays, records.read_metrics(reply))

    def aggregate(self, contributions: Iterable[tuple[int, Update]]) -> Aggregate:
        """Decrypt the sum over all silos, and release its mean.

        Raises
        ------
        RoundDiscarded
            A silo's sum is missing, a silo has lost its keys, or the sum is spoiled.
        FederationNotReady
            The first sums of the run were all spoiled.
        """
        received = dict(contributions)
        if lost := [silo for silo, update in received.items() if LOST in update.arrays]:
            self._summation.keys_are_lost()
            raise RoundDiscarded(
                f"silos {lost} have lost their keys, so nothing was decrypted; all silos set up "
                "anew before the next round: name a state-folder in the node config, so that keys "
                "outlive the SuperNode"
            )
        started = time.monotonic()
        total = self._summation.close(
            {silo: update.arrays[SUM].tobytes() for silo, update in received.items()}
        )
        seconds = time.monotonic() - started
        self.measures = {**self.measures, "decryption_seconds": seconds}
        like = self._opening.like
        released = self._summation.release(_shaped(total, like), like)
        return replace(released, answered=len(received))


def _shaped(total: np.ndarray, like: Arrays) -> dict[str, np.ndarray]:
    """Return all coordinates as arrays, in the order of their names."""
    names = sorted(like)
    ends = np.cumsum([like[name].size for name in names])[:-1]
    parts = zip(names, np.split(total, ends), strict=True)
    return {name: part.reshape(like[name].shape) for name, part in parts}

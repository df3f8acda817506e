"""Read the strategy, the mods and their parameters from the live objects of an app.

The check knows only the classes and functions of Flower and of this package. A subclass that the
app defines counts as unknown, because its methods may do anything.
"""

import math
import sys
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from inspect import isfunction, isroutine
from typing import Any

from flwr.clientapp import ClientApp
from flwr.clientapp.mod import LocalDpMod

from flower_ext.federation import FederatedStrategy
from flower_ext.federation.client.app import CohortApp
from flower_ext.federation.server.run_guarantees import claims_of, summary_of
from flower_ext.privacy import (
    AdversaryView,
    Guarantee,
    Release,
    SecureNoise,
    privacy_loss_of,
    secure_generator,
)
from flower_ext_check.claims import Claim, claims_of_objects, is_proved
from flower_ext_check.held_run import TRAIN
from flower_ext_check.instruments import Instruments
from flower_ext_check.mechanisms import Mechanism, Noise, gaussian_release, mechanism_of
from flower_ext_check.observed import Observed

SERVER_SIDE = "DifferentialPrivacyServerSideFixedClipping"
CLIENT_SIDE = "DifferentialPrivacyClientSideFixedClipping"
SERVER_ADAPTIVE = "DifferentialPrivacyServerSideAdaptiveClipping"
CLIENT_ADAPTIVE = "DifferentialPrivacyClientSideAdaptiveClipping"
_PRIVATE_STRATEGIES = (SERVER_SIDE, CLIENT_SIDE, SERVER_ADAPTIVE, CLIENT_ADAPTIVE)
FIXED_MOD, ADAPTIVE_MOD = "fixedclipping_mod", "adaptiveclipping_mod"
LOCAL_MOD, OUR_MOD = LocalDpMod.__name__, "client_level_dp_mod"
PROTECTING_MODS = (LOCAL_MOD, FIXED_MOD, ADAPTIVE_MOD, OUR_MOD)
SECURE_SUM_MODS = frozenset({"secagg_mod", "secaggplus_mod"})
SILENT_MODS = frozenset({"arrays_size_mod", "message_size_mod"})
"""Mods of Flower that change no message."""
AVERAGES = frozenset({"FedAvg", "FedAvgM", "FedAdam", "FedYogi", "FedAdagrad", "FedProx"})
"""Strategies of Flower that compute the model from the mean of the replies."""
APP = "app"
_KNOWN_PACKAGES = frozenset(
    {
        *("flwr", "flower_ext", "flower_ext_consortium"),
        *("dataclasses", "abc", "typing", "builtins", "contextlib", "functools"),
    }
)


@dataclass(frozen=True, kw_only=True)
class Part:
    """A strategy or a mod: its name, and where it is defined, "flwr", "flower_ext" or "app"."""

    name: str
    origin: str


@dataclass(frozen=True, kw_only=True)
class AppTraits:
    """Everything that the check recognised in an app."""

    strategies: Sequence[Part]
    mods: Sequence[Part]
    has_task: bool
    """True if a `Task` of this package made the ClientApp."""
    noise: Noise | None
    flower_release: Release | None
    """One round of Flower's mechanism; None if it adds no noise, or if the app does not use it."""
    mechanism: Mechanism
    """The mechanism of this package's strategy; a `Mechanism` without noise if there is none."""
    replaced_parts: Sequence[str]
    """Parts of a strategy of this package that the app has replaced."""
    guarantees: Sequence[Guarantee]
    """Guarantees of this package after the planned rounds."""
    guarantees_so_far: Sequence[Guarantee]
    """Guarantees of this package after the observed rounds."""
    planned_rounds: int
    """Number of training rounds of the whole run."""
    claims: Sequence[Claim]
    local_mod: Mapping[str, float]
    """Arguments of a `LocalDpMod`; empty if the app has no such mod."""
    weight_key: str
    """Name of the metric by which the strategy weighs replies; "" if it weighs by no metric."""
    secure_noise: bool
    engines_per_client: int
    """The largest number of privacy engines of Opacus that one client made."""

    @property
    def protects_public_update(self) -> bool:
        """True if uploads of a held run (see `held_run`) show noise, and almost no training."""
        return self.mechanism.protects_public_update or not self.has_task

    @property
    def rounds_alike(self) -> bool:
        """True if every round of a held run has noise with the standard deviation in ``noise``."""
        if self.has(FederatedStrategy.__name__) and not self.mechanism.rounds_alike:
            return False
        return not (self.has(SERVER_ADAPTIVE) or self.has(CLIENT_ADAPTIVE))

    @property
    def stated_guarantee(self) -> Guarantee | None:
        """The provable guarantee whose ε the check compares with its measurements.

        Its adversary sees the released models or, if the app has no such guarantee, each upload.
        None if the app has neither guarantee.
        """
        for view in (AdversaryView.RELEASED_MODELS, AdversaryView.EACH_UPLOAD):
            for claim in self.guarantees:
                if claim.view is view and is_proved(claim):
                    return claim
        return None

    def has(self, name: str) -> bool:
        """Return True if the app uses the strategy or mod ``name`` of Flower or of this package."""
        return any(p.name == name and p.origin != APP for p in (*self.strategies, *self.mods))

    @property
    def is_ours(self) -> bool:
        """True if this package's strategy makes the releases, and the app defines no strategy."""
        return self.has(FederatedStrategy.__name__) and not any(
            part.origin == APP for part in self.strategies
        )

    def flower_epsilon(self, rounds: int, delta: float) -> float | None:
        """Return ε of ``rounds`` releases that each equal ``flower_release``; None if that is None.

        The ε is valid unless a finding refutes it.
        """
        if self.flower_release is None:
            return None
        return privacy_loss_of({self.flower_release: rounds}, delta=delta).epsilon


def traits_of(instruments: Instruments, client: ClientApp, observed: Observed) -> AppTraits:
    """Return what the app's live objects show after a run."""
    chain: list[Any] = instruments.strategies
    mods = instruments.mods.get(TRAIN, [])
    planned = max(observed.planned_rounds, observed.rounds)
    federated = next((s for s in chain if type(s) is FederatedStrategy), None)
    local = next((mod for mod in mods if type(mod) is LocalDpMod), None)
    noise, release = _flower_noise(instruments.initial_strategies, local)
    mechanism = Mechanism() if federated is None else mechanism_of(federated, planned)
    guarantees = [] if federated is None else _guarantees(federated, planned)
    return AppTraits(
        strategies=[_part(type(strategy)) for strategy in chain],
        mods=[_part(mod) for mod in mods],
        has_task=isinstance(client, CohortApp),
        noise=mechanism.noise or noise,
        flower_release=release,
        mechanism=mechanism,
        replaced_parts=_replaced_parts(federated, client),
        guarantees=guarantees,
        planned_rounds=planned,
        guarantees_so_far=[] if federated is None else federated.guarantees(),
        claims=claims_of_objects(chain, local, guarantees, observed.rounds, planned),
        local_mod={} if local is None else dict(vars(local)),
        weight_key=str(getattr(chain[-1], "weighted_by_key", "")) if chain else "",
        secure_noise=federated is not None
        and isinstance(federated.run.options.noise("check"), SecureNoise),
        engines_per_client=max(instruments.engines.values(), default=0),
    )


def _part(thing: Any) -> Part:
    kind = thing if hasattr(thing, "__qualname__") else type(thing)
    module, name = str(kind.__module__), str(kind.__qualname__)
    package, outer = module.partition(".")[0], name.partition(".")[0]
    known = package in ("flwr", "flower_ext") and hasattr(sys.modules.get(module), outer)
    return Part(name=outer, origin=package if known else APP)


def _flower_noise(
    chain: Sequence[Any], local: LocalDpMod | None
) -> tuple[Noise | None, Release | None]:
    if local is not None:
        stddev = math.inf
        if local.epsilon and local.delta:
            factor = math.sqrt(2 * math.log(1.25 / local.delta))
            stddev = local.sensitivity * factor / local.epsilon
        noise = Noise(clipping_norm=local.clipping_norm, upload_stddev={0: stddev})
        return noise, gaussian_release(stddev / local.clipping_norm)
    for strategy in chain:
        if _part(type(strategy)).name in _PRIVATE_STRATEGIES:
            multiplier, cohort = strategy.noise_multiplier, strategy.num_sampled_clients
            norm = strategy.clipping_norm
            noise = Noise(
                clipping_norm=norm,
                release_stddev=multiplier * norm / cohort,
                upload_stddev={},
                divisor=cohort,
            )
            return noise, gaussian_release(multiplier)
    return None, None


def _replaced_parts(strategy: FederatedStrategy | None, client: ClientApp) -> list[str]:
    """Return the names of parts of this package's strategy and ClientApp that the app replaced."""
    parts = [client, *client.cohort_answers.values()] if isinstance(client, CohortApp) else []
    if strategy is not None:
        run = strategy.run
        parts += [strategy, run, run.options, run.plan, run.mechanism]
        parts += [run.summation, run.population]
        # The method may be the app's, except for the parts that state the guarantee.
        stating = ("claims", "mechanism", "complete_summary", "population", "disclosures")
        parts += [getattr(type(run.method), name) for name in stating]
    names = [
        getattr(part, "__qualname__", type(part).__qualname__)
        for part in parts
        if _origin(part) == APP
    ]
    for part in parts:
        kind, values = type(part), getattr(part, "__dict__", {})
        if isroutine(part) or isinstance(part, partial):
            continue
        names += [f"{kind.__name__}.{n}" for n in values if isroutine(getattr(kind, n, None))]
        names += [
            f"{base.__name__}.{name}"
            for base in kind.__mro__
            for name, value in vars(base).items()
            if isfunction(value) and _origin(value) == APP
        ]
    return list(dict.fromkeys(names))


def _origin(thing: Any) -> str:
    """Return the package that defines ``thing``; `APP` if the check does not know the package."""
    while isinstance(thing, partial):
        thing = thing.func
    kind = thing if isroutine(thing) or isinstance(thing, type) else type(thing)
    package = str(kind.__module__).partition(".")[0]
    return package if package in _KNOWN_PACKAGES else APP


def _guarantees(strategy: FederatedStrategy, rounds: int) -> list[Guarantee]:
    """Return the guarantees that the app will have after ``rounds`` rounds.

    The function draws cohorts for the rounds that the app has not run.
    """
    run = strategy.run
    ahead, generator = deepcopy(run.population), secure_generator()
    while ahead.participations.rounds < rounds:
        cohort = ahead.draw(generator)
        size = len(cohort.partitions)
        ahead.count(cohort.units, size, needed=size)
    for sums in run.query_sums:
        while ahead.participations.answers[sums.query.name] < sums.query.times:
            sums.count_answer(ahead.participations)
    return claims_of(run, replace(summary_of(run), participations=ahead.participations))

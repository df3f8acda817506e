"""Read a mechanism's clipping bound, noise and releases from the objects of a running app."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from flower_ext.federation import FederatedStrategy
from flower_ext.federation.claims import summary_of
from flower_ext.federation.run import Run
from flower_ext.privacy import (
    FullParticipation,
    NeighboringRelation,
    PerturbationPlan,
    RecordLevelPlan,
    Release,
)
from flower_ext.privacy.mechanisms.protections import OutputPerturbation
from flower_ext.privacy.plans.release_mechanism import (
    AdaptiveRelease,
    ReleaseMechanism,
    SpacedRelease,
)
from flower_ext.privacy.theorems.upcycled import sensitivity

_LARGEST_COHORT = 1000


@dataclass(frozen=True, kw_only=True)
class Noise:
    """Clipping and Gaussian noise, as the parameters of the app's live object promise them."""

    clipping_norm: float
    release_stddev: float = 0.0
    """Standard deviation of the noise in a coordinate of the released mean; 0 if unknown."""
    upload_stddev: Mapping[int, float]
    """The same for an upload, by the size of the cohort; the key 0 stands for all other sizes."""
    cohort: float = 0.0
    """Number by which the sum of updates is divided; 0 if unknown."""
    bounds_models: bool = False
    """Clients clip their whole models, of which two are at most twice ``clipping_norm`` apart."""
    steps: int = 0
    """Number of noised local steps in an upload; 0 if the noise is added to the whole upload."""

    def of_upload(self, cohort: int) -> float:
        """Return the noise's standard deviation in an upload if a round has ``cohort`` clients."""
        return self.upload_stddev.get(cohort, self.upload_stddev.get(0, 0.0))


def promised(noise: Noise | None) -> str:
    """Describe the clipping and the noise that the app's parameters promise."""
    if noise is None:
        return "none that this check knows"
    uploads = [value for value in noise.upload_stddev.values() if value]
    if uploads:
        return f"clip {noise.clipping_norm:g}, noise {max(uploads):.4g} in each upload"
    return f"clip {noise.clipping_norm:g}, noise {noise.release_stddev:.4g} in the released mean"


@dataclass(frozen=True, kw_only=True)
class Declared:
    """The equal, independent releases from which an app of this package computes its stated ε."""

    release: Release
    count: int
    """Number of such releases in the whole run."""
    moves: float
    """Largest distance by which one unit moves the sum, upload or local step that is noised."""
    besides: Mapping[Release, int] = field(default_factory=dict)
    """Other releases of the run, and how often each is made. The check does not measure them."""


@dataclass(frozen=True, kw_only=True)
class Mechanism:
    """The mechanism of a `FederatedStrategy` in its first round, as far as the check knows it."""

    noise: Noise | None = None
    """None if no message shows the noise alone."""
    declared: Declared | None = None
    """None if the stated ε does not follow from equal releases of Gaussian noise."""
    unmeasured: str = ""
    """The reason why the check cannot measure the noise; "" without such a reason."""
    holds: bool = True
    """In held runs, a public update replaces each client's before the client protects it."""
    of_units: bool = False
    """An upload is a sum over privacy units, and each unit's part is clipped by itself."""
    rounds_alike: bool = False
    """Every round has the same bound and noise, whatever earlier rounds released."""


def mechanism_of(strategy: FederatedStrategy, rounds: int) -> Mechanism:
    """Return the mechanism of a strategy that runs for ``rounds`` rounds."""
    run, mechanism = strategy.run, strategy.run.mechanism
    if isinstance(mechanism, ReleaseMechanism):
        return _of_sums(run, mechanism, rounds)
    if isinstance(mechanism, RecordLevelPlan):
        return _of_local_models(mechanism, rounds)
    if isinstance(mechanism, PerturbationPlan):
        return _of_perturbation(run, mechanism, rounds)
    protection = mechanism.protection(summary_of(run), 1)
    return Mechanism(
        holds=protection is None or protection.hides_failures,
        unmeasured=f"the noise of {type(mechanism).__name__} is inside the training on the client, "
        "and no message shows it alone"
        if mechanism.delta is not None
        else "",
    )


def _of_sums(run: Run, mechanism: ReleaseMechanism, rounds: int) -> Mechanism:
    """Return the mechanism of a plan that releases noised sums of uploads."""
    if isinstance(mechanism, AdaptiveRelease):
        mechanism = replace(mechanism, update_norm=mechanism.clipping.initial)
    cohort, in_sum, count = mechanism.sampling.expected_cohort_size, mechanism.noise_stddev, rounds
    moves = mechanism.clipping_norm * mechanism.sensitivity
    if isinstance(mechanism, SpacedRelease):
        # All rounds are one release. Only the first round's noise is independent of earlier rounds.
        first, count = float(mechanism.strategy.inverse(1)[0]), 1
        moves *= in_sum * first / (mechanism.noise_multiplier * mechanism.clipping_norm)
        in_sum *= first
    uploads = {}
    if not (mechanism.noised_by_server or mechanism.secure_sum):
        sizes = range(1, min(mechanism.sampling.population, _LARGEST_COHORT) + 1)
        uploads = {size: mechanism.client_noise_stddev(size) for size in sizes}
    besides = {sums.release: sums.query.times for sums in run.query_sums}
    return Mechanism(
        noise=Noise(
            clipping_norm=mechanism.clipping_norm,
            release_stddev=in_sum / cohort,
            upload_stddev=uploads,
            cohort=cohort,
        ),
        declared=Declared(release=mechanism.release, count=count, moves=moves, besides=besides),
        of_units=run.method.bounds_units,
        rounds_alike=not isinstance(mechanism, AdaptiveRelease | SpacedRelease),
    )


def _of_local_models(plan: RecordLevelPlan, rounds: int) -> Mechanism:
    """Return the mechanism of a plan whose clients add noise to their local models.

    If the plan has local steps, they add it in each step; otherwise, to the whole model.
    """
    steps, moves, releases, number = plan.steps, 2 * plan.clipping_norm, rounds, 0
    if steps is not None:
        moves, number = steps.sensitivity, steps.local_steps
        releases *= steps.uses_per_round
    return Mechanism(
        noise=Noise(
            clipping_norm=plan.clipping_norm,
            upload_stddev={0: plan.upload_stddev},
            bounds_models=True,
            steps=number,
        ),
        declared=_declared(plan.noise_stddev, moves, releases),
    )


def _of_perturbation(run: Run, plan: PerturbationPlan, rounds: int) -> Mechanism:
    """Return the mechanism of a plan whose clients perturb their local models."""
    perturbation = plan.perturbation
    if not isinstance(perturbation, OutputPerturbation):
        return Mechanism(
            holds=False,
            unmeasured="objective perturbation adds its noise, which is not Gaussian, to the "
            "objective that a client minimises, and no message shows it alone",
        )
    objective, sizes = plan.objective_in(summary_of(run)), run.num_examples.values()
    moves = max((sensitivity(perturbation, objective, size) for size in sizes), default=math.inf)
    return Mechanism(
        noise=Noise(
            clipping_norm=perturbation.clipping_norm,
            upload_stddev={0: perturbation.noise_stddev},
            bounds_models=True,
        ),
        declared=_declared(perturbation.noise_stddev, moves, rounds),
    )


def _declared(stddev: float, moves: float, count: int) -> Declared | None:
    release = gaussian_release(stddev / moves)
    return None if release is None else Declared(release=release, count=count, moves=moves)


def gaussian_release(noise_multiplier: float) -> Release | None:
    """Return a Gaussian release to which every unit contributes.

    None if the noise multiplier is not positive, or is infinite.
    """
    if not 0 < noise_multiplier < math.inf:
        return None
    return Release(
        sampling=FullParticipation(1),
        noise_multiplier=noise_multiplier,
        relation=NeighboringRelation.REPLACE_SPECIAL,
    )

"""Read a mechanism's clipping bound, noise and releases from the objects of a running app."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from flower_ext.federation import FederatedStrategy
from flower_ext.federation.server.run_guarantees import summary_of
from flower_ext.privacy import FullParticipation, GroupPlan, NeighboringRelation, Release
from flower_ext.privacy.mechanisms.noised_sum import NoisedSum
from flower_ext.privacy.mechanisms.protections import ClipSteps, ObjectivePerturbation
from flower_ext.privacy.plans.release_mechanism import AdaptiveRelease, SpacedRelease
from flower_ext_check.noised_value import noised_value

_LARGEST_COHORT = 1000


@dataclass(frozen=True, kw_only=True)
class Noise:
    """The clipping and the Gaussian noise that the parameters of an app's mechanism promise."""

    clipping_norm: float
    release_stddev: float = 0.0
    """Standard deviation of the noise in a coordinate of the released mean; 0 if unknown."""
    upload_stddev: Mapping[int, float]
    """Standard deviation of an upload coordinate's noise, by cohort size; key 0: all others."""
    divisor: float = 0.0
    """Number by which the sum of updates is divided; 0 if unknown."""
    bounds_models: bool = False
    """True if clients clip models, so that two models differ by at most 2 ``clipping_norm``."""
    in_steps: bool = False
    """True if each local step adds noise, so that an upload has the noise of all its steps."""

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
    sensitivity: float
    """Largest distance by which one unit moves the sum, upload or local step that is noised."""
    stddev: float
    """Standard deviation of the noise on that sum, upload or local step."""
    other_queries: Mapping[Release, int] = field(default_factory=dict)
    """Releases of the run's queries, and how often each is made; the check measures no query."""


@dataclass(frozen=True, kw_only=True)
class Mechanism:
    """The mechanism of a `FederatedStrategy` in its first round, as far as the check knows it."""

    noise: Noise | None = None
    """None if the check cannot see the noise apart from the training, or if there is none."""
    declared: Declared | None = None
    """None if the stated ε does not follow from equal releases of Gaussian noise."""
    unmeasured: str = ""
    """The reason why the check cannot measure the noise; "" without such a reason."""
    protects_public_update: bool = True
    """True if the uploads of a held run show the noise, and almost nothing that a client learnt."""
    of_units: bool = False
    """True if an upload is a sum over privacy units, and each unit's part is clipped by itself."""
    rounds_alike: bool = False
    """True if every round has the same bound and noise, whatever earlier rounds released."""


def mechanism_of(strategy: FederatedStrategy, rounds: int) -> Mechanism:
    """Return the mechanism of a strategy that runs for ``rounds`` rounds."""
    run, mechanism, summary = strategy.run, strategy.run.mechanism, summary_of(strategy.run)
    if isinstance(mechanism, AdaptiveRelease):  # later rounds have other norms
        mechanism = replace(mechanism, adaptive_norm=mechanism.clipping.initial_norm)
    sampling, protection = mechanism.sampling, mechanism.protection(summary, 1)
    sizes = range(1, min(sampling.population, _LARGEST_COHORT) + 1)
    values = [noised_value(mechanism, summary, size) for size in sizes]
    if (value := values[0]) is None:
        if isinstance(protection, ObjectivePerturbation):
            why = (
                "objective perturbation adds its noise, which is not Gaussian, to the objective "
                "that a client minimises, and no message shows it alone"
            )
        elif isinstance(mechanism, GroupPlan):
            why = (
                "the noise of GroupPlan is inside the training on the client, and no message shows "
                "it alone"
            )
        elif mechanism.delta is None:
            why = ""
        else:
            why = (
                f"the check does not know to which value {type(mechanism).__name__} adds noise, "
                "because it is no mechanism of flower_ext"
            )
        in_upload = protection is None or protection.hides_failures
        return Mechanism(protects_public_update=in_upload, unmeasured=why)
    release, count = mechanism.release, rounds * value.per_round
    uploads = {size: of.upload_stddev for size, of in zip(sizes, values, strict=True) if of}
    noise = Noise(clipping_norm=value.clipping_norm, upload_stddev=uploads)
    if release is None:  # each client protects its whole model, in every cohort alike
        release = gaussian_release(value.stddev / value.sensitivity)
        noise = replace(
            noise,
            upload_stddev={0: value.upload_stddev},
            bounds_models=True,
            in_steps=isinstance(protection, ClipSteps),
        )
    else:
        cohort = sampling.expected_cohort_size
        noise = replace(noise, release_stddev=value.stddev / cohort, divisor=cohort)
    is_spaced, declared = isinstance(mechanism, SpacedRelease), None
    if release is not None:
        declared = Declared(
            release=release,
            count=1 if is_spaced else count,  # all spaced rounds are one release
            sensitivity=value.sensitivity,
            stddev=value.stddev,
            other_queries=(mechanism.planned_answers if isinstance(mechanism, NoisedSum) else {}),
        )
    return Mechanism(
        noise=noise,
        declared=declared,
        of_units=not noise.bounds_models and run.method.bounds_units,
        rounds_alike=not (
            noise.bounds_models or is_spaced or isinstance(mechanism, AdaptiveRelease)
        ),
    )


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

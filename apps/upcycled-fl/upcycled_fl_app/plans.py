"""The plan of a run, which samples devices and perturbs their models, and the local training."""

from flower_ext.federation import configured
from flower_ext.privacy import (
    NonPrivatePlan,
    ObjectivePerturbation,
    OutputPerturbation,
    PerturbationPlan,
)
from flower_ext.training import LocalTraining
from upcycled_fl_app.settings import Settings
from upcycled_fl_app.task import loss_of

NEWTON_TOLERANCE = 1e-10


def plan_of(settings: Settings) -> NonPrivatePlan | PerturbationPlan:
    """Return the plan that samples devices and perturbs their local models."""
    cohorts, perturbation = configured.sampling(settings), perturbation_of(settings)
    if perturbation is None:
        return configured.non_private_plan(settings, cohorts)
    return PerturbationPlan(
        sampling=cohorts,
        perturbation=perturbation,
        objective=loss_of(settings),
        delta=settings.delta,
    )


def perturbation_of(settings: Settings) -> OutputPerturbation | ObjectivePerturbation | None:
    """Return the mechanism that perturbs local models; None without privacy."""
    match settings.perturbation:
        case "output":
            return OutputPerturbation(
                clipping_norm=settings.clipping_norm,
                noise_stddev=settings.noise_stddev,
            )
        case "objective":
            return ObjectivePerturbation(rate=settings.noise_rate)
        case _:
            return None


def local_training(settings: Settings) -> LocalTraining:
    """Return the training of every client, whatever the method."""
    weight, method = settings.proximal_weight, settings.method
    exact = settings.solver == "newton"
    return configured.training(
        settings,
        proximal_weight=weight or (0.1 if method == "fedprox" else 0.0),
        tolerance=NEWTON_TOLERANCE if exact else 0.0,
        **({"momentum": 0.0} if method == "pfedme" else {}),
    )

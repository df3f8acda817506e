"""The plan of a run, and the training values that depend on the method."""

from flower_ext.algorithms import UldpGroup
from flower_ext.algorithms.uldp import theory_learning_rate
from flower_ext.federation import Method, configured
from flower_ext.privacy import FullParticipation, NonPrivatePlan, PoissonSampling, PrivacyPlan
from flower_ext.training import DpSgdTraining
from uldp_fl_app.settings import Settings
from uldp_fl_app.task import num_users_of

PRIVATE = ("uldp-avg-private", "uldp-sgd-private")


def plan_of(settings: Settings, method: Method) -> PrivacyPlan:
    """Return the plan of a run.

    Without privacy (``method="default"``) it adds no noise; ULDP-GROUP-k makes its plan itself.
    """
    if settings.method == "default":
        return NonPrivatePlan(sampling=FullParticipation(settings.num_silos))
    if isinstance(method, UldpGroup):
        return method.plan(settings.delta)
    users, rate = num_users_of(settings), settings.user_sampling_rate
    return configured.release_plan(
        settings,
        FullParticipation(users) if rate == 1 else PoissonSampling(users, rate),
        of_users=True,
    )


def dp_sgd(settings: Settings) -> DpSgdTraining:
    """Return the settings of a silo's DP-SGD.

    On average, it uses each record ``local_epochs`` times.
    """
    rate = settings.record_sampling_rate
    return DpSgdTraining(
        steps=max(1, round(settings.local_epochs / rate)),
        sampling_rate=rate,
        batch_size=settings.expected_batch_size,
        learning_rate=settings.learning_rate,
        clipping_norm=settings.record_clipping_norm,
        noise_multiplier=settings.noise_multiplier,
    )


def server_learning_rate(settings: Settings) -> float:
    """Return the server's learning rate: the configured one, if it is not 0.

    At 0, the rate is 1 for ULDP-NAIVE, ULDP-GROUP-k and the method without privacy, and the paper's
    rate for all other methods.
    """
    method, rate = settings.method, settings.server_learning_rate
    if rate or method in ("uldp-naive", "uldp-group", "default"):
        return rate or 1.0
    epochs = 1 if method.startswith("uldp-sgd") else settings.local_epochs
    silos = settings.num_silos
    return theory_learning_rate(num_silos=silos, num_users=num_users_of(settings), epochs=epochs)

"""The plan of a run: noise on uploads or in local steps, or no privacy."""

from dp_ditto_app.settings import Settings
from flower_ext.federation import configured
from flower_ext.privacy import ClippedSteps, FullParticipation, NonPrivatePlan, RecordLevelPlan
from flower_ext.runs.settings import UnfitSetting
from flower_ext.training import LocalTraining

WITHOUT_PRIVACY = ("ditto", "pfedme", "fedamp", "apple", "fedala")


def plan_of(settings: Settings, rounds: int) -> RecordLevelPlan | NonPrivatePlan:
    """Return the plan of ``rounds`` rounds, in each of which all clients take part.

    The setting ``noise`` says whether the plan clips and noises uploads or local steps. Methods
    without privacy get a plan without noise.
    """
    everyone = FullParticipation(settings.clients)
    if settings.method in WITHOUT_PRIVACY:
        return configured.non_private_plan(settings, everyone)
    if settings.weighting != "clients":
        raise UnfitSetting(
            f"run-config weighting={settings.weighting!r} with method={settings.method!r}: "
            "expected 'clients', because a private mean weights all clients equally"
        )
    size, local, steps = settings.examples_per_client, local_training(settings), None
    if settings.noise == "steps":
        steps = ClippedSteps(
            learning_rate=local.learning_rate,
            gradient_clipping_norm=settings.gradient_clipping_norm,
            num_examples=size,
            local_steps=local.num_steps(size),
            batch_size=min(local.batch_size, size),
        )
    return RecordLevelPlan.for_target(
        epsilon=settings.epsilon,
        delta=settings.delta,
        sampling=everyone,
        num_examples=size,
        rounds=rounds,
        clipping_norm=settings.clipping_norm,
        basis=settings.calibration,
        steps=steps,
    )


def local_training(settings: Settings) -> LocalTraining:
    """Return how clients train the model that they upload; a batch size of 0 means all examples."""
    size = settings.batch_size or settings.examples_per_client
    return configured.training(settings, batch_size=size)

"""Server side: make a plan and a strategy from the run configuration; write a run directory."""

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from dp2_fedsam_app.settings import Settings
from dp2_fedsam_app.task import task_of
from flower_ext.algorithms import (
    APFL,
    Centaur,
    DP2FedSAM,
    DPFedAvg,
    DPFedSAM,
    FedBN,
    FedPer,
    FedRep,
)
from flower_ext.federation import Method, configured
from flower_ext.privacy import NonPrivatePlan, ReleasePlan
from flower_ext.runs.settings import UnfitSetting
from flower_ext.training import Task

SHARED_MODEL = {
    "dp-fedavg": DPFedAvg,
    "dp-fedavg-ft": DPFedAvg,
    "dp-fedsam": DPFedSAM,
    "dp-fedsam-ft": DPFedSAM,
    "fedavg": DPFedAvg,
}
OWN_HEAD = "own-head"
PERSONAL_HEAD = {
    "centaur": Centaur,
    "dp2-fedsam": DP2FedSAM,
    "fedrep": FedRep,
    "p-fedsam": DP2FedSAM,
    OWN_HEAD: DP2FedSAM,
}
WITHOUT_PRIVACY = ("fedavg", "p-fedsam", OWN_HEAD)
WITHOUT_THEOREM = ("fedper", "fedbn", "apfl")

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the method that ``context.run_config`` names and leave a run directory with a report."""
    settings = configured.settings(Settings, context)
    plan, task = plan_of(settings), task_of(context)
    task.data(0)  # a missing data set ends the run here, with its message
    configured.start(grid, context, settings, task, method_of(settings, task), plan)


def plan_of(settings: Settings) -> ReleasePlan | NonPrivatePlan:
    """Return the plan that samples cohorts, clips and noises updates, and accounts for them."""
    cohorts = configured.sampling(settings)
    if settings.method in WITHOUT_PRIVACY:
        return configured.non_private_plan(settings, cohorts)
    if settings.calibration != "provable" and settings.method in WITHOUT_THEOREM:
        raise UnfitSetting(
            f"run-config calibration={settings.calibration!r} with method={settings.method!r}: "
            "expected 'provable', because no paper has a bound for this method"
        )
    return configured.release_plan(settings, cohorts)


def method_of(settings: Settings, task: Task) -> Method:
    """Return the method that the settings name."""
    method, radius = settings.method, settings.sam_radius
    if "sam" in method and radius == 0:
        raise UnfitSetting(
            f"run-config sam-radius={radius!r} with method={method!r}: expected a number > 0 "
            "(centaur, dp-fedavg and fedavg do without it)"
        )
    sgd, sam = configured.training(settings), configured.training(settings, sam_radius=radius)
    server = configured.server(settings)
    if method in SHARED_MODEL:
        local = sam if "sam" in method else sgd
        tuning = sgd if method.endswith("-ft") else None
        return SHARED_MODEL[method](local=local, fine_tuning=tuning, **server)
    if method == "fedper":
        return FedPer(local=sgd, **server)
    if method == "fedbn":
        return FedBN.for_model(task.model(), local=sgd, **server)
    if method == "apfl":
        return APFL(personal_weight=settings.apfl_weight, local=sgd, **server)
    head = configured.training(
        settings, epochs=settings.head_epochs, learning_rate=settings.head_learning_rate
    )
    extractor = sam if "sam" in method else sgd
    return PERSONAL_HEAD[method](
        head=head,
        extractor=configured.training(settings, epochs=0) if method == OWN_HEAD else extractor,
        adapt_before_evaluation=settings.adapt_before_evaluation,
        **server,
    )

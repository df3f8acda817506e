"""Server side: make a plan and a strategy from the run configuration; write a run directory."""

from functools import partial

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from flower_ext.algorithms import (
    Centaur,
    DP2FedSAM,
    DPFedAvg,
    DPFedSAM,
    UldpAvg,
    Upcycled,
)
from flower_ext.federation import Method, configured
from flower_ext.privacy import NonPrivatePlan, PoissonSampling, ReleasePlan
from flower_ext.runs.settings import UnfitSetting
from private_finetuning_app.settings import Settings
from private_finetuning_app.task import USERS, client_data, task_of

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
    "p-fedsam": DP2FedSAM,
    OWN_HEAD: DP2FedSAM,
}
WITHOUT_PRIVACY = ("fedavg", "p-fedsam", OWN_HEAD)

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the method that ``context.run_config`` names and leave a run directory with a report."""
    settings = configured.settings(Settings, context)
    method = settings.method
    if method in PERSONAL_HEAD and settings.tune == "head":
        raise UnfitSetting(
            f"run-config tune='head' with method={method!r}: its head is personal, and nothing "
            "would be left to share; expected tune='adapter' or 'all', or a method with one model "
            f"for all: {', '.join(SHARED_MODEL)}"
        )
    plan, task = plan_of(settings), task_of(context)
    client_data(settings, 0)  # missing data end the run here
    upcycled = partial(Upcycled, coefficient=settings.upcycling_coefficient)
    wrapper = upcycled if settings.upcycled else None
    configured.start(grid, context, settings, task, method_of(settings), plan, wrapper=wrapper)


def plan_of(settings: Settings) -> ReleasePlan | NonPrivatePlan:
    """Return the plan that samples cohorts, clips and noises updates, and accounts for them."""
    if settings.method in WITHOUT_PRIVACY:
        return configured.non_private_plan(settings, configured.sampling(settings))
    changes = {"rounds": -(-settings.rounds // 2)} if settings.upcycled else {}
    if settings.method == USERS:
        users = PoissonSampling(population=settings.num_users, rate=settings.sampling_rate)
        return configured.release_plan(settings, users, of_users=True, **changes)
    return configured.release_plan(settings, configured.sampling(settings), **changes)


def method_of(settings: Settings) -> Method:
    """Return the method that the settings name."""
    method, radius = settings.method, settings.sam_radius
    if "sam" in method and radius == 0:
        raise UnfitSetting(
            f"run-config sam-radius={radius!r} with method={method!r}: expected a number > 0 "
            "(centaur, dp-fedavg and fedavg do without it)"
        )
    sgd, sam = configured.training(settings), configured.training(settings, sam_radius=radius)
    server = configured.server(settings)
    if method == USERS:
        silos = settings.clients
        return UldpAvg(weighting="by-records", num_silos=silos, local=sgd, **server)
    if method in SHARED_MODEL:
        local, tuning = sam if "sam" in method else sgd, sgd if method.endswith("-ft") else None
        return SHARED_MODEL[method](local=local, fine_tuning=tuning, **server)
    head = configured.training(
        settings,
        epochs=settings.head_epochs,
        learning_rate=settings.head_learning_rate,
    )
    extractor = sam if "sam" in method else sgd
    if method == OWN_HEAD:
        extractor = configured.training(settings, epochs=0)
    adapt = settings.adapt_before_evaluation
    return PERSONAL_HEAD[method](
        head=head, extractor=extractor, adapt_before_evaluation=adapt, **server
    )

"""Server side: make a plan and a strategy from the run configuration; write a run directory."""

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from flower_ext.algorithms import DPFedAvg, UldpAvg
from flower_ext.federation import Method, configured
from flower_ext.privacy import NonPrivatePlan, PoissonSampling, ReleasePlan
from private_lm_app.public_trial import try_on_public_text
from private_lm_app.settings import Settings
from private_lm_app.task import AUTHORS, base_of, task_of

SCORES = (("accuracy", 0.0, 1.0), ("exact_match", 0.0, 1.0))
"""Scores of a secure evaluation, with their bounds; evaluation-loss-bound adds the loss."""
PUBLIC = "the base model was trained on texts that no guarantee covers: {}"

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the method that ``context.run_config`` names and leave a run directory with a report."""
    settings = configured.settings(Settings, context)
    plan, task = plan_of(settings), task_of(context)
    try_on_public_text(settings, task, base_of(settings))
    notes = {"data-source": PUBLIC.format(settings.base or "documentation of Python's modules")}
    configured.start(grid, context, settings, task, method_of(settings), plan, notes=notes)


def plan_of(settings: Settings) -> ReleasePlan | NonPrivatePlan:
    """Return the plan that samples cohorts, clips and noises updates, and accounts for them."""
    if settings.method == AUTHORS:
        authors = PoissonSampling(population=settings.num_users, rate=settings.sampling_rate)
        return configured.release_plan(settings, authors, of_users=True)
    cohorts = configured.sampling(settings)
    if settings.method == "dp-fedavg":
        return configured.release_plan(settings, cohorts, scores=SCORES)
    return configured.non_private_plan(settings, cohorts)


def method_of(settings: Settings) -> Method:
    """Return the method that the settings name."""
    local, server = configured.training(settings), configured.server(settings)
    if settings.method == AUTHORS:
        silos = settings.clients
        return UldpAvg(weighting="by-records", num_silos=silos, local=local, **server)
    if settings.method == "alone":
        # The shared adapters stay at zero. Each client trains a copy before its evaluation.
        return DPFedAvg(
            local=configured.training(settings, epochs=0),
            fine_tuning=configured.training(settings, epochs=settings.epochs_alone),
        )
    return DPFedAvg(local=local, **server)

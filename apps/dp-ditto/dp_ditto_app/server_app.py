"""Server side: make a plan and a strategy from the run configuration; write a run directory."""

from functools import partial

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from dp_ditto_app.planner import PILOT, PilotFile, parameter_count, pilot_of, planned_rounds
from dp_ditto_app.plans import WITHOUT_PRIVACY, local_training, plan_of
from dp_ditto_app.settings import Settings
from dp_ditto_app.task import task_of
from flower_ext.algorithms import Apple, DPDitto, FedALA, FedAMP, PFedMe
from flower_ext.federation import Method, configured
from flower_ext.runs.settings import UnfitSetting
from flower_ext.training import LocalTraining

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the method that ``context.run_config`` names and leave a run directory with a report."""
    settings = configured.settings(Settings, context)
    method = settings.method
    if settings.noise == "steps" and method not in ("dp-ditto", *WITHOUT_PRIVACY):
        raise UnfitSetting(
            f"run-config noise='steps' with method={method!r}: expected noise='upload', because "
            "with this method records also change an upload where noise in the steps does not hide "
            "them. For the paper's noise, set noise='upload' and calibration='published'"
        )
    task = task_of(context)
    for client in range(settings.clients):
        task.data(client)  # missing data, or a client with too few, end the run here
    pilot = pilot_of(settings, task)
    rounds = planned_rounds(settings, task, pilot, plan_of=partial(plan_of, settings))
    plan = plan_of(settings, rounds)
    disclosures, callbacks = [], []
    if pilot is not None:
        disclosures, callbacks = [PILOT], [PilotFile(pilot, parameter_count(task))]
    configured.start(
        grid,
        context,
        settings,
        task,
        method_of(settings),
        plan,
        disclosures=disclosures,
        planned_rounds=rounds,
        callbacks=callbacks,
    )


def method_of(settings: Settings) -> Method:
    """Return the method that the settings name."""
    local, rate = local_training(settings), settings.personal_learning_rate
    match settings.method.removeprefix("dp-"):
        case "ditto":
            personal = configured.training(
                settings,
                epochs=settings.personal_epochs,
                batch_size=local.batch_size,
                learning_rate=rate,
            )
            weight = settings.global_weight
            return DPDitto(global_weight=weight, personal_training=personal, local=local)
        case "pfedme":
            personal = LocalTraining(steps=settings.personal_steps, learning_rate=rate)
            return PFedMe(attraction=settings.attraction, personal_training=personal, local=local)
        case "fedamp":
            return FedAMP(
                attention_width=settings.attention_width,
                attraction=settings.cloud_attraction,
                local=local,
            )
        case "apple":
            return Apple(
                relation_learning_rate=settings.relation_learning_rate,
                penalty=settings.penalty,
                penalty_rounds=settings.rounds,
                local=local,
            )
        case _:
            return FedALA(
                weight_learning_rate=settings.weight_learning_rate,
                sample_fraction=settings.sample_fraction,
                local=local,
            )

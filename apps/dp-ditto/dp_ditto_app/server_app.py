"""Server side: the run configuration becomes a plan and a strategy; the run leaves a directory."""

from functools import partial

from flwr.app import Context, UserConfig
from flwr.serverapp import Grid, ServerApp

from dp_ditto_app.task import task_of
from flower_ext.algorithms import Apple, DPDitto, FedALA, FedAMP, PFedMe
from flower_ext.algorithms.ditto import PILOT, pilot_of, planned_rounds
from flower_ext.federation import FederatedStrategy, Method, configured, first_config
from flower_ext.privacy import FullParticipation, NonPrivatePlan, RecordLevelPlan
from flower_ext.runs import RunDirectory
from flower_ext.runs.settings import UnfitSetting, choice, integer, number
from flower_ext.training import LocalTraining
from flower_ext.training.models import parameter_count

WITHOUT_PRIVACY = ("ditto", "pfedme", "fedamp", "apple", "fedala")
METHODS = (*(f"dp-{method}" for method in WITHOUT_PRIVACY), *WITHOUT_PRIVACY)

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the method that ``context.run_config`` names and leave a run directory with a report."""
    config = first_config(context.run_config)
    method = choice(config, "method", METHODS)
    if config["noise"] == "steps" and method not in ("dp-ditto", *WITHOUT_PRIVACY):
        raise UnfitSetting(
            f"run-config noise='steps' with method={method!r}: expected noise='upload', because "
            "this method uploads more of a record than its gradients; calibration='published' "
            "is the noise of the paper"
        )
    task = task_of(context)
    for client in range(integer(config, "clients")):
        task.data(client)  # missing data, or a client with too few, end the run here
    pilot = pilot_of(config, task)
    rounds = planned_rounds(config, task, pilot, plan_of=partial(plan_of, config))
    plan = plan_of(config, rounds)

    def strategy(config: UserConfig, run: RunDirectory) -> FederatedStrategy:
        if pilot is not None:
            pilot.save(run.path / "pilot.json", dimension=parameter_count(task.model()))
        return strategy_of(plan, config, run)

    configured.start(grid, context, task, strategy, planned_rounds=rounds)


def plan_of(config: UserConfig, rounds: int) -> RecordLevelPlan | NonPrivatePlan:
    """Return the plan of ``rounds`` rounds with all clients, which clips uploads or local steps."""
    if config["method"] in WITHOUT_PRIVACY:
        everyone = FullParticipation(integer(config, "clients"))
        return configured.non_private_plan(config, sampling=everyone)
    return configured.record_level_plan(config, local_training(config), rounds=rounds)


def local_training(config: UserConfig) -> LocalTraining:
    """Return the training of the uploaded model; a batch size of 0 means all examples."""
    size = integer(config, "batch-size") or integer(config, "examples-per-client")
    return configured.training(config, batch_size=size)


def strategy_of(
    plan: RecordLevelPlan | NonPrivatePlan, config: UserConfig, run: RunDirectory
) -> FederatedStrategy:
    """Return the strategy of a run."""
    exposed = [PILOT] if config["planner"] == "pilot" else []
    options = configured.options(config, run, plan)
    return FederatedStrategy(method_of(config), exposed=exposed, **options)


def method_of(config: UserConfig) -> Method:
    """Return the method; all methods share the settings that they have."""
    local, rate = local_training(config), number(config, "personal-learning-rate")
    match str(config["method"]).removeprefix("dp-"):
        case "ditto":
            epochs, weight = integer(config, "personal-epochs"), number(config, "global-weight")
            personal = configured.training(
                config, epochs=epochs, batch_size=local.batch_size, learning_rate=rate
            )
            return DPDitto(global_weight=weight, personal_training=personal, local=local)
        case "pfedme":
            personal = LocalTraining(steps=integer(config, "personal-steps"), learning_rate=rate)
            attraction = number(config, "attraction")
            return PFedMe(attraction=attraction, personal_training=personal, local=local)
        case "fedamp":
            return FedAMP(
                attention_width=number(config, "attention-width"),
                attraction=number(config, "cloud-attraction"),
                local=local,
            )
        case "apple":
            return Apple(
                relation_learning_rate=number(config, "relation-learning-rate"),
                penalty=number(config, "penalty"),
                penalty_rounds=integer(config, "rounds"),
                local=local,
            )
        case _:
            return FedALA(
                weight_learning_rate=number(config, "weight-learning-rate"),
                sample_share=number(config, "sample-share"),
                local=local,
            )

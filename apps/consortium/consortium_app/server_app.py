"""Server side: release statistics or scores, or train a model; write a run directory."""

import json
from dataclasses import replace

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from consortium_app.settings import Settings
from consortium_app.tables import num_users_of, table_of
from consortium_app.task import BIAS, coefficients_of, joint_of, scales_of, task_of
from flower_ext.algorithms import UldpAvg
from flower_ext.federation import configured
from flower_ext.files import write_whole
from flower_ext.privacy import FullParticipation, PoissonSampling
from flower_ext.runs import RunDirectory
from flower_ext.runs.callbacks import Callback
from flower_ext.training import Task
from flower_ext_consortium.statistics import StatisticsFiles, UserStatistics

app = ServerApp()


class ModelFile(Callback):
    """Write the trained model to ``model.toml``, for a later run with ``method="scores"``.

    The file also has the settings that the coefficients depend on: the scales of the features, and
    the seed that chose the people whose rows test the model.
    """

    def __init__(self, settings: Settings) -> None:
        self._features = [*scales_of(settings)]  # refuses misspelt features before the run
        names = ("features", "standardise", "outcome", "seed")
        self._used = {name: getattr(settings, name) for name in names}

    def end(self, run: RunDirectory) -> None:
        """Write the coefficients of class 1 minus those of class 0."""
        if run.status not in ("completed", "budget-exhausted"):
            return
        from safetensors.numpy import load_file

        model = load_file(run.path / "model.safetensors")
        numbers = [model["bias"][1] - model["bias"][0], *(model["weight"][1] - model["weight"][0])]
        pairs = zip([BIAS, *self._features], numbers, strict=True)
        text = "; ".join(f"{name} {number:.6g}" for name, number in pairs)
        settings = {**self._used, "model": text}
        lines = [
            f"{name} = {json.dumps(value, ensure_ascii=False)}" for name, value in settings.items()
        ]
        content = ['title = "Coefficients of standardised features"', "", "[settings]", *lines, ""]
        write_whole(run.path / "model.toml", "\n".join(content).encode())


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Release the statistics or train the model that the settings name."""
    settings, task = configured.settings(Settings, context), task_of(context)
    if settings.dataset != "files":
        table_of(settings, 0)  # missing data end the run here
    everyone = FullParticipation(num_users_of(settings))
    run = _train if settings.method == "uldp-avg-w" else _release_statistics
    run(grid, context, settings, task, everyone)


def _release_statistics(
    grid: Grid, context: Context, settings: Settings, task: Task, everyone: FullParticipation
) -> None:
    """Release statistics, or the sums of a model's scores, in one round."""
    if settings.method == "scores":
        coefficients_of(settings)  # refuses an unfit model before the run
    # Statistics take one round, and a person's vector has norm 1, unlike an update.
    once = replace(settings, rounds=1, clipping_norm=1.0)
    plan = configured.release_plan(once, everyone, of_users=True)
    statistics = UserStatistics(num_silos=settings.num_silos)
    files = StatisticsFiles(joint_of(settings), statistics, plan)
    unscored = replace(settings, evaluate_every=0)
    configured.start(
        grid, context, unscored, task, statistics, plan, planned_rounds=1, callbacks=[files]
    )


def _train(
    grid: Grid, context: Context, settings: Settings, task: Task, everyone: FullParticipation
) -> None:
    """Train a model, and write it to a file."""
    model = ModelFile(settings)
    # `UldpAvg` divides by users and by silos, but the setting is a rate for the mean over users.
    rate = settings.server_learning_rate * settings.num_silos
    method = UldpAvg(
        num_silos=settings.num_silos,
        weighting="by-records",
        user_draw=settings.draws,
        local=configured.training(settings),
        **configured.server(settings, learning_rate=rate),
    )
    share = settings.user_sampling_rate
    sampling = everyone if share == 1 else PoissonSampling(everyone.population, share)
    plan = configured.release_plan(settings, sampling, of_users=True)
    configured.start(grid, context, settings, task, method, plan, callbacks=[model])

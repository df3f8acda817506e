"""Build the parts of a run from its settings, and start the run, in the ServerApp of any app.

An app's class of settings inherits the shared ones (`flower_ext.runs.shared_settings`)::

    @dataclass(frozen=True, kw_only=True)
    class Settings(RunSettings, CohortSettings, ReleaseSettings, TrainingSettings):
        ...

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        settings = configured.settings(Settings, context)
        plan = configured.release_plan(settings, configured.sampling(settings))
        method = DPFedAvg(local=configured.training(settings))
        configured.start(grid, context, settings, task, method, plan)

Each function raises `UnfitSetting` if settings contradict each other.
"""

from flower_ext.federation.configured.parts import (
    non_private_plan,
    release_plan,
    sampling,
    server,
    settings,
    training,
)
from flower_ext.federation.configured.starting import start

__all__ = [
    "non_private_plan",
    "release_plan",
    "sampling",
    "server",
    "settings",
    "start",
    "training",
]

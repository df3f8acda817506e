"""Server side: make a plan and a strategy from the run configuration; write a run directory."""

from functools import partial

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from flower_ext.algorithms import DPFedAvg, UldpAvg, UldpGroup, UldpNaive, UldpSgd
from flower_ext.federation import Method, configured
from flower_ext.runs.settings import UnfitSetting
from uldp_fl_app.plans import PRIVATE, dp_sgd, plan_of, server_learning_rate
from uldp_fl_app.private_weighting import private_sum_of
from uldp_fl_app.settings import Settings
from uldp_fl_app.task import SURVIVAL, group_size_of, num_users_of, task_of

OPENLY = {
    "uldp-avg": partial(UldpAvg, weighting="equal"),
    "uldp-avg-w": partial(UldpAvg, weighting="by-records"),
    "uldp-sgd": partial(UldpSgd, weighting="equal"),
    "uldp-sgd-w": partial(UldpSgd, weighting="by-records"),
    "uldp-naive": UldpNaive,
}
SHARED = {
    **OPENLY,
    "uldp-avg-private": partial(UldpAvg, weighting="by-records"),
    "uldp-sgd-private": partial(UldpSgd, weighting="by-records"),
}
WHY_PLAIN = {
    **dict.fromkeys(PRIVATE, "its weighted sum is a secure sum already"),
    "uldp-group": "its noise is in every step of a silo's DP-SGD, and a sum of uploads adds none",
    "default": "a secure sum adds up clipped and noised updates",
}
"""By method, the reason why a secure sum cannot add its uploads."""

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the method that ``context.run_config`` names and leave a run directory with a report."""
    settings = configured.settings(Settings, context)
    if settings.method == "uldp-group" and settings.dataset in SURVIVAL:
        raise UnfitSetting(
            f"run-config method='uldp-group' with dataset={settings.dataset!r}: its loss compares "
            "patients, but DP-SGD needs a mean over patients; expected a different method"
        )
    if settings.method not in OPENLY and settings.aggregation != "plain":
        raise UnfitSetting(
            f"run-config aggregation='secure' with method={settings.method!r}: expected 'plain', "
            f"because {WHY_PLAIN[settings.method]}"
        )
    task = task_of(context)  # missing data end the run here
    method = method_of(settings)
    weighted = private_sum_of(settings) if settings.method in PRIVATE else None
    configured.start(grid, context, settings, task, method, plan_of(settings, method), sum=weighted)


def method_of(settings: Settings) -> Method:
    """Return the method that the settings name."""
    method = settings.method
    fields = configured.server(settings, learning_rate=server_learning_rate(settings))
    if method == "uldp-group":
        return UldpGroup(
            num_silos=settings.num_silos,
            num_users=num_users_of(settings),
            group_size=group_size_of(settings),
            local=dp_sgd(settings),
            **fields,
        )
    if not method.startswith("uldp-sgd"):
        fields["local"] = configured.training(settings)
    if method == "default":
        return DPFedAvg(**fields)
    return SHARED[method](num_silos=settings.num_silos, **fields)

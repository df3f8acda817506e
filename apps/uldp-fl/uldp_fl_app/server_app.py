"""Server side: the run configuration becomes a plan and a strategy; the run leaves a directory."""

from functools import partial

from flwr.app import Context, UserConfig
from flwr.serverapp import Grid, ServerApp

from flower_ext.algorithms import DPFedAvg, UldpAvg, UldpGroup, UldpNaive, UldpSgd
from flower_ext.algorithms.uldp import theory_learning_rate
from flower_ext.data import histogram
from flower_ext.federation import FederatedStrategy, Method, configured, first_config
from flower_ext.privacy import (
    FullParticipation,
    NonPrivatePlan,
    PoissonSampling,
    PrivacyUnit,
    ReleasePlan,
)
from flower_ext.runs import RunDirectory
from flower_ext.runs.settings import UnfitSetting, choice, flag, integer, number
from uldp_fl_app.private_weighting import private_sum_of
from uldp_fl_app.task import SURVIVAL, group_size_of, num_users_of, silos_of, task_of

OPENLY = {
    "uldp-avg": partial(UldpAvg, weighting="equal"),
    "uldp-avg-w": partial(UldpAvg, weighting="by-records"),
    "uldp-sgd": partial(UldpSgd, weighting="equal"),
    "uldp-sgd-w": partial(UldpSgd, weighting="by-records"),
    "uldp-naive": UldpNaive,
}
PRIVATE = {
    "uldp-avg-private": partial(UldpAvg, weighting="by-records"),
    "uldp-sgd-private": partial(UldpSgd, weighting="by-records"),
}
SHARED = {**OPENLY, **PRIVATE}
WHY_PLAIN = {
    **dict.fromkeys(PRIVATE, "private weighting has a secure sum of its own"),
    "uldp-group": "its noise is in every step of a silo's DP-SGD, and no sum of uploads adds to it",
    "default": "secure sums are of clipped and noised updates",
}
"""Reasons of the methods whose uploads no secure sum adds up."""
METHODS = (*OPENLY, *PRIVATE, "uldp-group", "default")
RECORDS_FIGURE = (
    "exact numbers of records a user and silo, in users.csv and its figure in the run directory "
    "(records-figure=false turns this off)"
)

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the method that ``context.run_config`` names and leave a run directory with a report."""
    config = first_config(context.run_config)
    method = choice(config, "method", METHODS)
    if method == "uldp-group" and config["dataset"] in SURVIVAL:
        raise UnfitSetting(
            f"run-config method={method!r} with dataset={config['dataset']!r}: its loss compares "
            "patients, and DP-SGD needs one that is a mean over them; expected another method"
        )
    if method not in OPENLY and choice(config, "aggregation", ("plain", "secure")) != "plain":
        raise UnfitSetting(
            f"run-config aggregation='secure' with method={method!r}: expected 'plain', as "
            f"{WHY_PLAIN[method]}"
        )
    configured.start(grid, context, task_of(context), strategy_of)  # missing data end it here


def plan_of(config: UserConfig) -> ReleasePlan | NonPrivatePlan | None:
    """Return the plan of whom a round samples and how it noises; None if a method has its own."""
    if config["method"] == "default":
        return NonPrivatePlan(sampling=FullParticipation(integer(config, "num-silos")))
    if config["method"] == "uldp-group":
        return None
    users, rate = num_users_of(config), number(config, "user-sampling-rate")
    return configured.release_plan(
        config,
        sampling=FullParticipation(users) if rate == 1 else PoissonSampling(users, rate),
        unit=PrivacyUnit.USER,
        **({"dropout_policy": "discard"} if config["method"] in PRIVATE else {}),  # no top-up there
    )


def strategy_of(config: UserConfig, run: RunDirectory) -> FederatedStrategy:
    """Return the strategy of a run."""
    method = str(config["method"])
    options = {**configured.options(config, run, plan_of(config)), "exposed": []}
    # Under private weighting the server knows no numbers of records.
    if flag(config, "records-figure") and method not in PRIVATE:
        run.save_user_records(histogram(silos_of(config), num_users_of(config)))
        options["exposed"] = [RECORDS_FIGURE]
    if method in PRIVATE:
        options["sum"] = private_sum_of(config)
    if method == "uldp-group":
        group = group_of(config)
        return FederatedStrategy(group, group.plan(number(config, "delta")), **options)
    return FederatedStrategy(method_of(config), **options)


def group_of(config: UserConfig) -> UldpGroup:
    """Return ULDP-GROUP-k, which has a plan of its own."""
    return UldpGroup(
        num_silos=integer(config, "num-silos"),
        num_users=num_users_of(config),
        group_size=group_size_of(config),
        local=configured.dp_sgd(config),
        server_learning_rate=server_learning_rate(config),
    )


def method_of(config: UserConfig) -> Method:
    """Return any other method; every method gets the same settings where it has them."""
    method, fields = str(config["method"]), {"server_learning_rate": server_learning_rate(config)}
    if not method.startswith("uldp-sgd"):
        fields["local"] = configured.training(config)
    if method == "default":
        return DPFedAvg(**fields)
    return SHARED[method](num_silos=integer(config, "num-silos"), **fields)


def server_learning_rate(config: UserConfig) -> float:
    """As configured; by default that of the paper's theory where users are averaged, else 1."""
    method, rate = str(config["method"]), number(config, "server-learning-rate")
    if rate or method in ("uldp-naive", "uldp-group", "default"):
        return rate or 1.0
    epochs = 1 if method.startswith("uldp-sgd") else integer(config, "local-epochs", least=1)
    silos = integer(config, "num-silos")
    return theory_learning_rate(num_silos=silos, num_users=num_users_of(config), epochs=epochs)

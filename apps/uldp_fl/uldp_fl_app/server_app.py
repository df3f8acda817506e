"""Server side: the run configuration becomes a plan and a strategy; the run leaves a directory."""

from typing import Any

from flwr.app import Context, UserConfig
from flwr.serverapp import Grid, ServerApp

from flower_ext.algorithms import DPFedAvg, UldpAvg, UldpGroup, UldpNaive, UldpSgd
from flower_ext.algorithms.uldp import theory_learning_rate
from flower_ext.data import histogram
from flower_ext.federation import FederatedStrategy, configured, first_config
from flower_ext.privacy import FullParticipation, NonPrivatePlan, PoissonSampling, PrivacyUnit
from flower_ext.runs import RunDirectory
from flower_ext.runs.settings import UnfitSetting, choice, flag, integer, integers, number
from uldp_fl_app.task import SURVIVAL, group_size_of, num_users_of, silos_of, task_of

WEIGHTING = {"uldp-avg": "equal", "uldp-avg-w": "by-records"}
WEIGHTING |= {"uldp-sgd": "equal", "uldp-sgd-w": "by-records"}
PRIVATE = ("uldp-avg-private", "uldp-sgd-private")
METHODS = (*WEIGHTING, *PRIVATE, "uldp-naive", "uldp-group", "default")
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
    task = task_of(context)  # a missing data set ends the run here, with its message
    # Under private weighting the server knows no numbers of records.
    shown = flag(config, "records-figure") and method not in PRIVATE

    def strategy(config: UserConfig, run: RunDirectory) -> FederatedStrategy:
        if shown:
            run.save_user_records(histogram(silos_of(config), num_users_of(config)))
        return strategy_of(config, run, exposed=[RECORDS_FIGURE] if shown else [])

    configured.start(grid, context, task, strategy)


def strategy_of(config: UserConfig, run: RunDirectory, **exposed: Any) -> FederatedStrategy:
    """The strategy of a method; every method gets the same settings where it has them."""
    method, silos = str(config["method"]), integer(config, "num-silos")
    users, rate = num_users_of(config), number(config, "user-sampling-rate")
    budget = None if method == "default" else configured.budget(config)
    options = {**configured.options(config, run, budget=budget), **exposed}
    options["server_learning_rate"] = server_learning_rate(config)
    if method == "default":
        everyone = NonPrivatePlan(sampling=FullParticipation(silos))
        return DPFedAvg(plan=everyone, local=configured.training(config), **options)
    options["num_silos"] = silos
    if method == "uldp-group":
        return UldpGroup(
            num_users=users,
            group_size=group_size_of(config),
            local=configured.dp_sgd(config),
            delta=number(config, "delta"),
            **options,
        )
    policy = {"dropout_policy": "discard"} if method in PRIVATE else {}  # no sum to top up
    options["plan"] = configured.release_plan(
        config,
        sampling=FullParticipation(users) if rate == 1 else PoissonSampling(users, rate),
        unit=PrivacyUnit.USER,
        **policy,
    )
    options["ledger"] = run.open_ledger()
    if not method.startswith("uldp-sgd"):
        options["local"] = configured.training(config)
    if method == "uldp-naive":
        return UldpNaive(**options)
    if method in PRIVATE:
        return private_strategy_of(config, options)
    strategy = UldpSgd if method.startswith("uldp-sgd") else UldpAvg
    return strategy(weighting=WEIGHTING[method], **options)


def private_strategy_of(config: UserConfig, options: dict[str, Any]) -> FederatedStrategy:
    """A method with private weighting, which needs the extra `weighting`."""
    from flower_ext.algorithms.uldp import PrivateUldpAvg, PrivateUldpSgd, PrivateWeighting

    protocol = PrivateWeighting(
        key_bits=integer(config, "key-bits"),
        precision=number(config, "precision"),
        max_records_per_user=integer(config, "max-records-per-user"),
        allowed_totals=integers(config, "allowed-totals"),
        silo_record_limits=integers(config, "silo-record-limits"),
        draw_choices=integer(config, "draw-choices") or None,
        allow_insecure_key_size=flag(config, "allow-insecure-keys"),
    )
    strategy = PrivateUldpAvg if config["method"] == "uldp-avg-private" else PrivateUldpSgd
    return strategy(protocol=protocol, **options)


def server_learning_rate(config: UserConfig) -> float:
    """As configured; by default that of the paper's theory where users are averaged, else 1."""
    method, rate = str(config["method"]), number(config, "server-learning-rate")
    if rate or method not in (*WEIGHTING, *PRIVATE):
        return rate or 1.0
    epochs = 1 if method.startswith("uldp-sgd") else integer(config, "local-epochs", least=1)
    silos = integer(config, "num-silos")
    return theory_learning_rate(num_silos=silos, num_users=num_users_of(config), epochs=epochs)

"""Server side: the run configuration becomes a plan and a strategy; the run leaves a directory."""

from typing import Any

from flwr.app import ArrayRecord, Context, UserConfig
from flwr.serverapp import Grid, ServerApp

from flower_ext.algorithms import DPFedAvg, UldpAvg, UldpGroup, UldpNaive, UldpSgd
from flower_ext.algorithms.uldp import theory_learning_rate
from flower_ext.data import histogram
from flower_ext.federation import (
    FederatedStrategy,
    first_config,
    recorded_run,
    save_outcome,
    shared_budget,
)
from flower_ext.privacy import (
    Budget,
    FullParticipation,
    NonPrivatePlan,
    PoissonSampling,
    PrivacyUnit,
    ReleasePlan,
)
from flower_ext.runs import RunDirectory
from flower_ext.runs.settings import UnfitSetting, choice, flag, integer, number, text
from flower_ext.training import DpSgdTraining, LocalTraining, check_shareable
from uldp_fl_app.task import SURVIVAL, num_users_of, silos_of, task_of

AVERAGING = {
    "uldp-avg": (UldpAvg, "equal"),
    "uldp-avg-w": (UldpAvg, "by-records"),
    "uldp-sgd": (UldpSgd, "equal"),
    "uldp-sgd-w": (UldpSgd, "by-records"),
}
PRIVATE = ("uldp-avg-private", "uldp-sgd-private")
RECORDS_FIGURE = (
    "exact numbers of records a user and silo, in users.csv and its figure in the run directory "
    "(records-figure=false turns this off)"
)
BASELINES = ("uldp-naive", "uldp-group", "default")

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the method that ``context.run_config`` names and leave a run directory with a report."""
    config = first_config(context.run_config)
    method = choice(config, "method", (*AVERAGING, *PRIVATE, *BASELINES))
    rounds = integer(context.run_config, "rounds", least=1)
    if method == "uldp-group" and config["dataset"] in SURVIVAL:
        raise UnfitSetting(
            f"run-config method={method!r} with dataset={config['dataset']!r}: its loss compares "
            "patients, and DP-SGD needs one that is a mean over them; expected another method"
        )
    task = task_of(context)  # a missing data set ends the run here, with its message

    with recorded_run(config, f"{method}-{config['dataset']}") as run:
        if shows_records(config):
            run.save_user_records(histogram(silos_of(config), num_users_of(config)))
        strategy = strategy_of(config, run)
        check_shareable(task.model(), strategy.personal)
        initial = task.initial_params(integer(config, "seed"))
        result = strategy.start(
            grid,
            ArrayRecord(initial),
            num_rounds=rounds,
            timeout=number(config, "round-timeout", above=0),
        )
        save_outcome(run, strategy, result)


def shows_records(config: UserConfig) -> bool:
    """Whether the run directory shows the users' numbers of records."""
    # Under private weighting the server knows no such numbers.
    return flag(config, "records-figure") and config["method"] not in PRIVATE


def strategy_of(config: UserConfig, run: RunDirectory) -> FederatedStrategy:
    """The strategy of a method; every method gets the same settings where it has them."""
    method, silos = text(config, "method"), integer(config, "num-silos")
    options = {
        "server_learning_rate": server_learning_rate(config),
        "seed": integer(config, "seed") or None,
        "seeded_noise": flag(config, "seeded-noise"),
        "evaluate_every": integer(config, "evaluate-every"),
        "timeout": number(config, "connect-timeout", above=0),
        "budget": shared_budget(config, budget_of(config)),
        "run": run,
        "exposed": [RECORDS_FIGURE] if shows_records(config) else [],
    }
    local = LocalTraining(
        epochs=integer(config, "local-epochs", least=1),
        batch_size=integer(config, "batch-size"),
        learning_rate=number(config, "learning-rate"),
        learning_rate_decay=number(config, "learning-rate-decay"),
        momentum=number(config, "momentum"),
    )
    if method == "default":
        everyone = NonPrivatePlan(sampling=FullParticipation(silos))
        return DPFedAvg(plan=everyone, local=local, **options)
    if method == "uldp-group":
        return UldpGroup(
            num_silos=silos,
            num_users=num_users_of(config),
            group_size=group_size_of(config),
            local=dp_sgd_of(config),
            delta=number(config, "delta"),
            **options,
        )
    options |= {"plan": plan_of(config), "num_silos": silos, "ledger": run.open_ledger()}
    if method == "uldp-naive":
        return UldpNaive(local=local, **options)
    if method in PRIVATE:
        return private_strategy_of(config, local, options)
    strategy, weighting = AVERAGING[method]
    if strategy is UldpAvg:
        options["local"] = local
    return strategy(weighting=weighting, **options)


def private_strategy_of(
    config: UserConfig, local: LocalTraining, options: dict[str, Any]
) -> FederatedStrategy:
    """A method with private weighting, which needs the extra `weighting`."""
    from flower_ext.algorithms.uldp import PrivateUldpAvg, PrivateUldpSgd, PrivateWeighting

    options["protocol"] = PrivateWeighting(
        key_bits=integer(config, "key-bits"),
        precision=number(config, "precision"),
        max_records_per_user=integer(config, "max-records-per-user"),
        allowed_totals=integers_of(config, "allowed-totals"),
        silo_record_limits=integers_of(config, "silo-record-limits"),
        draw_choices=integer(config, "draw-choices") or None,
        allow_insecure_key_size=flag(config, "allow-insecure-keys"),
    )
    if config["method"] == "uldp-avg-private":
        return PrivateUldpAvg(local=local, **options)
    return PrivateUldpSgd(**options)


def integers_of(config: UserConfig, name: str) -> tuple[int, ...] | None:
    """A list of them, if it is not empty.

    Raises
    ------
    UnfitSetting
        Not integers with commas between them.
    """
    listed = text(config, name)
    try:
        return tuple(int(part) for part in listed.split(",")) if listed else None
    except ValueError:
        raise UnfitSetting(
            f"run-config {name}={listed!r}: expected integers with commas between them"
        ) from None


def plan_of(config: UserConfig) -> ReleasePlan:
    """How users are sampled, clipped, noised and accounted."""
    users, rate = num_users_of(config), number(config, "user-sampling-rate")
    return ReleasePlan(
        unit=PrivacyUnit.USER,
        sampling=FullParticipation(users) if rate == 1 else PoissonSampling(users, rate),
        clipping_norm=number(config, "clipping-norm"),
        noise_multiplier=number(config, "noise-multiplier"),
        dropout_policy=dropout_policy_of(config),
        rounds=integer(config, "rounds"),
        delta=number(config, "delta"),
    )


def budget_of(config: UserConfig) -> Budget | None:
    """The provable epsilon at which the run ends, where one is set."""
    if config["method"] == "default" or not (epsilon := number(config, "budget")):
        return None
    return Budget(epsilon=epsilon, delta=number(config, "delta"))


def dropout_policy_of(config: UserConfig) -> str:
    """As configured; under private weighting there is no sum that could be topped up."""
    policy = choice(config, "dropout-policy", ("top-up", "discard"))
    return "discard" if config["method"] in PRIVATE else policy


def server_learning_rate(config: UserConfig) -> float:
    """As configured; by default that of the paper's theory where users are averaged, else 1."""
    if (rate := number(config, "server-learning-rate")) != 0:
        return rate
    method = text(config, "method")
    if method not in (*AVERAGING, *PRIVATE):
        return 1.0
    epochs = 1 if method.startswith("uldp-sgd") else integer(config, "local-epochs", least=1)
    users, silos = num_users_of(config), integer(config, "num-silos")
    return theory_learning_rate(num_silos=silos, num_users=users, epochs=epochs)


def group_size_of(config: UserConfig) -> int | str:
    """A number, ``max`` or ``median``.

    Raises
    ------
    UnfitSetting
        It is none of them.
    """
    value = str(config["group-size"])
    if value in ("max", "median"):
        return value
    try:
        return int(value)
    except ValueError:
        raise UnfitSetting(
            f"run-config group-size={value!r}: expected a number, max or median"
        ) from None


def dp_sgd_of(config: UserConfig) -> DpSgdTraining:
    """DP-SGD of one round in one silo: as many steps as pass over the records in expectation."""
    rate, epochs = number(config, "record-sampling-rate"), integer(config, "local-epochs", least=1)
    return DpSgdTraining(
        steps=max(1, round(epochs / rate)) if rate > 0 else 0,
        sampling_rate=rate,
        batch_size=number(config, "expected-batch-size"),
        learning_rate=number(config, "learning-rate"),
        clipping_norm=number(config, "record-clipping-norm"),
        noise_multiplier=number(config, "noise-multiplier"),
    )

"""Settings of a run become objects of this package, under the same names in every app."""

import pytest
from flwr.app import Context, RecordDict
from flwr.serverapp.strategy import FedAvg

from flower_ext.algorithms import DP2FedSAM, DPFedAvg, Upcycled
from flower_ext.errors import InvalidValue
from flower_ext.federation import FederatedStrategy, InProcessGrid, configured
from flower_ext.privacy import (
    FixedSizeSampling,
    FullParticipation,
    NonPrivatePlan,
    PoissonSampling,
    PrivacyUnit,
    ReleasePlan,
)
from flower_ext.privacy.theorems.dp2_fedsam import dp2_fedsam_theorem2_noise_multiplier
from flower_ext.runs import RunDirectory
from flower_ext.runs.settings import UnfitSetting
from flower_ext.training import LocalTraining
from tests.support.strategies import strategy_of
from tests.support.worlds import task

CLIENTS = 3
RELEASE = {
    "clients": 20,
    "sampling": "poisson",
    "sampling-rate": 0.5,
    "rounds": 6,
    "clipping-norm": 0.5,
    "delta": 0.01,
}
TARGET = {"epsilon": 2.0, "delta": 0.01, "rounds": 6}
TRAINING = {"local-epochs": 3, "batch-size": 4, "learning-rate": 0.2}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("poisson", PoissonSampling(population=20, rate=0.5)),
        ("fixed-size", FixedSizeSampling(population=20, size=10)),
        ("everyone", FullParticipation(population=20)),
    ],
)
def test_cohorts_are_drawn_as_the_settings_say(name, expected):
    assert configured.sampling({**RELEASE, "sampling": name}) == expected


def test_training_is_that_of_the_settings_but_for_changes():
    plain = configured.training(TRAINING)
    assert plain == LocalTraining(epochs=3, batch_size=4, learning_rate=0.2)
    full = configured.training({**TRAINING, "momentum": 0.5}, epochs=1, sam_radius=0.1)
    assert (full.epochs, full.momentum, full.sam_radius) == (1, 0.5, 0.1)


def test_another_optimizer_is_one_setting():
    own = configured.training({**TRAINING, "optimizer": "AdamW", "weight-decay": 0.1})
    assert (own.optimizer, own.weight_decay) == ("AdamW", 0.1)
    with pytest.raises(InvalidValue, match="optimizer='Adamw': expected one of .*AdamW"):
        configured.training({**TRAINING, "optimizer": "Adamw"})


def test_clients_count_by_their_examples_where_nothing_is_promised():
    plan = configured.non_private_plan({**RELEASE, "weighting": "examples"})
    assert plan.weighs_examples
    assert not configured.non_private_plan(RELEASE).weighs_examples
    with pytest.raises(UnfitSetting, match="weighting='examples'.*expected 'clients'"):
        configured.release_plan({**RELEASE, "epsilon": 2.0, "weighting": "examples"})


@pytest.mark.parametrize("changes", [{}, {"sensitivity": 2.0}], ids=["one part", "two parts"])
@pytest.mark.parametrize("given", [{}, {"noise-multiplier": 0.0, "calibration": "provable"}])
def test_noise_is_the_least_for_epsilon_where_none_is_set(given, changes):
    plan = configured.release_plan({**RELEASE, "epsilon": 2.0, **given}, **changes)
    sampling = PoissonSampling(population=20, rate=0.5)
    same = ReleasePlan.for_target(**TARGET, sampling=sampling, clipping_norm=0.5, **changes)
    assert plan == same


def test_noise_is_as_published_where_that_is_asked_for():
    plan = configured.release_plan({**RELEASE, "epsilon": 2.0, "calibration": "published"})
    expected = dp2_fedsam_theorem2_noise_multiplier(**TARGET, sampling_rate=0.5)
    assert plan.noise_multiplier == expected


def test_noise_that_is_set_comes_before_epsilon_and_one_of_both_is_needed():
    set_ = configured.release_plan({**RELEASE, "epsilon": 2.0, "noise-multiplier": 9.0})
    assert set_.noise_multiplier == 9.0
    with pytest.raises(UnfitSetting, match="run-config has no noise-multiplier: expected a number"):
        configured.release_plan(RELEASE)
    with pytest.raises(InvalidValue, match="noise-multiplier=0"):
        configured.release_plan({**RELEASE, "noise-multiplier": 0.0})


def test_fields_of_a_plan_that_an_app_decides_come_before_its_settings():
    users = FullParticipation(population=7)
    config = {"noise-multiplier": 1.0, "rounds": 2, "clipping-norm": 1.0, "delta": 0.1}
    placed = {**config, "noise-placement": "server", "dropout-policy": "top-up"}
    plan = configured.release_plan(
        placed, sampling=users, unit=PrivacyUnit.USER, dropout_policy="discard"
    )
    assert (plan.sampling, plan.unit) == (users, PrivacyUnit.USER)
    assert (plan.noise_placement, plan.dropout_policy) == ("server", "discard")


def test_a_delta_of_zero_is_one_over_the_clients_and_of_no_other_unit():
    noise = {**RELEASE, "noise-multiplier": 1.0, "delta": 0.0}
    assert configured.release_plan(noise).delta == 1 / 20
    users = {name: value for name, value in noise.items() if name != "clients"}
    with pytest.raises(InvalidValue, match=r"delta=0\.0"):
        configured.release_plan(users, sampling=FullParticipation(population=7))


def test_options_are_those_that_the_app_has_settings_for(tmp_path):
    run = RunDirectory.create(tmp_path / "run", config={})
    assert configured.options({}, run) == {"budget": None, "run": run}
    config = {"seed": 0, "seeded-noise": True, "evaluate-every": 2, "connect-timeout": 9}
    assert configured.options(config, run) == {
        "seed": None,
        "seeded_noise": True,
        "evaluate_every": 2,
        "timeout": 9.0,
        "budget": None,
        "run": run,
    }


def everyone(**changes):
    facts = {"sampling": "everyone", "noise-multiplier": 1.0, **changes}
    return {**RELEASE, **{name: value for name, value in facts.items() if value is not None}}


@pytest.mark.parametrize(
    ("settings", "of_ledger", "of_run"),
    [
        ({}, None, None),
        ({"budget": 0.0}, None, None),
        ({"budget": 3.0}, None, 3.0),
        ({"epsilon": 2.0}, None, None),  # the settings fix the noise
        ({"epsilon": 2.0, "noise-multiplier": None}, 2.0, None),
        ({"epsilon": 2.0, "noise-multiplier": 0.0, "calibration": "provable"}, 2.0, None),
        ({"epsilon": 2.0, "noise-multiplier": 0.0, "calibration": "published"}, None, None),
    ],
)
def test_a_run_ends_at_its_budget_or_at_the_epsilon_of_its_noise(
    settings, of_ledger, of_run, tmp_path
):
    config = everyone(**settings)
    run = RunDirectory.create(tmp_path / "run", config={})
    options = configured.options(config, run, configured.release_plan(config))
    found = options["ledger"].budget, options["budget"]
    assert [budget and (budget.epsilon, budget.delta) for budget in found] == [
        of_ledger and (of_ledger, 0.01),
        of_run and (of_run, 0.01),
    ]
    run.close()


@pytest.mark.parametrize(("basis", "epsilon"), [("provable", 2.0), ("published", None)])
def test_a_run_under_a_plan_of_records_ends_at_a_provable_epsilon(basis, epsilon, tmp_path):
    config = {
        **RELEASE,
        "epsilon": 2.0,
        "calibration": basis,
        "noise": "upload",
        "examples-per-client": 10,
    }
    plan = configured.record_level_plan(config, LocalTraining(), rounds=6)
    options = configured.options(config, RunDirectory.create(tmp_path / "run", config={}), plan)
    assert "ledger" not in options
    assert (options["budget"] and options["budget"].epsilon) == epsilon


def test_no_budget_is_asked_of_a_plan_that_promises_nothing(tmp_path):
    plan = NonPrivatePlan(sampling=FullParticipation(CLIENTS))
    run = RunDirectory.create(tmp_path / "run", config={})
    options = configured.options({"budget": 1.0, "epsilon": 1.0, "delta": 0.1}, run, plan)
    assert options == {"plan": plan, "budget": None, "run": run}


def test_an_account_under_another_name_is_no_account_left_out(tmp_path):
    run = RunDirectory.create(tmp_path / "run", config={})
    spent = {"population-epsilon": 1.0, "population-delta": 0.1}
    with pytest.raises(UnfitSetting, match="run-config has no budget-ledger"):
        configured.options({**spent, "budget-legder": "/people.jsonl"}, run)


def start(path, strategy_of, **settings):
    context = Context(
        run_id=1,
        node_id=0,
        node_config={},
        state=RecordDict(),
        run_config={"run-directory": str(path), "rounds": 3, "connect-timeout": 5, **settings},
    )
    grid = InProcessGrid(DPFedAvg.client_app(task()), num_clients=CLIENTS)
    planned = settings.get("planned")
    configured.start(grid, context, task(), strategy_of, planned_rounds=planned)
    return RunDirectory.open(path)


def fedavg(config, run):
    plan = NonPrivatePlan(sampling=FullParticipation(CLIENTS))
    return strategy_of(DPFedAvg, **configured.options(config, run, plan))


def test_a_run_has_the_rounds_of_its_settings_or_of_its_planner(tmp_path):
    assert len(start(tmp_path / "set", fedavg).metrics()) == 3
    planned = start(tmp_path / "planned", fedavg, planned=1)
    assert len(planned.metrics()) == planned.config["planned-rounds"] == 1


def test_a_resumed_run_goes_as_far_beyond_its_planner_as_its_settings_say(tmp_path):
    first = start(tmp_path / "run", fedavg, planned=2, resume=True)
    assert len(first.metrics()) == 2
    again = start(tmp_path / "run", fedavg, planned=2, resume=True, rounds=4)
    assert len(again.metrics()) == 3


def dp_fedavg(config, run):
    settings = {**RELEASE, "clients": CLIENTS, "sampling": "everyone", **config}
    plan = configured.release_plan(settings)
    return strategy_of(
        DPFedAvg, local=configured.training(TRAINING), **configured.options(settings, run, plan)
    )


def test_a_resumed_run_may_not_exceed_the_rounds_of_its_epsilon_and_stays_complete(tmp_path):
    target = {"resume": True, "epsilon": 2.0}
    before = start(tmp_path / "run", dp_fedavg, **target).facts
    with pytest.raises(UnfitSetting, match=r"rounds=4 .*at most 3.*epsilon=2.*--set rounds=4"):
        start(tmp_path / "run", dp_fedavg, **target, rounds=4)
    assert RunDirectory.open(tmp_path / "run").facts == before
    assert before["status"] == "completed"


@pytest.mark.parametrize(
    "settings", [{"noise-multiplier": 1.0}, {"epsilon": 2.0, "calibration": "published"}]
)
def test_a_resumed_run_that_no_epsilon_ends_may_have_more_rounds(settings, tmp_path):
    start(tmp_path / "run", dp_fedavg, resume=True, **settings)
    again = start(tmp_path / "run", dp_fedavg, resume=True, rounds=4, **settings)
    assert len(again.metrics()) == 4


def test_a_finished_run_has_nothing_left_to_do(tmp_path, logged):
    start(tmp_path / "run", fedavg, resume=True)
    again = start(tmp_path / "run", fedavg, resume=True)
    assert again.facts["status"] == "completed"
    assert "nothing left to do: all 3 rounds are done" in logged.messages


def test_a_wrapped_strategy_leaves_the_outcome_of_its_base(tmp_path):
    done = start(tmp_path / "run", lambda config, run: Upcycled(fedavg(config, run), 0.5))
    assert done.facts["status"] == "completed"
    assert len(done.client_metrics()) == CLIENTS


def test_a_strategy_that_keeps_no_record_is_refused_by_name(tmp_path):
    for strategy in (FedAvg(), Upcycled(FedAvg(), 0.5)):
        with pytest.raises(InvalidValue, match="strategy=FedAvg: expected"):
            start(tmp_path / type(strategy).__name__, lambda config, run, own=strategy: own)


def test_a_personal_part_that_the_model_lacks_ends_the_run_before_its_first_round(tmp_path):
    def strategy(config, run):
        plan = NonPrivatePlan(sampling=FullParticipation(CLIENTS))
        local = configured.training(TRAINING)
        return FederatedStrategy(
            DP2FedSAM(head=local, extractor=local, personal=("last",)), plan, run=run
        )

    with pytest.raises(InvalidValue, match="personal='last' names no parameter.*'head'"):
        start(tmp_path / "run", strategy)
    assert RunDirectory.open(tmp_path / "run").metrics() == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sampling-rate": 1.5}, r"run-config sampling-rate=1\.5: expected a number in \(0, 1\]"),
        ({"clipping-norm": -1.0}, r"run-config clipping-norm=-1\.0: expected"),
        (
            {"aggregation": "secure", "colluding-share": 1.5, "dropout-share": 0.1},
            r"run-config colluding-share=1\.5: expected",
        ),
    ],
    ids=["rate", "norm", "colluding"],
)
def test_a_refusal_names_the_setting_in_place_of_the_field(changes, message):
    with pytest.raises(UnfitSetting, match=message):
        configured.release_plan({**RELEASE, "noise-multiplier": 1.0, **changes})


def test_a_refusal_names_the_setting_whose_value_the_field_has():
    config = {**TRAINING, "head-epochs": -1}
    with pytest.raises(UnfitSetting, match="run-config head-epochs=-1: expected"):
        configured.training(config, epochs=-1)
    with pytest.raises(InvalidValue, match="^epochs=-3: expected"):  # no setting has this value
        configured.training(config, epochs=-3)

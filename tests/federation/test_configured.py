"""Settings of a run become objects of this package, under the same names in every app."""

from dataclasses import dataclass

import numpy as np
import pytest
from flwr.app import Context, RecordDict

from flower_ext.algorithms import DP2FedSAM, DPFedAvg, Upcycled
from flower_ext.errors import InvalidValue
from flower_ext.federation import FederatedStrategy, InProcessGrid, configured
from flower_ext.privacy import (
    AdaptiveClipping,
    Budget,
    CorrelatedNoise,
    FixedSizeSampling,
    FullParticipation,
    NonPrivatePlan,
    PoissonSampling,
    RecordLevelPlan,
    ReleasePlan,
    SpacedSampling,
    VectorQuery,
)
from flower_ext.privacy.theorems.dp2_fedsam_theorem import dp2_fedsam_theorem2_noise_multiplier
from flower_ext.runs import RunDirectory
from flower_ext.runs.settings import CountOrZero, UnfitSetting, setting
from flower_ext.runs.shared_settings import (
    CohortSettings,
    ReleaseSettings,
    ServerSettings,
    TrainingSettings,
)
from flower_ext.training import LocalTraining, Task
from tests.support.worlds import Net, client_data, task

CLIENTS = 3
TARGET = {"epsilon": 2.0, "delta": 0.01, "rounds": 6}


@dataclass(frozen=True, kw_only=True)
class Settings(ReleaseSettings, CohortSettings, TrainingSettings, ServerSettings):
    """An app's settings, with one of its own; a client's training has defaults here."""

    clients: CountOrZero = setting("how many there are", default=CLIENTS)
    sampling: str = setting("how cohorts are drawn", default="everyone")
    sampling_rate: float = setting("share of the clients", default=0.5)
    delta: float = setting("at which epsilon holds", default=0.01)
    clipping_norm: float = setting("of an update", default=0.5)
    batch_size: CountOrZero = setting("examples a step", default=4)
    local_epochs: CountOrZero = setting("passes", default=3)
    learning_rate: float = setting("of each step", default=0.2)
    head_epochs: CountOrZero = setting("passes of the head", default=1)


def release(**changes) -> Settings:
    """Return settings of six rounds with cohorts of 20 clients."""
    return Settings(**{"clients": 20, "sampling": "poisson", "rounds": 6, **changes})


def plan_of(settings: Settings, **changes) -> ReleasePlan:
    return configured.release_plan(settings, configured.sampling(settings), **changes)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("poisson", PoissonSampling(population=20, rate=0.5)),
        ("fixed-size", FixedSizeSampling(population=20, size=10)),
        ("everyone", FullParticipation(population=20)),
    ],
)
def test_cohorts_are_drawn_as_the_settings_say(name, expected):
    assert configured.sampling(release(sampling=name)) == expected


def test_training_is_that_of_the_settings_but_for_changes():
    plain = configured.training(release())
    assert plain == LocalTraining(epochs=3, batch_size=4, learning_rate=0.2)
    full = configured.training(release(momentum=0.5), epochs=1, sam_radius=0.1)
    assert (full.epochs, full.momentum, full.sam_radius) == (1, 0.5, 0.1)


def test_an_adaptive_clipping_norm_starts_at_the_setting_of_a_fixed_norm():
    chosen = {"clipping": "adaptive", "clipping_quantile": 0.3, "clipping_learning_rate": 0.4}
    settings = release(epsilon=2.0, **chosen)
    plan = plan_of(settings)
    expected = AdaptiveClipping(
        initial_norm=settings.clipping_norm, quantile=0.3, learning_rate=0.4
    )
    assert plan.clipping_norm == expected
    assert plan.noise_multiplier == plan_of(release(epsilon=2.0)).noise_multiplier
    with pytest.raises(UnfitSetting, match="calibration='published' with clipping='adaptive'"):
        plan_of(release(epsilon=2.0, calibration="published", **chosen))
    of_users = configured.release_plan(settings, configured.sampling(settings), of_users=True)
    assert of_users.clipping_norm == expected


def test_correlated_noise_is_one_setting():
    by_server = {"epsilon": 2.0, "noise": "correlated", "noise_placement": "server"}
    settings = release(**by_server, rounds=40)
    plan, usual = plan_of(settings), configured.sampling(settings)
    size = round(usual.expected_cohort_size)
    apart = usual.population // size
    assert plan.sampling == SpacedSampling(usual.population, size, apart, -(-40 // apart))
    assert plan.correlation == CorrelatedNoise()
    assert plan.noise_placement == "server"
    chosen = {"rounds_apart": 2, "participations": 3, "noise_bands": 4, "server_momentum": 0.9}
    plan = plan_of(release(**by_server, **chosen))
    assert plan.sampling == SpacedSampling(usual.population, size, 2, 3)
    assert plan.correlation == CorrelatedNoise(bands=4, momentum=0.9)
    for other, refusal in (
        ({"noise_placement": "client"}, "run-config noise-placement='client' with spaced sampling"),
        ({"aggregation": "secure"}, "aggregation='secure' with noise='correlated'"),
        ({"calibration": "published"}, "calibration='published' with noise='correlated'"),
        ({"clipping": "adaptive"}, "clipping-norm=.* with spaced sampling: expected a number"),
        ({"rounds_apart": 1000}, "rounds-apart=1000 .*: expected at most"),
        ({"noise_buffers": 9}, "buffers=9 with bands=0"),
    ):
        with pytest.raises(InvalidValue, match=refusal):
            plan_of(release(**{**by_server, **other}))
    with pytest.raises(UnfitSetting, match="noise='correlated': expected 'independent'"):
        configured.release_plan(settings, usual, of_users=True)


def test_another_optimizer_is_one_setting():
    training = configured.training(release(optimizer="AdamW", weight_decay=0.1))
    assert (training.optimizer, training.weight_decay) == ("AdamW", 0.1)
    with pytest.raises(UnfitSetting, match="run-config optimizer='Adamw': expected .*AdamW"):
        configured.training(release(optimizer="Adamw"))
    with pytest.raises(UnfitSetting, match=r"run-config weight-decay=0.1: expected 0 with optim"):
        configured.training(release(weight_decay=0.1))


def test_clients_count_by_their_examples_where_nothing_is_promised():
    weighted = release(weighting="examples", epsilon=2.0)
    sampling = configured.sampling(weighted)
    assert configured.non_private_plan(weighted, sampling).weighs_examples
    assert not configured.non_private_plan(release(), sampling).weighs_examples
    with pytest.raises(UnfitSetting, match="weighting='examples'.*expected 'clients'"):
        plan_of(weighted)


@pytest.mark.parametrize(
    "wrong", [{"aggregation": "secure"}, {"evaluation": "secure"}], ids=["sum", "scores"]
)
def test_secure_sums_are_of_noised_updates_only(wrong):
    settings = release(**wrong)
    with pytest.raises(UnfitSetting, match="='secure': expected 'plain'"):
        configured.non_private_plan(settings, configured.sampling(settings))


@dataclass(frozen=True, kw_only=True)
class Norms(VectorQuery):
    """A query of one number."""

    name = "norms"
    size = 1
    norm = 1.0

    def vector(self, client):
        return np.ones(1)

    def answer(self, total, stddev):
        return {"norm": float(total[0])}


SECURE = {"clients": 40, "sampling": "fixed-size", "aggregation": "secure", "epsilon": 4.0}


def test_secure_scores_do_not_replace_an_apps_other_queries():
    """ε covers both: with one of them, the same ε needs less noise."""
    other = Norms(noise_multiplier=3.0)
    both = plan_of(release(**SECURE, evaluation="secure"), queries=(other,))
    scores = plan_of(release(**SECURE, evaluation="secure"))
    assert both.queries == (other, *scores.queries)
    assert both.noise_multiplier > scores.noise_multiplier


def test_a_refused_secure_sum_names_the_setting_that_asks_for_it():
    with pytest.raises(UnfitSetting, match="run-config aggregation='secure' with Poisson sampling"):
        plan_of(release(**SECURE | {"sampling": "poisson", "evaluation": "secure"}))


@pytest.mark.parametrize("given", [{}, {"noise_multiplier": 0.0, "calibration": "provable"}])
def test_noise_is_the_least_for_epsilon_where_none_is_set(given):
    plan = plan_of(release(epsilon=2.0, **given))
    sampling = PoissonSampling(population=20, rate=0.5)
    same = ReleasePlan.for_target(**TARGET, sampling=sampling, clipping_norm=0.5)
    assert plan == same


def test_noise_is_as_published_where_that_is_asked_for():
    plan = plan_of(release(epsilon=2.0, calibration="published"))
    expected = dp2_fedsam_theorem2_noise_multiplier(**TARGET, sampling_rate=0.5)
    assert plan.noise_multiplier == expected


def test_a_noise_setting_overrides_epsilon_and_one_is_required():
    assert plan_of(release(epsilon=2.0, noise_multiplier=9.0)).noise_multiplier == 9.0
    with pytest.raises(UnfitSetting, match=r"run-config noise-multiplier=0\.0: expected"):
        plan_of(release())


def test_fields_of_a_plan_that_an_app_decides_come_before_its_settings():
    users = FullParticipation(population=7)
    placed = release(noise_multiplier=1.0, noise_placement="server")
    plan = configured.release_plan(placed, users, rounds=2)
    assert (plan.sampling, plan.rounds, plan.noise_placement) == (users, 2, "server")


def test_a_delta_of_zero_means_one_over_the_clients_only():
    settings = release(noise_multiplier=1.0, delta=0.0)
    assert plan_of(settings).delta == 1 / 20
    with pytest.raises(UnfitSetting, match=r"run-config delta=0\.0"):
        plan_of(settings, of_users=True)


def test_options_are_those_of_the_settings_and_the_task(tmp_path):
    frozen = Task(model=Net, data=client_data, trainable=("head",), device="cpu")
    settings = {"seeded-noise": True, "seed": 3, "evaluate-every": 2, "connect-timeout": 9}
    run = started(tmp_path / "run", fedavg, trained=frozen, **settings).run
    assert (run.options.seed, run.options.seeded_noise, run.options.evaluate_every) == (3, True, 2)
    assert run.clients.timeout == 9
    assert run.spending.budget is None
    assert run.options.frozen == frozen.fingerprint


def test_a_setting_that_an_app_omits_has_the_strategys_default(tmp_path):
    options = started(tmp_path / "run", fedavg).run.options
    default = FederatedStrategy(*fedavg(release())).run.options
    for name in ("seed", "seeded_noise", "evaluate_every", "training_loss", "diagnostics"):
        assert getattr(options, name) == getattr(default, name)


@pytest.mark.parametrize(
    ("settings", "of_ledger", "of_run"),
    [
        ({}, None, None),
        ({"budget": 0.0}, None, None),
        ({"budget": 3.0}, None, 3.0),
        ({"epsilon": 2.0}, None, None),  # the settings fix the noise
        ({"epsilon": 2.0, "noise-multiplier": 0.0}, 2.0, None),
        ({"epsilon": 2.0, "noise-multiplier": 0.0, "budget": 1.5}, 2.0, 1.5),
        ({"epsilon": 2.0, "noise-multiplier": 0.0, "calibration": "provable"}, 2.0, None),
        ({"epsilon": 2.0, "noise-multiplier": 0.0, "calibration": "published"}, None, None),
    ],
)
def test_a_run_ends_at_its_budget_or_its_noises_epsilon(settings, of_ledger, of_run, tmp_path):
    spending = started(
        tmp_path / "run", dp_fedavg, **{"noise-multiplier": 1.0, **settings}
    ).run.spending
    assert [
        budget and (budget.epsilon, budget.delta)
        for budget in (spending.ledger.budget, spending.budget)
    ] == [of_ledger and (of_ledger, 0.01), of_run and (of_run, 0.01)]


def test_a_budget_takes_the_plans_delta_if_the_settings_have_none(tmp_path):
    settings = {"noise-multiplier": 1.0, "budget": 3.0, "delta": 0.0}
    run = started(tmp_path / "run", dp_fedavg, **settings).run
    assert run.plan.delta == 1 / run.plan.sampling.population
    assert run.spending.budget == Budget(epsilon=3.0, delta=run.plan.delta)


@pytest.mark.parametrize(("basis", "epsilon"), [("provable", 2.0), ("published", None)])
def test_a_run_under_a_plan_of_records_ends_at_a_provable_epsilon(basis, epsilon, tmp_path):
    def of_records(settings):
        plan = RecordLevelPlan.for_target(
            **TARGET,
            sampling=FullParticipation(CLIENTS),
            num_examples=len(client_data(0).train),
            clipping_norm=0.5,
            basis=basis,
        )
        return DPFedAvg(local=configured.training(settings)), plan

    settings = {"epsilon": 2.0, "delta": 0.01, "calibration": basis, "evaluate-every": 0}
    strategy = started(tmp_path / "run", of_records, **settings)
    budget = strategy.run.spending.budget
    assert (budget and budget.epsilon) == epsilon
    assert strategy.run.spending.ledger is None


def test_no_budget_is_asked_of_a_plan_that_promises_nothing(tmp_path):
    path = tmp_path / "run"
    strategy = started(path, fedavg, budget=1.0, epsilon=1.0, delta=0.1)
    assert strategy.run.spending.budget is None
    assert not RunDirectory.open(path).ledger_path.exists()


def test_an_account_of_all_runs_needs_its_epsilon_and_its_delta(tmp_path):
    account = {"budget-ledger": str(tmp_path / "people.jsonl"), "population-delta": 0.1}
    with pytest.raises(UnfitSetting, match=r"population-epsilon=0.0 with a budget-ledger"):
        start(tmp_path / "run", fedavg, **account)
    strategy = started(tmp_path / "run", fedavg, **account, budget=3.0, **{"population-epsilon": 1})
    budget = strategy.run.spending.budget
    assert (budget.epsilon, budget.ledger) == (1.0, tmp_path / "people.jsonl")


def start(path, parts_of, *, planned=None, trained=None, wrapper=None, **changes):
    """Start a run of the method and the plan that ``parts_of`` makes from the settings."""
    context = Context(
        run_id=1,
        node_id=0,
        node_config={},
        state=RecordDict(),
        run_config={"run-directory": str(path), "rounds": 3, "connect-timeout": 5, **changes},
    )
    model_task = trained or task()
    app = DPFedAvg.client_app(model_task, allow_seeded_noise=True)
    grid = InProcessGrid(app, num_clients=CLIENTS)
    settings = configured.settings(Settings, context)
    configured.start(
        grid,
        context,
        settings,
        model_task,
        *parts_of(settings),
        planned_rounds=planned,
        wrapper=wrapper,
    )
    return RunDirectory.open(path)


def started(path, parts_of, **changes) -> FederatedStrategy:
    """Return the strategy of a run after it."""
    strategies = []

    def kept(strategy):
        strategies.append(strategy)
        return strategy

    start(path, parts_of, wrapper=kept, **changes)
    return strategies[0]


def fedavg(settings):
    return DPFedAvg(), NonPrivatePlan(sampling=FullParticipation(CLIENTS))


def test_a_run_has_the_rounds_of_its_settings_or_of_its_planner(tmp_path):
    assert len(start(tmp_path / "set", fedavg).metrics()) == 3
    planned = start(tmp_path / "planned", fedavg, planned=1)
    assert len(planned.metrics()) == planned.config["planned-rounds"] == 1


def test_a_resumed_run_exceeds_its_planner_only_as_its_settings_say(tmp_path):
    first = start(tmp_path / "run", fedavg, planned=2, resume=True)
    assert len(first.metrics()) == 2
    again = start(tmp_path / "run", fedavg, planned=2, resume=True, rounds=4)
    assert len(again.metrics()) == 3


def dp_fedavg(settings):
    return DPFedAvg(local=configured.training(settings)), plan_of(settings)


def test_a_resumed_run_stays_within_its_epsilons_rounds_and_stays_complete(tmp_path):
    target = {"resume": True, "epsilon": 2.0}
    before = start(tmp_path / "run", dp_fedavg, **target).metadata
    with pytest.raises(UnfitSetting, match=r"rounds=4 .*at most 3.*epsilon=2.*--set rounds=4"):
        start(tmp_path / "run", dp_fedavg, **target, rounds=4)
    assert RunDirectory.open(tmp_path / "run").metadata == before
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
    assert again.status == "completed"
    assert "nothing left to do: all 3 rounds are done" in logged.messages


def test_a_wrapped_strategy_leaves_the_outcome_of_its_base(tmp_path):
    done = start(tmp_path / "run", fedavg, wrapper=Upcycled)
    assert done.status == "completed"
    assert len(done.client_metrics()) == CLIENTS


def test_a_personal_part_the_model_lacks_ends_the_run_at_once(tmp_path):
    def parts(settings):
        local = configured.training(settings)
        method = DP2FedSAM(head=local, extractor=local, personal=("last",))
        return method, NonPrivatePlan(sampling=FullParticipation(CLIENTS))

    with pytest.raises(InvalidValue, match="personal='last' names no parameter.*'head'"):
        start(tmp_path / "run", parts)
    assert RunDirectory.open(tmp_path / "run").metrics() == []


def test_a_refusal_names_the_setting_in_place_of_the_field():
    sampling = FullParticipation(population=20)
    with pytest.raises(UnfitSetting, match=r"run-config clipping-norm=-1\.0: expected"):
        configured.release_plan(release(clipping_norm=-1.0, noise_multiplier=1.0), sampling)


def test_a_field_that_is_no_setting_keeps_its_name_in_a_refusal():
    with pytest.raises(InvalidValue, match="^epochs=-3: expected"):
        configured.training(release(), epochs=-3)

"""Runs that release statistics: right numbers, bounded people, refusals, and the run's files."""

import csv

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord

from flower_ext.data import ClientData, Examples, SiloData
from flower_ext.errors import InvalidValue
from flower_ext.federation import FederatedStrategy, InProcessGrid
from flower_ext.federation.recording import record
from flower_ext.privacy import FullParticipation, PoissonSampling, ReleasePlan, SecureSum
from flower_ext.runs import RunDirectory, RunWriter
from flower_ext_consortium.statistics import (
    ClientStatistics,
    StatisticsFiles,
    UserStatistics,
    estimates,
    read_statistics,
    statistics_task,
)
from flower_ext_consortium.statistics.results import TABLE, estimate_texts
from flower_ext_consortium.statistics.statistic import Estimate
from tests.support.grids import grid
from tests.support.plans import release_plan

USERS, SILOS = 60, 5
TEXT = "count; mean age 0:100; histogram age 0:100:4; survival age event 0:100:5"


def silos(change=None):
    """Return silos with people in common; ``change`` edits ages and events."""
    rng = np.random.default_rng(4)
    ages, events = rng.uniform(20, 90, 300), (rng.random(300) < 0.5).astype(float)
    owners, places = rng.integers(0, USERS, 300), rng.integers(0, SILOS, 300)
    if change is not None:
        change(owners, ages, events)

    def data(silo):
        rows = np.flatnonzero(places == silo)
        features = {"age": torch.tensor(ages[rows]), "event": torch.tensor(events[rows])}
        train = Examples(features, torch.zeros(len(rows), dtype=torch.long))
        return SiloData(train=train, test=train.subset([]), owners=torch.tensor(owners[rows]))

    return data, owners, ages


def plan_of(population=USERS, sigma=1e-6, **options):
    fields = {"clipping_norm": 1.0, "noise_multiplier": sigma, "rounds": 1, "delta": 1e-5}
    return release_plan(population, **{**fields, **options})


def run(method, plan, data, nodes=SILOS, text=TEXT):
    """Return the run's strategy and its model."""
    task = statistics_task(read_statistics(text), data)
    strategy = FederatedStrategy(method, plan, evaluate_every=0, seed=1, seeded_noise=True)
    app = type(method).client_app(task, allow_seeded_noise=True)
    model = ArrayRecord(task.initial_params(0))
    result = strategy.start(InProcessGrid(app, nodes), model, num_rounds=1)
    return strategy, result.arrays.to_torch_state_dict()


def values_of(method, plan, model, text=TEXT):
    results = estimates(
        read_statistics(text), model, method=method, plan=plan, rng=np.random.default_rng(0)
    )
    return [[each.value for each in values] for values in results.values()]


@pytest.mark.parametrize("placement", ["client", SecureSum()])
def test_every_person_counts_as_one_over_all_silos(placement):
    data, owners, ages = silos()
    method, plan = UserStatistics(num_silos=SILOS), plan_of(sigma=1e-3, noise_placement=placement)
    _, model = run(method, plan, data)
    count, mean, _, _ = values_of(method, plan, model)
    people = np.unique(owners)
    of_people = [ages[owners == person].mean() for person in people]
    assert count == [pytest.approx(len(people), abs=0.05)]
    assert mean == [pytest.approx(len(people), abs=0.05), pytest.approx(np.mean(of_people), abs=1)]


@pytest.mark.parametrize(
    "value", grid([np.nan, np.inf, 1e300, -5.0], lambda x: not abs(x) < np.inf)
)
def test_one_person_moves_the_sum_by_one_at_most_whatever_their_data(value):
    def spoil(owners, ages, events):
        ages[owners == 7] = value
        events[owners == 7] = value

    method, plan = UserStatistics(num_silos=SILOS), plan_of()
    sums = []
    for change in (None, spoil, lambda owners, ages, events: None):
        data, *_ = silos(change)
        _, model = run(method, plan, data)
        sums.append(USERS * model["released"].double().numpy())
    np.testing.assert_array_equal(sums[0], sums[2])
    moved = sums[0] - sums[1]
    assert np.isfinite(sums[1]).all()
    assert 0 < np.linalg.norm(moved) <= 2 * (1 + 1e-4)  # replaced: out and in


def test_clients_count_as_one_and_one_without_records_adds_nothing():
    rng = np.random.default_rng(2)

    def data(client):
        rows = 0 if client == 3 else 1 + client
        features = {"age": torch.tensor(rng.uniform(0, 100, rows)), "event": torch.ones(rows)}
        train = Examples(features, torch.zeros(rows, dtype=torch.long))
        return ClientData(train=train, test=train.subset([]))

    method = ClientStatistics()
    plan = plan_of(population=10, noise_placement="server")
    _, model = run(method, plan, data, nodes=10)
    assert values_of(method, plan, model)[0] == [pytest.approx(9, abs=1e-3)]


@pytest.mark.parametrize("rows", [0, 3])
def test_a_missing_column_is_refused_whether_or_not_a_client_has_records(rows):
    """Otherwise a query for a column that nobody has would show who has records."""

    def data(client):
        features = {"age": torch.ones(rows), "event": torch.ones(rows)}
        train = Examples(features, torch.zeros(rows, dtype=torch.long))
        return ClientData(train=train, test=train.subset([]))

    plan = plan_of(population=4, noise_placement="server")
    with pytest.raises(Exception, match="no column weight"):
        run(ClientStatistics(), plan, data, nodes=4, text="mean weight 0:200")


def test_the_noise_is_that_of_the_plan():
    data, *_ = silos()
    text, sigma = "histogram age 0:100:400", 5.0
    method, plan = UserStatistics(num_silos=SILOS), plan_of(sigma=sigma)
    _, model = run(method, plan, data, text=text)
    _, exact = run(method, plan_of(), data, text=text)
    noise = USERS * (model["released"] - exact["released"]).double().numpy()
    assert abs(noise.std() / sigma - 1) < 5 / (2 * len(noise)) ** 0.5
    results = estimates(
        read_statistics(text), model, method=method, plan=plan, rng=np.random.default_rng(0)
    )
    errors = [each.standard_error for values in results.values() for each in values]
    assert abs(np.mean(errors) / sigma - 1) < 0.02


def test_guarantees_are_provable_ones_of_one_user_in_one_release():
    data, *_ = silos()
    fields = {"sampling": FullParticipation(USERS), "rounds": 1, "clipping_norm": 1.0}
    plan = ReleasePlan.for_target(epsilon=0.5, delta=1e-5, noise_placement="client", **fields)
    strategy, _ = run(UserStatistics(num_silos=SILOS), plan, data)
    guarantees = strategy.guarantees()
    assert {each.basis for each in guarantees} == {"provable"}
    released = next(each for each in guarantees if each.view.value == "released-models")
    assert 0.49 < released.epsilon <= 0.5
    assert released.unit.value == "user"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sampling": PoissonSampling(USERS, 0.5)}, "FullParticipation"),
        ({"clipping_norm": 2.0}, "clipping_norm=2.0 of the plan: expected 1"),
        ({"rounds": 2}, "rounds=2 of the plan: expected 1"),
    ],
)
@pytest.mark.parametrize("method", [UserStatistics(num_silos=SILOS), ClientStatistics()])
def test_a_plan_that_cannot_release_statistics_is_refused(method, changes, message):
    with pytest.raises(InvalidValue, match=message):
        FederatedStrategy(method, plan_of(**changes))


def test_a_run_leaves_a_table_figures_and_a_page_with_the_guarantees(tmp_path):
    data, *_ = silos()
    joint, method = read_statistics(TEXT), UserStatistics(num_silos=SILOS)
    plan, task = plan_of(sigma=3.0), statistics_task(read_statistics(TEXT), data)
    directory = RunWriter.create(tmp_path / "run", config={"method": "statistics"})
    strategy = FederatedStrategy(method, plan, evaluate_every=0, seed=1, seeded_noise=True)
    grid = InProcessGrid(UserStatistics.client_app(task, allow_seeded_noise=True), SILOS)
    record(directory, strategy, grid, ArrayRecord(task.initial_params(0)), num_rounds=1)
    StatisticsFiles(joint, method, plan).end(directory)
    with (tmp_path / "run" / TABLE).open(encoding="utf-8", newline="") as stream:
        rows = [*csv.DictReader(stream)]
    assert len(rows) == 1 + 2 + 7 + 5
    assert all(float(row["lower"]) < float(row["upper"]) for row in rows[:10])
    page = (tmp_path / "run" / "statistics.html").read_text(encoding="utf-8")
    assert page.count("<figure>") == 2
    proved = [
        each
        for each in RunDirectory.open(tmp_path / "run").guarantees()
        if each.basis == "provable"
    ]
    assert page.count("<summary>ε = ") == len(proved) > 0
    assert page.count("not covered: ") == sum(len(each.not_covered) for each in proved)
    assert "mean of age, values clamped to [0, 100]" in page
    assert page.count("Noise can make a small count negative") == 1
    report = (tmp_path / "run" / "report.md").read_text(encoding="utf-8")
    tables = (tmp_path / "run" / "statistics.md").read_text(encoding="utf-8").splitlines()
    assert len(rows) < sum(line.startswith("| ") for line in tables)
    assert all(line in report for line in tables if line.startswith("| "))
    assert report.count("## Guarantees") == 0
    assert "### mean of age" in report


@pytest.mark.parametrize(("value", "text"), [(-0.3, "0"), (-0.7, "-1"), (1944.4, "1,944")])
def test_no_estimate_is_shown_as_minus_zero(value, text):
    estimate = Estimate(name="n", value=value, standard_error=22.0, lower=-44.0, upper=43.0)
    assert estimate_texts(estimate) == (text, "22", "-44 to 43")

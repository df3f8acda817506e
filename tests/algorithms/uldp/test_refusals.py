"""Methods of Uldp-FL refuse unfit data, plans and replies."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord

from flower_ext.algorithms.uldp import (
    UldpGroup,
    UldpNaive,
)
from flower_ext.algorithms.uldp.averaging import UldpAvg, UldpSgd, theory_learning_rate
from flower_ext.data import ClientData, Examples, SiloData
from flower_ext.federation import FederationNotReady, InProcessGrid
from flower_ext.federation.messages import records
from flower_ext.privacy import (
    FixedSizeSampling,
    PoissonSampling,
)
from tests.support.reference.comparing import close
from tests.support.silos import (
    COMMON,
    LOCAL,
    ROUNDS,
    SEED,
    SILOS,
    USERS,
    plan,
    silo,
    silos,
    task,
)
from tests.support.strategies import strategy_of
from tests.support.uldp_runs import DP_SGD, grouped, run, without


def no_owners():
    one = silo(1)
    return ClientData(train=one.train, test=one.test)


@pytest.mark.parametrize("method", [UldpAvg, UldpSgd, UldpGroup])
@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (no_owners, "expected SiloData, because its field owners"),
        (lambda: silo(1, users=USERS + 5), "the reason is in its own log"),
    ],
)
def test_silos_whose_data_do_not_fit_are_named_before_the_first_round(method, bad, message):
    strategy = grouped(2) if method is UldpGroup else strategy_of(method, plan=plan(), **COMMON)
    with pytest.raises(FederationNotReady, match=r"partitions \[1\] cannot take part") as error:
        run(strategy, [silo(0), bad(), silo(2)])
    assert message in str(error.value)
    assert strategy.participations.rounds == 0


def test_empty_silos_and_users_without_silos_take_part_with_nothing():
    data = [silo(0), silo(1), silo(2, records_=0)]
    for strategy in (
        strategy_of(UldpAvg, plan=plan(), local=LOCAL, weighting="by-records", **COMMON),
        strategy_of(UldpSgd, plan=plan(), **COMMON),
        grouped(3),
    ):
        run(strategy, data)
        assert strategy.refusals == []
        assert strategy.participations.rounds == ROUNDS


def test_a_silo_without_test_examples_is_left_out_of_the_scores():
    one = silo(1)
    none = SiloData(train=one.train, test=one.test.subset([]), owners=one.owners)
    strategy = strategy_of(UldpAvg, plan=plan(), local=LOCAL, **COMMON)
    run(strategy, [silo(0), none, silo(2)])
    assert strategy.refusals == []
    assert set(strategy.run.client_metrics) == {0, 2}


def test_a_metric_undefined_in_one_silo_is_averaged_over_the_others():
    def share_of_class_0(outputs, targets):
        wanted = targets == 0
        return float(wanted.float().mean()) if wanted.any() else math.nan

    data = silos()
    none = data[1].test.targets != 0
    lacking = data[1].test.subset(torch.nonzero(none).flatten().numpy())
    data[1] = SiloData(train=data[1].train, test=lacking, owners=data[1].owners)
    problem = replace(task(data), metrics={"share": share_of_class_0})
    strategy = strategy_of(UldpAvg, plan=plan(), local=LOCAL, **COMMON)
    app = UldpAvg.client_app(problem, allow_seeded_noise=True)
    grid = InProcessGrid(app, num_clients=SILOS)
    strategy.start(grid, ArrayRecord(problem.initial_params(SEED)), num_rounds=1)
    assert strategy.refusals == []
    assert [sorted(scores) for scores in strategy.run.client_metrics.values()] == [
        ["loss", "num-examples", "share"],
        ["loss", "num-examples"],
        ["loss", "num-examples", "share"],
    ]
    row = strategy.run.progress.row
    shares = [share_of_class_0(None, data[number].test.targets) for number in (0, 2)]
    assert row["share_mean"] == pytest.approx(np.mean(shares))
    assert row["share_clients"] == 2


class Liar(InProcessGrid):
    """A grid in which silo 1 reports a false histogram."""

    histogram = None

    def send_and_receive(self, messages, *, timeout=None):
        replies = list(super().send_and_receive(messages, timeout=timeout))
        for reply in replies:
            is_histogram = reply.metadata.message_type.startswith("query.uldp")
            record = reply.content.array_records.get("answer", {})
            if is_histogram and "histogram" in record and reply.metadata.src_node_id == 1_001:
                answer = {**records.to_arrays(record), "histogram": self.histogram}
                reply.content["answer"] = records.to_record(answer)
        return replies


@pytest.mark.parametrize(
    "histogram",
    [
        np.full(USERS, -1),
        np.full(USERS, 2**62),
        np.full(USERS + 1, 3),
        np.full(USERS, 0.5),
        np.full((USERS, 1), 3),
    ],
)
def test_a_histogram_that_is_none_is_refused(histogram):
    strategy = strategy_of(UldpAvg, plan=plan(), weighting="by-records", **COMMON)
    grid = Liar(UldpAvg.client_app(task(), allow_seeded_noise=True), num_clients=SILOS)
    grid.histogram = histogram
    with pytest.raises(FederationNotReady, match=r"partitions \[1\] cannot take part"):
        strategy.start(grid, ArrayRecord(task().initial_params(SEED)))


def test_a_user_whose_training_diverges_adds_nothing_and_nobody_sees_it():
    user, data = 3, silos()
    spoiled = []
    for examples in data:
        features = examples.train.features.clone()
        features[examples.owners == user] = math.inf
        train = Examples(features, examples.train.targets)
        spoiled.append(SiloData(train=train, test=examples.test, owners=examples.owners))
    strategy = strategy_of(UldpAvg, plan=plan(), local=LOCAL, **COMMON)
    close(
        run(strategy, spoiled),
        run(strategy_of(UldpAvg, plan=plan(), local=LOCAL, **COMMON), without(user, data)),
    )
    assert strategy.refusals == []


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: strategy_of(UldpAvg, plan=plan(noise_placement="server"), **COMMON),
            "noise_placement='server' of the plan",
        ),
        (
            lambda: strategy_of(UldpAvg, plan=plan(FixedSizeSampling(USERS, 3)), **COMMON),
            "expected FullParticipation or PoissonSampling",
        ),
        (lambda: strategy_of(UldpAvg, plan=plan(), **{**COMMON, "num_silos": 0}), "num_silos=0"),
        (lambda: strategy_of(UldpAvg, plan=plan(), weighting="fair", **COMMON), "weighting='fair'"),
        (lambda: UldpAvg(num_silos=SILOS, user_draw="protocol"), "user_draw='protocol': expected"),
        (lambda: UldpNaive(num_silos=0), "num_silos=0"),
        (
            lambda: strategy_of(UldpSgd, plan=plan(), local=LOCAL, **COMMON),
            "ULDP-SGD has no local training",
        ),
        (lambda: plan(PoissonSampling(USERS, 0.0)), r"rate=0\.0: expected a number in \(0, 1\]"),
        (lambda: plan(PoissonSampling(USERS, 1.1)), r"rate=1\.1"),
        (
            lambda: strategy_of(UldpNaive, plan=plan(PoissonSampling(USERS, 0.5)), **COMMON),
            "does not sample users",
        ),
        (lambda: grouped(0), "group_size=0: expected an integer >= 1"),
        (lambda: grouped("mean"), "group_size='mean'"),
        (lambda: grouped(2, num_users=0), "num_users=0"),
        (lambda: grouped(2, delta=1.0), r"delta=1\.0"),
        (lambda: grouped(2, local=replace(DP_SGD, noise_multiplier=0.0)), "noise_multiplier=0.0"),
    ],
)
def test_settings_that_make_no_sense_are_refused_with_their_name(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_the_learning_rate_of_the_theory():
    assert theory_learning_rate(num_silos=5, num_users=100, epochs=4) == pytest.approx(100.0)

"""The server refuses uploads that are improbably large for their noise."""

import math

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord

from flower_ext.algorithms import DPFedAvg
from flower_ext.algorithms.uldp import UldpAvg
from flower_ext.federation import (
    FederatedStrategy,
    InProcessGrid,
)
from flower_ext.federation.server.run_guarantees import summary_of
from flower_ext.privacy import (
    FullParticipation,
    OutputPerturbation,
    PerturbationPlan,
    RecordLevelPlan,
)
from flower_ext.privacy.mechanisms.noise import largest_noised_norm
from tests.faults.grid import times
from tests.support import silos as uldp
from tests.support.grids import grid as grid_of
from tests.support.hostile import CLIENTS, FAST, plan
from tests.support.worlds import initial, task


@pytest.mark.parametrize(
    ("bound", "numbers"),
    grid_of([(1.0, 1), (0.5, 200), (30.0, 50), (0.0, 10)], lambda case: case[1] < 200),
)
def test_honest_noise_stays_within_its_largest_norm_and_near_it(bound, numbers):
    limit = largest_noised_norm(bound, 0.3, numbers)
    noise = 0.3 * np.random.default_rng(0).standard_normal((100_000, numbers))
    noise[:, 0] += bound
    largest = np.linalg.norm(noise, axis=1).max()
    assert largest < limit < largest + 5 * 0.3


PLANS = {
    "client level": plan(),
    "models": RecordLevelPlan(
        sampling=FullParticipation(CLIENTS),
        clipping_norm=2.0,
        noise_stddev=0.1,
        num_examples=30,
        rounds=3,
        delta=0.1,
    ),
    "output": PerturbationPlan(
        sampling=FullParticipation(CLIENTS),
        perturbation=OutputPerturbation(clipping_norm=2.0, noise_stddev=0.1),
        delta=0.1,
    ),
}


@pytest.mark.parametrize("protection", PLANS)
@pytest.mark.parametrize(("factor", "refused"), [(1.0, 0), (100.0, 1)])
def test_an_upload_that_bound_and_noise_do_not_explain_is_refused(protection, factor, refused):
    grid = InProcessGrid(DPFedAvg.client_app(task()), CLIENTS)
    strategy = FederatedStrategy(DPFedAvg(local=FAST), PLANS[protection])
    replies = list(
        grid.send_and_receive(strategy.configure_train(1, initial(), ConfigRecord(), grid))
    )
    times(factor)(replies[0], np.random.default_rng(0))
    strategy.aggregate_train(1, replies)
    assert strategy.run.progress.row["answered"] == CLIENTS - refused
    assert all("honest upload" in refusal for refusal in strategy.refusals)
    assert len(strategy.refusals) == refused


def test_a_server_that_noises_clips_whatever_comes():
    grid = InProcessGrid(DPFedAvg.client_app(task()), CLIENTS)
    strategy = FederatedStrategy(DPFedAvg(local=FAST), plan(noise_placement="server"))
    replies = list(
        grid.send_and_receive(strategy.configure_train(1, initial(), ConfigRecord(), grid))
    )
    times(1e6)(replies[0], np.random.default_rng(0))
    strategy.aggregate_train(1, replies)
    assert strategy.refusals == []
    protection = strategy.run.mechanism.protection(summary_of(strategy.run), 4)
    assert protection.largest_upload(9) == math.inf


@pytest.mark.parametrize("weighting", ["equal", "by-records"])
def test_a_silos_sum_may_be_as_large_as_its_users_weigh(weighting):
    strategy = FederatedStrategy(UldpAvg(num_silos=3, weighting=weighting, local=FAST), uldp.plan())
    grid = InProcessGrid(UldpAvg.client_app(uldp.task()), 3)
    strategy.configure_train(1, ArrayRecord(uldp.task().initial_params(0)), ConfigRecord(), grid)
    norms = [strategy.newest_round.cohort.norms[silo] for silo in range(3)]
    present = {int(user) for silo in uldp.silos() for user in silo.owners}
    users = uldp.USERS if weighting == "equal" else len(present)
    assert sum(norms) == pytest.approx(users)
    assert min(norms) > 0.5

"""A round: clients get what they need; the server accepts updates of honest size alone."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from flwr.app import ConfigRecord, MetricRecord, RecordDict

from flower_ext.algorithms import DPFedAvg
from flower_ext.federation import FederatedStrategy, InProcessGrid, RefusedReply, Stragglers
from flower_ext.federation.messages import records
from flower_ext.federation.population import Cohort
from flower_ext.federation.sums.plain import PlainSum
from flower_ext.federation.sums.summation import Opening
from flower_ext.privacy import FullParticipation, NonPrivatePlan, RecordLevelPlan, ReleasePlan
from flower_ext.privacy.accounting.participations import Participations
from flower_ext.privacy.run_summary import MethodTraits, RunSummary
from flower_ext.training import LocalTraining
from tests.support.replies import reply
from tests.support.worlds import initial, task

CLIENTS, NUMBERS = 4, 16
EVERYONE = FullParticipation(CLIENTS)
BASE = {"w": np.zeros(NUMBERS, np.float32)}
TERMS = {"sampling": EVERYONE, "rounds": 3, "delta": 0.1}
RELEASED = ReleasePlan(**TERMS, clipping_norm=0.5, noise_multiplier=1.0).mechanism()
BY_SERVER = ReleasePlan(
    **TERMS, clipping_norm=0.5, noise_multiplier=1.0, noise_placement="server"
).mechanism()
OF_MODELS = RecordLevelPlan(**TERMS, clipping_norm=2.0, noise_stddev=0.01, num_examples=30)


def update_of_norm(norm):
    """Return an update whose values are equal."""
    return {"w": np.full(NUMBERS, norm / NUMBERS**0.5, np.float32)}


def read(plan, norm, *, record=records.UPDATE, metrics=None, received=0.0, norms=None):
    """Read the reply of client 2, which has these contents."""
    content = RecordDict({record: records.to_record(update_of_norm(norm))})
    if metrics is not None:
        content["metrics"] = MetricRecord(metrics)
    cohort = Cohort(
        partitions=range(CLIENTS),
        units=range(CLIENTS),
        population=9,
        norms=norms or {},
        models={2: update_of_norm(received)} if received else {},
    )
    opening = Opening(
        clients=SimpleNamespace(partition_of=lambda _: 2),
        population=None,
        cohort=cohort,
        number=1,
        server_round=1,
        noise=None,
        model=BASE,
        protection=protection_of(plan),
    )
    return PlainSum(plan).open(opening).read(reply(content))


def largest_norm(plan, norms=1.0):
    """Return the largest norm of an upload that the server accepts."""
    return protection_of(plan).largest_upload(NUMBERS, norms=norms)


def protection_of(plan):
    """Return the protection of a client's upload under a plan."""
    run = RunSummary(method=MethodTraits(name="test"), participations=Participations())
    return plan.protection(run, CLIENTS)


@pytest.mark.parametrize("norms", [{}, {2: 1.0}, {2: 3.0, 1: 9.0}])
def test_an_update_is_accepted_up_to_the_norm_of_an_honest_one(norms):
    largest = largest_norm(RELEASED, norms.get(2, 1.0))
    for part in (0.0, 0.5, 0.9999, 1.00005):  # of which the last is rounding
        accepted = read(RELEASED, part * largest, norms=norms)
        np.testing.assert_array_equal(accepted.arrays["w"], update_of_norm(part * largest)["w"])
    for part in (1.001, 1.9, 100.0):
        with pytest.raises(RefusedReply, match="largest norm of an honest upload"):
            read(RELEASED, part * largest, norms=norms)


def test_where_models_are_bounded_the_norm_covers_model_and_update():
    largest = largest_norm(OF_MODELS)
    read(OF_MODELS, -0.5 * largest, received=largest)
    read(OF_MODELS, -1.9 * largest, received=largest)
    for step in (0.01, 0.5, -2.01):
        with pytest.raises(RefusedReply, match="largest norm of an honest upload"):
            read(OF_MODELS, step * largest, received=largest)


def test_only_a_bounding_and_noising_server_takes_uploads_of_any_size():
    for plan in (BY_SERVER, NonPrivatePlan(sampling=EVERYONE)):
        read(plan, 1e6)
        read(plan, 1e6, record=records.MODEL)
    for plan in (RELEASED, OF_MODELS):
        with pytest.raises(RefusedReply, match="no array record"):
            read(plan, 0.1, record=records.MODEL)


def test_an_update_without_examples_is_refused_and_undeclared_only_if_weighted():
    equal, weighted = (
        NonPrivatePlan(sampling=EVERYONE, weighting=w) for w in ("clients", "examples")
    )
    assert (equal.weighs_examples, weighted.weighs_examples) == (False, True)
    for plan in (equal, weighted, BY_SERVER):
        assert read(plan, 1.0, metrics={"num-examples": 1}).metrics == {"num-examples": 1}
        with pytest.raises(RefusedReply, match="num-examples=0"):
            read(plan, 1.0, metrics={"num-examples": 0})
    for plan in (equal, BY_SERVER, RELEASED):
        assert read(plan, 0.1).metrics == {}
    with pytest.raises(RefusedReply, match="num-examples=0"):
        read(weighted, 1.0)


class WithHints(DPFedAvg):
    """DP-FedAvg with a record for client 1 alone."""

    def begin_round(self, cohort, model, state):
        return replace(cohort, requests={1: {"hint": BASE}})


def test_each_client_gets_its_records_and_the_epochs_it_completes():
    local = LocalTraining(epochs=5, batch_size=2, learning_rate=0.1)
    plan = NonPrivatePlan(sampling=FullParticipation(8))
    options = {"stragglers": Stragglers(ratio=0.5), "seed": 1}
    strategy = FederatedStrategy(WithHints(local=local), plan, **options)
    grid = InProcessGrid(DPFedAvg.client_app(task()), num_clients=8)
    messages = strategy.configure_train(1, initial(), ConfigRecord(), grid)
    contents = {p: message.content for p, message in enumerate(messages)}
    epochs = {p: records.read_trainings(c)["local"].epochs for p, c in contents.items()}
    assert 5 in epochs.values()
    assert min(epochs.values()) < 5
    assert [p for p, content in contents.items() if "hint" in content] == [1]
    whole = {id(content) for p, content in contents.items() if p != 1 and epochs[p] == 5}
    assert len(whole) == 1  # equal requests share one object

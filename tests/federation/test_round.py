"""Clients of a round get what they need; the server accepts updates of honest size alone."""

from types import SimpleNamespace

import numpy as np
import pytest
from flwr.app import ConfigRecord, MetricRecord, RecordDict

from flower_ext.errors import InvalidValue
from flower_ext.federation import RefusedReply, records
from flower_ext.federation.population import Cohort
from flower_ext.federation.round import (
    Updates,
    norm_columns,
    read_update,
    training_contents,
    with_remembered,
)
from flower_ext.privacy import FullParticipation, NonPrivatePlan, RecordLevelPlan, ReleasePlan
from flower_ext.privacy.accounting.participations import Participations
from flower_ext.privacy.mechanisms.run_facts import MethodTraits, RunFacts
from flower_ext.training import LocalTraining
from tests.support.replies import reply

CLIENTS, NUMBERS = 4, 16
EVERYONE = FullParticipation(CLIENTS)
BASE = {"w": np.zeros(NUMBERS, np.float32)}
FACTS = {"sampling": EVERYONE, "rounds": 3, "delta": 0.1}
RELEASED = ReleasePlan(**FACTS, clipping_norm=0.5, noise_multiplier=1.0).mechanism()
BY_SERVER = ReleasePlan(
    **FACTS, clipping_norm=0.5, noise_multiplier=1.0, noise_placement="server"
).mechanism()
OF_MODELS = RecordLevelPlan(**FACTS, clipping_norm=2.0, noise_stddev=0.01, num_examples=30)


def numbers(norm):
    return {"w": np.full(NUMBERS, norm / NUMBERS**0.5, np.float32)}


def read(plan, norm, *, record=records.UPDATE, metrics=None, received=0.0, norms=None):
    """Read the reply of client 2, which has these contents."""
    content = RecordDict({record: records.to_record(numbers(norm))})
    if metrics is not None:
        content["metrics"] = MetricRecord(metrics)
    exchange = SimpleNamespace(partition_of=lambda _: 2, sent=lambda _: numbers(received))
    cohort = Cohort(asked=range(CLIENTS), units=range(CLIENTS), population=9, norms=norms or {})
    return read_update(reply(content), plan, protection_of(plan), cohort, BASE, exchange)


def limit(plan, norms=1.0):
    return protection_of(plan).largest_upload(NUMBERS, norms=norms)


def protection_of(plan):
    run = RunFacts(method=MethodTraits(name="test"), participations=Participations())
    return plan.protection(run, CLIENTS)


@pytest.mark.parametrize("norms", [{}, {2: 1.0}, {2: 3.0, 1: 9.0}])
def test_an_update_is_accepted_up_to_the_norm_of_an_honest_one(norms):
    largest = limit(RELEASED, norms.get(2, 1.0))
    for part in (0.0, 0.5, 0.9999, 1.00005):  # of which the last is rounding
        accepted = read(RELEASED, part * largest, norms=norms)
        np.testing.assert_array_equal(accepted.arrays["w"], numbers(part * largest)["w"])
    for part in (1.001, 1.9, 100.0):
        with pytest.raises(RefusedReply, match="largest norm of an honest upload"):
            read(RELEASED, part * largest, norms=norms)


def test_where_models_are_bounded_the_norm_is_that_of_the_received_model_and_the_update():
    largest = limit(OF_MODELS)
    read(OF_MODELS, -0.5 * largest, received=largest)
    read(OF_MODELS, -1.9 * largest, received=largest)
    for step in (0.01, 0.5, -2.01):
        with pytest.raises(RefusedReply, match="largest norm of an honest upload"):
            read(OF_MODELS, step * largest, received=largest)


def test_only_a_server_that_bounds_and_noises_takes_updates_of_any_size_and_whole_models():
    for plan in (BY_SERVER, NonPrivatePlan(sampling=EVERYONE)):
        read(plan, 1e6)
        read(plan, 1e6, record=records.MODEL)
    for plan in (RELEASED, OF_MODELS):
        with pytest.raises(RefusedReply, match="no array record"):
            read(plan, 0.1, record=records.MODEL)


def test_an_update_without_examples_is_refused_and_one_that_does_not_say_only_if_they_weigh():
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


def test_each_client_gets_the_shared_records_its_own_and_as_many_epochs_as_it_completes():
    shared = {"shared": ConfigRecord({"a": 1})}
    mine = records.to_record(BASE)
    contents = training_contents(
        Cohort(asked=[0, 1, 2, 3], units=[], population=9),
        shared,
        {"local": LocalTraining(epochs=5)},
        slow={3: 0.5},
        request=lambda partition: {"mine": mine} if partition == 1 else {},
    )
    assert contents[0] is contents[2]
    assert all(content["shared"] is shared["shared"] for content in contents.values())
    assert [content.get("mine") for content in contents.values()] == [None, mine, None, None]
    others = [{k: c for k, c in content.items() if k != "mine"} for content in contents.values()]
    assert others[1] == others[0]
    assert others[3] != others[0]


def test_each_client_hears_which_of_its_rounds_was_used_last_in_as_few_records_as_there_are():
    one, other = {"a": ConfigRecord({"a": 1})}, {"a": ConfigRecord({"a": 2})}
    contents = {0: one, 1: one, 2: one, 3: other, 4: one}
    made = []

    def facts(last):
        made.append(last)
        return ConfigRecord({"last": last})

    heard = with_remembered(contents, {1: 2, 3: 2, 4: 2}, facts)
    assert [heard[p][records.ROUND]["last"] for p in range(5)] == [0, 2, 0, 2, 2]
    assert [heard[p]["a"]["a"] for p in range(5)] == [1, 1, 1, 2, 1]
    assert sorted(made) == [0, 2, 2]
    assert heard[0] is heard[2]
    assert heard[1] is heard[4]


ARRIVED = [(3, records.Update({}, {"loss": 1.0})), (1, records.Update({}, {"loss": 2.0}))]


def test_updates_that_are_kept_can_be_read_again():
    updates = Updates(iter(ARRIVED), kept=True)
    updates.exhaust()
    assert updates.each == dict(ARRIVED)
    assert updates.metrics == {3: {"loss": 1.0}, 1: {"loss": 2.0}}


def test_of_updates_that_are_not_kept_only_the_partitions_and_metrics_stay():
    updates = Updates(iter(ARRIVED), kept=False)
    assert [*updates] == ARRIVED
    assert [*updates.each] == [3, 1]
    assert len(updates.each) == 2
    assert updates.metrics == {3: {"loss": 1.0}, 1: {"loss": 2.0}}
    with pytest.raises(InvalidValue, match="needs_each_update = True"):
        updates.each[3]


def test_norms_are_reported_by_those_who_tell_theirs():
    metrics = [{"update-norm": 1.0}, {"loss": 7.0}, {"update-norm": 3.0}]
    assert norm_columns(metrics) == {"update_norm_mean": 2.0, "update_norm_std": 1.0}
    assert norm_columns([{"loss": 7.0}]) == {}

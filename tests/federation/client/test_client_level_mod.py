"""Client-level privacy, by a mod, of ClientApps that do not use this package."""

import numpy as np
import pytest
from flwr.app import (
    Array,
    ArrayRecord,
    Message,
)

from flower_ext.algorithms import DPFedAvg
from flower_ext.federation import FederatedStrategy, FederationNotReady, client_level_dp_mod
from flower_ext.federation.messages import records
from flower_ext.privacy import (
    OutputPerturbation,
)
from flower_ext.privacy.mechanisms.protections import ClipAndNoise, ProtectedByServer, Unprotected
from tests.support.client_level import (
    LOUD,
    TIGHT,
    ask,
    foreign_app,
    plan,
    run,
)


def reads_round(message, context, call_next):
    """Read what every training of Flower has, as a mod that logs does."""
    if message.metadata.message_type == "train":
        assert message.content["config"]["server-round"] in (0, 1, 2)
    return call_next(message, context)


def reads_metrics(message, context, call_next):
    reply = call_next(message, context)
    if reply.has_content() and message.metadata.message_type == "train":
        assert reply.content["metrics"]["num-examples"] == LOUD["num-examples"]
    return reply


def halves(message, context, call_next):
    """Compress what leaves the client, which the server cannot read then."""
    reply = call_next(message, context)
    for name, record in list(reply.content.array_records.items()):
        half = {key: Array(array.numpy().astype(np.float16)) for key, array in record.items()}
        reply.content[name] = ArrayRecord(half)
    return reply


def mods_of(before=(), after=()):
    return [*before, client_level_dp_mod(allow_seeded_noise=True), *after]


def test_mods_after_ours_see_a_plain_app_and_earlier_mods_the_settings():
    for mods in (mods_of(after=[reads_round, reads_metrics]), mods_of(before=[reads_round])):
        _, strategy, _ = run(foreign_app(mods=mods))
        assert strategy.refusals == []
        assert strategy.participations.rounds == 2


@pytest.mark.parametrize("before", [reads_metrics, halves])
def test_an_earlier_mod_that_spoils_uploads_ends_the_run_without_spend(before):
    strategy = FederatedStrategy(DPFedAvg(), plan(), evaluate_every=0)
    with pytest.raises(FederationNotReady, match=r"with that mod before all others|put .* first"):
        run(foreign_app(mods=mods_of(before=[before])), strategy)
    assert strategy.participations.rounds == 0
    assert strategy.guarantees() == []


def update_of(reply: Message):
    assert not reply.has_error(), reply.error.reason
    return {n: a.numpy() for n, a in reply.content[records.UPDATE].items()}


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_floating_point_arrays_are_clipped_as_one_vector_in_their_precision(dtype):
    model = {"w": np.zeros(144, dtype), "t": np.array(0.0, dtype)}
    returned = {"w": np.full(144, 1.0, dtype), "t": np.array(5.0, dtype)}
    update = update_of(ask(model, returned))
    assert update["t"].shape == ()
    assert all(array.dtype == dtype for array in update.values())
    np.testing.assert_allclose(update["t"], 5 / 13, rtol=2e-3)
    np.testing.assert_allclose(update["w"], np.full(144, 1 / 13), rtol=2e-3)


def test_half_precision_is_refused_by_name_before_training_even_among_others():
    model = {"v": np.zeros(2, np.float32), "w": np.zeros(4, np.float16)}
    reply = ask(model, model)
    assert reply.has_error()
    assert "'w' has dtype float16" in reply.error.reason
    assert "expected float32 or float64" in reply.error.reason


def test_an_update_of_zeros_is_noise_of_the_requested_share():
    model = {"w": np.zeros(20_000, np.float32)}
    update = update_of(ask(model, model, ClipAndNoise(clipping_norm=1.0, noise_stddev=0.7)))
    assert update["w"].std() == pytest.approx(0.7, rel=0.03)


@pytest.mark.parametrize(
    "counter", [np.array(3), np.array([True, False]), np.arange(3, dtype="u1")]
)
def test_counters_leave_the_client_as_they_came(counter):
    model = {"w": np.zeros(3, np.float32), "n": counter}
    returned = {"w": np.ones(3, np.float32), "n": np.ones_like(counter)}
    update = update_of(ask(model, returned))
    assert update["n"].dtype == counter.dtype
    assert update["n"].shape == counter.shape
    assert not update["n"].any()  # the difference to the received values
    assert np.linalg.norm(update["w"]) == pytest.approx(1.0, rel=1e-4)


def test_a_difference_that_overflows_counts_as_none():
    model = {"w": np.full(2, -3e38, np.float32)}
    update = update_of(ask(model, {"w": np.full(2, 3e38, np.float32)}))
    assert np.abs(update["w"]).max() < 1e-4


def test_the_norm_before_clipping_is_sent_if_diagnostics_are_requested():
    model = {"w": np.zeros(4, np.float32), "n": np.array(0)}
    reply = ask(model, {"w": np.full(4, 2.0, np.float32), "n": np.array(9)}, diagnostics=True)
    assert dict(reply.content["metrics"]) == {"update-norm": 4.0}


@pytest.mark.parametrize(
    ("protection", "facts", "message"),
    [
        (OutputPerturbation(clipping_norm=1.0, noise_stddev=1.0), {}, "'OutputPerturbation'"),
        (Unprotected(), {}, "'none'"),
        (TIGHT, {"clipping-norm": -1.0}, "clipping_norm"),
        (TIGHT, {"noise-stddev": float("nan")}, "noise_stddev"),
        (TIGHT, {"noise-stddev": 0.0}, "noise_stddev"),
        (TIGHT, {"number": 0}, "number"),
        (TIGHT, {"another": 1.0}, "expected only entries of"),
    ],
)
def test_a_message_beyond_the_mods_abilities_is_refused_by_name(protection, facts, message):
    model = {"w": np.zeros(3, np.float32)}
    reply = ask(model, model, protection, **facts)
    assert reply.has_error()
    assert message in reply.error.reason


def test_a_plan_whose_server_noises_asks_the_client_for_nothing():
    model = {"w": np.zeros(3, np.float32)}
    reply = ask(model, {"w": np.ones(3, np.float32)}, ProtectedByServer())
    np.testing.assert_array_equal(reply.content["arrays"]["w"].numpy(), np.ones(3))

"""All handlers of messages, on the server and on clients, reject arbitrary content."""

from functools import cache

import numpy as np
import pytest
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    MetricRecord,
    RecordDict,
)
from flwr.serverapp.strategy import FedYogi
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of

from flower_ext.algorithms import Apple, DPFedAvg, FedALA, FedAMP, FedDyn, Hosted, PFedMe
from flower_ext.algorithms.uldp import UldpAvg, UldpNaive
from flower_ext.algorithms.uldp.silo_answers import HISTOGRAM, read_silo_answer
from flower_ext.algorithms.upcycled import Upcycled
from flower_ext.federation import (
    FederatedStrategy,
    FederationNotReady,
    InProcessGrid,
    RefusedReply,
    VirtualGrid,
)
from flower_ext.federation.messages import records
from flower_ext.federation.messages.replies import read_answer, read_scores, read_update
from flower_ext.federation.messages.roster import Roster
from flower_ext.privacy import FullParticipation
from flower_ext.training import DpSgdTraining
from tests.faults.malformed import (
    ANSWER,
    ENVELOPE,
    EVALUATE,
    TRAIN,
    copied,
    npy,
    requests,
    without_record,
)
from tests.faults.worlds import (
    CASES,
    CLIENTS,
    FAST,
    PRIVATE,
    PRIVATE_PLUG_INS,
    SILOS,
    USERS,
    Case,
    initial,
    nobody_private,
    record_plan,
    task,
    user_plan,
)
from tests.support.grids import grid as grid_of
from tests.support.replies import reply
from tests.support.strategies import group_strategy, strategy_of

METHODS = {case.name: case for case in (*CASES, PRIVATE, *PRIVATE_PLUG_INS)}
FUZZ = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=40)
DP_SGD = DpSgdTraining(
    steps=2,
    sampling_rate=0.5,
    batch_size=4,
    learning_rate=0.1,
    clipping_norm=0.5,
    noise_multiplier=1.0,
)
OTHERS = {
    "FedAMP": lambda **o: strategy_of(FedAMP, plan=record_plan(), local=FAST, **o),
    "APPLE": lambda **o: strategy_of(Apple, plan=record_plan(), local=FAST, **o),
    "FedALA": lambda **o: strategy_of(FedALA, plan=record_plan(), local=FAST, **o),
    "pFedMe": lambda **o: strategy_of(PFedMe, plan=nobody_private(), local=FAST, **o),
    "FedDyn": lambda **o: strategy_of(FedDyn, plan=nobody_private(), local=FAST, **o),
    "FedYogi": lambda **o: strategy_of(Hosted, FedYogi(), plan=nobody_private(), local=FAST, **o),
    "Upcycled FedAvg": lambda **o: (
        Upcycled(strategy_of(DPFedAvg, plan=nobody_private(), local=FAST, **o)).base
    ),
    "ULDP-NAIVE": lambda **o: strategy_of(
        UldpNaive,
        plan=user_plan(sampling=FullParticipation(USERS)),
        num_silos=CLIENTS,
        local=FAST,
        **o,
    ),
    "ULDP-GROUP": lambda **o: group_strategy(
        num_silos=CLIENTS, num_users=USERS, group_size=4, delta=1e-3, local=DP_SGD, **o
    ),
}
ALL = METHODS | {
    name: Case(
        name=name,
        build=build,
        mutations={
            **TRAIN,
            **({"no size": without_record("metrics")} if name == "FedYogi" else {}),
        },
    )
    for name, build in OTHERS.items()
}


NAMES = st.sampled_from(["w", "b", HISTOGRAM, "sum", "round", "lost", ""]) | st.text(max_size=3)
DTYPES = (
    arrays_of.floating_dtypes() | arrays_of.integer_dtypes() | arrays_of.complex_number_dtypes()
)
READABLE = arrays_of.arrays(
    DTYPES | st.sampled_from([np.dtype("f4"), np.dtype("?"), np.dtype("U3"), np.dtype("M8[s]")]),
    st.sampled_from([(2, 3), (), (USERS,), (0,), (1, 2, 3)]),
).map(Array)
DECLARED = st.builds(
    Array,
    dtype=st.sampled_from(["float32", "int64", "uint8", "object", ""]),
    shape=st.sampled_from([(2, 3), (), (USERS,), (-1,), (2**62, 2**62)]),
    stype=st.sampled_from(["numpy.ndarray", "torch.tensor", ""]),
    data=st.binary(max_size=40)
    | st.sampled_from([npy(np.zeros((2, 3), "f4")), npy(np.zeros(USERS, "i8")), b"\x93NUMPY"])
    | st.binary(max_size=40).map(lambda tail: b"\x93NUMPY\x01\x00\x76\x00{'descr': '<f4'" + tail),
)
NUMBERS = st.floats() | st.integers() | st.just(10**400)
METRICS = st.dictionaries(
    st.sampled_from(["num-examples", "update-norm", "loss", "local-steps"]) | st.text(max_size=2),
    NUMBERS | st.lists(st.floats(), max_size=2),
    max_size=3,
).map(MetricRecord)
CONFIGS = st.dictionaries(
    st.sampled_from(["partition", "number"]) | st.text(max_size=2),
    NUMBERS | st.text(max_size=2) | st.binary(max_size=2) | st.booleans(),
    max_size=3,
).map(ConfigRecord)
RECORDS = (
    st.dictionaries(NAMES, READABLE | DECLARED, max_size=3).map(ArrayRecord) | METRICS | CONFIGS
)
CONTENTS = st.dictionaries(
    st.sampled_from(["update", "arrays", "metrics", "answer", "identity"]) | st.text(max_size=2),
    RECORDS,
    max_size=4,
).map(RecordDict)
BASE = {"w": np.ones((2, 3), np.float32), "b": np.array(0.5, np.float32)}


@FUZZ
@given(CONTENTS, st.booleans())
def test_records_of_anything_are_refused_or_are_an_update(content, trust_models):
    try:
        update = read_update(reply(content), base=BASE, trust_models=trust_models)
    except RefusedReply:
        return
    assert {n: (a.shape, a.dtype) for n, a in update.arrays.items()} == {
        n: (a.shape, a.dtype) for n, a in BASE.items()
    }
    assert all(np.isfinite(a).all() and np.abs(a).max() < 1e16 for a in update.arrays.values())


@FUZZ
@given(CONTENTS)
def test_records_of_anything_are_refused_or_are_scores(content):
    try:
        scores = read_scores(reply(content))
    except RefusedReply:
        return
    assert scores
    assert all(type(v) is float and abs(v) <= 1e15 for v in scores.values())
    assert 0 <= scores.get("num-examples", 0) <= 2**40


@FUZZ
@given(CONTENTS)
def test_records_of_anything_are_refused_or_are_a_histogram(content):
    try:
        counts, key = read_silo_answer(read_answer(reply(content)), USERS, silos_draw=False)
    except RefusedReply:
        return
    assert key == b""
    assert counts.shape == (USERS,)
    assert counts.dtype == np.int64
    assert counts.min() >= 0


class Forger(InProcessGrid):
    """A grid that replaces the contents of one node's answers to questions."""

    content = RecordDict()
    copies = 1
    only = "query"

    def send_and_receive(self, messages, *, timeout=None):
        out = []
        for answer in super().send_and_receive(messages, timeout=timeout):
            kind = answer.metadata.message_type
            if answer.metadata.src_node_id == 1_001 and kind.startswith(self.only):
                answer = copied(answer)
                answer.__dict__["_content"] = self.content
                out += [answer] * self.copies
            else:
                out.append(answer)
        return out


@FUZZ
@given(CONTENTS | st.none(), st.integers(0, 2))
def test_arbitrary_identities_never_make_a_wrong_roster(content, copies):
    grid = Forger(UldpAvg.client_app(task()), SILOS)
    grid.content, grid.copies = content, copies
    try:
        roster = Roster.connect(grid, SILOS, timeout=1.0)
    except FederationNotReady:
        return
    assert roster.nodes == {0: 1_000, 1: 1_001, 2: 1_002}


@cache
def round_of(name):
    """Return a strategy that waits for the replies of a round, and these replies."""
    case = ALL[name]
    strategy = case.build(seed=1, evaluate_every=1)
    grid = InProcessGrid(strategy.method.client_app(task(), allow_seeded_noise=True), case.nodes)
    number, replies = 0, []
    while len(replies) < 2:
        number += 1
        train_requests = strategy.configure_train(number, initial(), ConfigRecord(), grid)
        replies = list(grid.send_and_receive(train_requests))
    evaluate = strategy.configure_evaluate(number, initial(), ConfigRecord(), grid)
    return strategy, replies, list(grid.send_and_receive(evaluate))


def accepted(strategy, requests, replies, read):
    strategy.refusals.clear()  # a run keeps the reasons of the first refusals only
    values = dict(requests.accepted(replies, read))
    return values, [*strategy.refusals]


def held_against(name, kind, what, seed, mutations):
    """Deliver a malformed reply before and after its node's valid one; it must have no effect."""
    strategy, uploads, scores = round_of(name)
    replies = uploads if kind == "train" else scores
    read = strategy.newest_round._round.sum.read if kind == "train" else read_scores
    phase = strategy.newest_round._round if kind == "train" else strategy._evaluation
    rng = np.random.default_rng(seed)
    good = replies[rng.integers(len(replies))]
    mutations[what](bad := copied(good), rng)
    if weighting := getattr(getattr(read, "__self__", None), "_summation", None):
        weighting.server._sums.clear()  # one round serves several examples
    accepted_replies, refusals = accepted(strategy, phase.requests, [bad], read)
    assert accepted_replies == {}
    assert len(refusals) == 1
    assert refusals[0].partition(": ")[2].strip()
    accepted_replies, refusals = accepted(strategy, phase.requests, [bad, good, bad], read)
    assert set(accepted_replies) == {good.metadata.src_node_id - 1_000}
    assert len(refusals) == 2


@pytest.mark.parametrize(
    "name",
    grid_of(ALL, lambda name: name in METHODS or name in ("APPLE", "FedYogi", "ULDP-GROUP")),
)
@FUZZ
@given(data=st.data(), seed=st.integers(0, 2**32))
def test_an_upload_with_anything_wrong_in_it_is_refused_and_changes_nothing(name, data, seed):
    mutations = ALL[name].mutations
    what = data.draw(st.sampled_from(sorted(mutations)))
    held_against(name, "train", what, seed, mutations)


@FUZZ
@given(st.sampled_from(sorted(METHODS)), st.sampled_from(sorted(EVALUATE)), st.integers(0, 2**32))
def test_scores_with_anything_wrong_in_them_are_refused(name, what, seed):
    held_against(name, "evaluate", what, seed, EVALUATE)


@FUZZ
@given(st.sampled_from(sorted(set(ANSWER) - {"array another type"})), st.integers(0, 2**32))
def test_an_answer_with_any_fault_ends_the_set_up_by_name(what, seed):
    rng = np.random.default_rng(seed)

    class Tampered(InProcessGrid):
        def send_and_receive(self, messages, *, timeout=None):
            replies = list(super().send_and_receive(messages, timeout=timeout))
            if replies[0].metadata.message_type.endswith("uldp_avg"):
                replies[1] = copied(replies[1])
                ANSWER[what](replies[1], rng)
            return replies

    plan = METHODS["ULDP-AVG, silos noise"].build().run.plan
    strategy = FederatedStrategy(UldpAvg(num_silos=SILOS, weighting="by-records"), plan)
    grid = Tampered(UldpAvg.client_app(task()), SILOS)
    with pytest.raises(FederationNotReady, match=r"partitions \[1\] cannot take part"):
        strategy.configure_train(1, initial(), ConfigRecord(), grid)
    assert strategy.refusals


def packed_of(content, packed):
    """Return a packed reply of arbitrary content, whose list of clients is forged as well."""
    content["packed"] = packed
    return content


PACKED = st.fixed_dictionaries(
    {},
    optional={
        "records": st.lists(
            st.sampled_from(["0 update", "update update", "", "x", "0"]), max_size=3
        ),
        "error-code": st.lists(st.integers(-1, 2), max_size=3) | st.floats() | st.text(max_size=2),
        "error-reason": st.lists(st.text(max_size=3), max_size=3) | st.booleans(),
    },
).map(ConfigRecord)


@FUZZ
@given(st.builds(packed_of, CONTENTS, PACKED | METRICS) | CONTENTS | st.none())
def test_a_packed_reply_of_anything_costs_the_clients_of_its_node_alone(content):
    grid = Forger(DPFedAvg.client_app(task()), 2)
    grid.only, grid.content = "train", content
    strategy = FederatedStrategy(DPFedAvg(local=FAST), nobody_private())
    virtual = VirtualGrid(grid, CLIENTS // 2)
    train_requests = strategy.configure_train(1, initial(), ConfigRecord(), virtual)
    moved, _ = strategy.aggregate_train(1, virtual.send_and_receive(train_requests))
    assert moved is not None
    assert strategy.run.progress.row["answered"] == CLIENTS // 2


@cache
def asked_of(name):
    """Return real clients that took part before, and a request that they have not answered."""
    case = METHODS[name]
    strategy = case.build(seed=2)
    allowed = case is PRIVATE  # small keys are allowed
    grid = InProcessGrid(strategy.method.client_app(task(), allow_seeded_noise=allowed), case.nodes)
    questions = []
    for number in (1, 2, 3, 4, 5):
        train_requests = strategy.configure_train(number, initial(), ConfigRecord(), grid)
        if number < 5:
            strategy.aggregate_train(number, grid.send_and_receive(train_requests))
        questions = train_requests or questions
    return grid, questions[0]


@pytest.mark.parametrize("name", METHODS)
@FUZZ
@given(data=st.data(), seed=st.integers(0, 2**32))
def test_a_request_with_any_fault_gets_an_error_and_is_forgotten(name, data, seed):
    grid, question = asked_of(name)
    mutations = requests(dict(question.content.config_records[records.ROUND]))
    none = "seeded-noise" not in question.content.config_records[records.ROUND]
    left_out = [w for w in mutations if none and w.startswith("seeded-noise")]
    left_out += ["seeded noise"] if METHODS[name] is PRIVATE else []
    what = data.draw(st.sampled_from(sorted(set(mutations) - set(left_out))))
    mutations[what](request := copied(question), np.random.default_rng(seed))
    context = grid.contexts[request.metadata.dst_node_id]
    before = dict(context.state)
    (answer,) = grid.send_and_receive([request])
    assert answer.has_error()
    assert answer.error.reason
    assert dict(context.state) == before
    assert all(context.state[key] is record for key, record in before.items())


@pytest.mark.parametrize("name", METHODS)
def test_the_request_itself_is_answered(name):
    grid, question = asked_of(name)
    (answer,) = grid.send_and_receive([copied(question)])
    assert not answer.has_error()


@FUZZ
@given(CONTENTS, st.sampled_from(sorted(METHODS)))
def test_clients_answer_records_of_anything_by_an_error(content, name):
    grid, question = asked_of(name)
    request = copied(question)
    request.__dict__["_content"] = content
    (answer,) = grid.send_and_receive([request])
    assert answer.has_error()


def test_every_mutation_of_an_envelope_is_used():
    assert set(ENVELOPE) <= set(EVALUATE)
    assert set(ENVELOPE) <= set.intersection(*(set(case.mutations) for case in METHODS.values()))

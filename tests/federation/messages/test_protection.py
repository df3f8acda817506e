"""A client's upload under each protection, observed through a real ClientApp in this process."""

import math
from dataclasses import fields, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, RecordDict
from torch import nn

from flower_ext.algorithms import DPFedAvg
from flower_ext.federation import FederatedStrategy, FederationNotReady, HiddenSum, LocalResult
from flower_ext.federation.client.node import NodePolicy
from flower_ext.federation.client.upload import contribution_of, protected
from flower_ext.federation.messages import records
from flower_ext.federation.messages.round_entries import _KINDS, RoundEntries
from flower_ext.federation.sums.summation import SumMessage
from flower_ext.federation.sums.weighted import WEIGHTS
from flower_ext.privacy import (
    ClippedSteps,
    FullParticipation,
    NonPrivatePlan,
    ObjectivePerturbation,
    OutputPerturbation,
    RecordLevelPlan,
    ReleasePlan,
    SecureNoise,
)
from flower_ext.privacy.accounting.gaussian import gaussian_loss
from flower_ext.privacy.mechanisms.bounds import BoundedSum
from flower_ext.privacy.mechanisms.protections import (
    ClipAndNoise,
    ClipSteps,
    ProtectedByServer,
    ProtectedByTraining,
    Protection,
    Unprotected,
)
from flower_ext.privacy.plans.release_mechanism import ReleaseMechanism
from tests.support.protected_updates import (
    CLIENTS,
    DIMENSION,
    EXACT,
    KNOWN,
    MU,
    OBJECTIVE,
    OUTPUT,
    facts_of,
    facts_under,
    initial,
    leaving,
    of_training,
    plan,
    private_plan,
    protection_in,
    run,
    task,
    trained,
    uploads,
)
from tests.support.travelling import Recorder


def hidden_sum(bound, like=None, finish=None):
    """Return an encrypted sum; ``finish`` takes its noise and returns the bytes of the upload."""
    silo = SimpleNamespace(
        counted=(),
        settings=SimpleNamespace(users=9),
        open_sum=lambda number, weights: SimpleNamespace(finish=finish),
    )
    message = SumMessage(WEIGHTS)
    return HiddenSum(silo, message, training_round=1, users=9, bound=bound, like=like or {})


@pytest.mark.parametrize("perturbation", [OUTPUT, OBJECTIVE])
@pytest.mark.parametrize(("allowed", "veto"), [(False, False), (True, True)])
def test_seeded_noise_a_client_forbids_is_refused_with_what_to_change(perturbation, allowed, veto):
    grid = Recorder(DPFedAvg.client_app(task(), allow_seeded_noise=allowed), num_clients=CLIENTS)
    for context in grid.contexts.values():
        context.node_config["require-secure-noise"] = veto
    strategy = FederatedStrategy(
        DPFedAvg(local=EXACT), plan(perturbation), evaluate_every=0, seed=1, seeded_noise=True
    )
    with pytest.raises(FederationNotReady, match="seeded noise, which this client"):
        strategy.start(grid, initial(), num_rounds=1)
    assert len(strategy.refusals) == CLIENTS
    for refusal in strategy.refusals:
        assert "seeded noise, which this client does not allow" in refusal
        assert "allow_seeded_noise=True" in refusal
    assert not any(reply.has_content() for reply in of_training(grid.received))


@pytest.mark.parametrize("perturbation", [OUTPUT, OBJECTIVE])
def test_seeded_runs_repeat_and_secure_ones_never_do_even_with_a_seed(perturbation):
    def sent(seeded):
        _, grid = run(plan(perturbation), seed=6, seeded_noise=seeded, rounds=2)
        return [
            reply.content.array_records[records.UPDATE]["weight"].numpy().tobytes()
            for reply in of_training(grid.received)
        ]

    repeated = sent(True)
    assert repeated == sent(True)
    assert len(set(repeated)) == 2 * CLIENTS  # each client and round has a stream of its own
    assert not set(sent(False)) & set(sent(False))


def test_every_message_asks_for_one_protection_only():
    kinds = {
        "ClipAndNoise": private_plan(),
        "OutputPerturbation": plan(OUTPUT),
        "ObjectivePerturbation": plan(OBJECTIVE),
        None: NonPrivatePlan(sampling=FullParticipation(CLIENTS)),
    }
    for kind, the_plan in kinds.items():
        _, grid = run(the_plan)
        messages = of_training(grid.sent)
        assert len(messages) == CLIENTS
        for message in messages:
            facts = message.content.config_records[records.ROUND]
            assert facts.get("protection") == kind


def test_the_facts_of_a_plan_are_its_numbers():
    assert facts_of(plan(OUTPUT), seeded_noise=True) == {
        "protection": "OutputPerturbation",
        "clipping-norm": 0.8,
        "noise-stddev": 0.05,
        "seeded-noise": True,
    }
    known = plan(OBJECTIVE, objective=replace(KNOWN, proximal_weight=MU))
    assert facts_of(known) == {
        "protection": "ObjectivePerturbation",
        "rate": 2.0,
        "least-examples": 5,
        "seeded-noise": False,
    }
    facts = facts_of(private_plan())
    assert facts["clipping-norm"] == 0.5
    assert facts["noise-stddev"] == pytest.approx(0.5 / math.sqrt(4))
    assert facts_of(private_plan(), 0) == {}


@pytest.mark.parametrize("kind", ["an update", "units of a sum"])
def test_uploads_of_cohorts_of_any_size_lie_on_one_grid(kind):
    """Single precision keeps uploads on the grid, so that they add up as whole numbers."""
    received = {"weight": torch.zeros(5_000)}
    value = {"weight": torch.linspace(-1, 1, 5_000, dtype=torch.float64) / 100}
    for cohort_size in (1, 3, 100):
        units = kind == "units of a sum"
        facts = facts_of(private_plan(), cohort_size, bounds_units=units)
        update = {"weight": value["weight"].float()}
        if units:
            update = BoundedSum(value=value, bound=0.5, count=9)
        sent = leaving(update, received, facts)["weight"]
        assert sent.dtype == torch.float32
        cells = sent.double() / private_plan().mechanism().noise_grid
        assert bool((cells == cells.round()).all())
        assert 0.45 < float((cells % 2).mean()) < 0.55


@pytest.mark.parametrize(
    "wrong",
    [
        *({"number": 0}, {"number": 1.0}, {"seed": -1}, {"seed": None}, {"remembered": -1}),
        *({"run": 1}, {"clipping-norm": 0.0}, {"clipping-norm": math.inf}, {"noise-stddev": 0.0}),
        *({"seeded-noise": 1}, {"seeded-noise": "no"}, {"seeded-noise": None}),
        *({"diagnostics": 1}, {"report-size": "yes"}, {"training-loss": 0}),
        *({"query": 0}, {"withdrawn": 3}, {"withdrawn": [1.0]}),
    ],
)
def test_a_round_that_is_none_is_refused(wrong):
    facts = {**facts_of(private_plan()), "number": 1, "seed": 0}
    RoundEntries.of(facts)
    RoundEntries.of({**facts, "remembered": 0})
    name = next(iter(wrong)).replace("-", "[-_]")
    with pytest.raises(ValueError, match=f"server's message: {name}="):
        RoundEntries.of({**facts, **wrong})


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"protection": "another"}, "protection='another': expected one of"),
        ({"noise": 1.0}, r"\['noise'\] with protection='ClipAndNoise'"),
        ({"rate": 1.0}, r"\['rate'\] with protection='ClipAndNoise'"),  # of another protection
    ],
)
def test_a_round_with_an_unknown_entry_is_refused(wrong, error):
    facts = {**facts_of(private_plan()), "number": 1, "seed": 0}
    with pytest.raises(ValueError, match=f"server's message: {error}"):
        RoundEntries.of({**facts, **wrong})


@pytest.mark.parametrize(
    "left_out", ["protection", "clipping-norm", "noise-stddev", "seeded-noise"]
)
def test_a_protection_that_lacks_a_part_is_refused(left_out):
    facts = {**facts_of(private_plan()), "number": 1, "seed": 0}
    del facts[left_out]
    with pytest.raises(ValueError, match=f"{left_out.replace('-', '[-_]')}=None"):
        RoundEntries.of(facts)


def test_objective_perturbation_may_need_no_number_of_examples():
    settled = replace(KNOWN, proximal_weight=MU, distance_to_minimiser=1e-9)
    settled_facts = facts_of(plan(OBJECTIVE, objective=settled))
    facts = {**settled_facts, "number": 1, "seed": 0}
    RoundEntries.of({**facts, "least-examples": 0})
    with pytest.raises(ValueError, match="least_examples=-1"):
        RoundEntries.of({**facts, "least-examples": -1})


def test_what_is_protected_is_known_from_the_facts():
    assert protection_in(facts_of(private_plan())).bounds_uploads
    assert protection_in(facts_under(ProtectedByServer(), seeded_noise=True)).bounds_uploads
    assert protection_in({"diagnostics": True}) == Unprotected()
    by_training = protection_in(facts_under(ProtectedByTraining()))
    for protection in (by_training, Unprotected()):
        assert not protection.bounds_uploads


def test_clients_that_add_no_noise_are_asked_for_no_seeded_noise():
    assert facts_under(ProtectedByServer(), seeded_noise=True)["seeded-noise"] is False
    assert facts_under(Unprotected(), seeded_noise=True) == {}


SIDED = {"clipping_norm": 1.0, "noise_stddev": 0.5, "adaptive_norm": 0.8, "side_weight": 0.3}
PROTECTIONS = [
    ClipAndNoise(clipping_norm=1.0, noise_stddev=0.5, noise_grid=2.0**-20),
    ClipAndNoise(**SIDED),
    ClipAndNoise(**SIDED, cell=2.0**-16),
    ClipAndNoise(of_units=True, clipping_norm=1.0, noise_stddev=0.5),
    ClipAndNoise(clipping_norm=1.0, noise_stddev=0.5, cell=2.0**-16),
    ClipAndNoise(of_units=True, clipping_norm=1.0, noise_stddev=0.5, cell=2.0**-16),
    OutputPerturbation(clipping_norm=2.0, noise_stddev=0.5),
    OutputPerturbation(clipping_norm=2.0, noise_stddev=0.5, num_examples=12),
    ClipSteps(clipping_norm=2.0, gradient_clipping_norm=0.5, noise_stddev=0.1, num_examples=12),
    ObjectivePerturbation(rate=2.0, least_examples=5),
    ProtectedByServer(),
    ProtectedByTraining(),
    Unprotected(),
]


def test_every_protection_of_the_package_is_among_those_that_arrive():
    def kinds(of):
        return {of} | {kind for subclass in of.__subclasses__() for kind in kinds(subclass)}

    named = {type(protection) for protection in PROTECTIONS}
    of_package = {kind for kind in kinds(Protection) if kind.__module__.startswith("flower_ext.")}
    public = {kind for kind in of_package if not kind.__name__.startswith("_")}
    assert public - {Protection} == named


@pytest.mark.parametrize(
    "base", [ClipAndNoise, ProtectedByServer, ProtectedByTraining, Protection, Unprotected]
)
def test_a_protection_that_no_message_names_ends_the_run_at_once(base):
    class Unknown(base):
        pass

    class Mechanism(ReleaseMechanism):
        def protection(self, run, cohort_size):
            numbers = {"clipping_norm": 1.0, "noise_stddev": 0.5} if base is ClipAndNoise else {}
            return Unknown(**numbers)

    class Plan(ReleasePlan):
        def mechanism(self, method):
            return Mechanism(**vars(super().mechanism(method)))

    grid = Recorder(DPFedAvg.client_app(task()), num_clients=CLIENTS)
    strategy = FederatedStrategy(DPFedAvg(local=EXACT), Plan(**vars(private_plan())))
    with pytest.raises(TypeError, match="Unknown: no message can ask for this protection"):
        strategy.start(grid, initial(), num_rounds=1)
    assert not of_training(grid.sent)


ALL_ENTRIES = RoundEntries(
    number=7,
    seed=3,
    run="r",
    diagnostics=True,
    report_size=True,
    training_loss=True,
    remembered=0,
    query=2,
    withdrawn=[4, 9],
    protection=OutputPerturbation(clipping_norm=1.0, noise_stddev=0.5),
    seeded_noise=True,
)


@pytest.mark.parametrize("protection", PROTECTIONS)
def test_entries_arrive_as_they_were_sent(protection):
    few = RoundEntries(number=1, seed=0, protection=protection)
    seeded = not isinstance(protection, ProtectedByServer | Unprotected)
    all_entries = replace(ALL_ENTRIES, protection=protection, seeded_noise=seeded)
    for entries in (few, all_entries):
        assert RoundEntries.of(entries.to_record()) == entries


def test_the_names_of_entries_are_those_that_clients_read():
    assert dict(ALL_ENTRIES.to_record()) == {
        "number": 7,
        "seed": 3,
        "run": "r",
        "diagnostics": True,
        "report-size": True,
        "training-loss": True,
        "remembered": 0,
        "query": 2,
        "withdrawn": [4, 9],
        "protection": "OutputPerturbation",
        "clipping-norm": 1.0,
        "noise-stddev": 0.5,
        "seeded-noise": True,
    }


def test_every_kind_in_messages_is_the_kind_of_a_protection():
    kinds = {facts_under(each).get("protection", "Unprotected") for each in PROTECTIONS}
    assert kinds == set(_KINDS)


def test_a_protection_is_on_one_grid_only():
    with pytest.raises(ValueError, match="noise_grid=0.25: expected None"):
        ClipAndNoise(clipping_norm=1.0, noise_stddev=0.5, cell=2.0**-9, noise_grid=0.25)


@pytest.mark.parametrize("protection", PROTECTIONS[:8])
def test_no_part_of_a_protection_stands_for_another(protection):
    """Without one of its parts, a protection is refused, unless that part is optional."""
    facts = facts_under(protection)
    for name in facts:
        rest = {other: value for other, value in facts.items() if other != name}
        if name in ("noise-grid", "num-examples", "cell", "of-units"):
            default = {part.name: part.default for part in fields(protection)}
            without = {name.replace("-", "_"): default[name.replace("-", "_")]}
            assert protection_in(rest) == replace(protection, **without)
        else:
            with pytest.raises(ValueError, match=f"{name.replace('-', '[-_]')}=None"):
                protection_in(rest)


@pytest.mark.parametrize("protection", PROTECTIONS)
@pytest.mark.parametrize("value", ["1", -1.0, math.nan, math.inf, b"1", [1.0]])
def test_every_part_of_a_protection_is_checked(protection, value):
    for part in fields(protection):
        facts = {**facts_under(protection), part.name.replace("_", "-"): value}
        with pytest.raises(ValueError, match=f"server's message: {part.name}="):
            protection_in(facts)


@pytest.mark.parametrize("grid", ["fine", 0.3, True, 1e-30])
def test_a_client_refuses_a_grid_that_leaves_low_bits_bare(grid):
    facts = {**facts_of(private_plan()), "noise-grid": grid}
    with pytest.raises((TypeError, ValueError), match="grid"):
        leaving({"weight": torch.zeros(3)}, {}, facts)


def test_the_provable_epsilon_includes_rounding_to_the_models_precision():
    """Two minimisers as close as one of very many records leaves them, each rounded once."""
    sure = replace(KNOWN, gradient_bound=1e-6)
    moved = 2 * sure.gradient_bound / (12 * MU) + 2 * EXACT.tolerance / MU
    quiet = OutputPerturbation(clipping_norm=0.8, noise_stddev=1e-3)
    start = torch.from_numpy(np.full((1, DIMENSION), 0.5, np.float32))
    of_dtype = replace(task(), model=lambda: nn.Linear(DIMENSION, 1, bias=False).to(start.dtype))
    app = DPFedAvg.client_app(of_dtype, allow_seeded_noise=True)
    strategy, _ = run(plan(quiet, objective=sure), start=ArrayRecord({"weight": start}), app=app)
    assert strategy.refusals == []
    provable = strategy.guarantees()[1].epsilon
    rounded = gaussian_loss(1e-3 / (moved + 2.0**-23 * 0.8), releases=1, delta=1e-3).epsilon
    assert provable >= rounded


def record_level_plan(**changes) -> RecordLevelPlan:
    facts = {
        "sampling": FullParticipation(CLIENTS),
        "clipping_norm": 1.5,
        "noise_stddev": 0.3,
        "num_examples": 12,
        "rounds": 3,
        "delta": 0.1,
    }
    return RecordLevelPlan(**{**facts, **changes})


STEPS = ClippedSteps(learning_rate=0.1, gradient_clipping_norm=0.5, num_examples=12)
SHARES = {
    "an update": (facts_of(private_plan()), 1.0 / 2),
    "units of a sum": (facts_of(private_plan(), bounds_units=True), 1.0 / 2),
    "a model": (facts_of(plan(OUTPUT)), 0.05 / 0.8),
    "a model in every round": (facts_of(record_level_plan()), 0.2),
    "steps": (facts_of(record_level_plan(steps=STEPS)), 0.6),
}


@pytest.mark.parametrize("kind", SHARES)
def test_the_owners_least_noise_is_the_clients_whatever_it_clips(kind):
    facts, share = SHARES[kind]
    protection = protection_in(facts)
    exact = protection.noise_multiplier
    assert exact == pytest.approx(share)
    for least, takes_part in (
        (0.999 * exact, True),
        (exact, True),
        (1.001 * exact, False),
        (1.0, exact >= 1),
    ):
        owned = Context(1, 1, {"least-noise-multiplier": least}, RecordDict(), {})
        policy = NodePolicy(owned, allow_seeded_noise=False)
        if takes_part:
            policy.check(protection, protection.noise_multiplier)
        else:
            with pytest.raises(PermissionError, match=f"noise multiplier of {share:g} on this"):
                policy.check(protection, protection.noise_multiplier)


def test_an_owner_that_requires_noise_refuses_noise_without_a_number():
    known = plan(OBJECTIVE, objective=replace(KNOWN, proximal_weight=MU))
    incomparable = "asks for ObjectivePerturbation, whose noise has no multiplier: the owner"
    for facts, error in (({}, "noise multiplier of 0 on this"), (facts_of(known), incomparable)):
        protection = protection_in(facts)
        for least in (1e-9, math.nan):
            owned = Context(1, 1, {"least-noise-multiplier": least}, RecordDict(), {})
            with pytest.raises(PermissionError, match=error):
                NodePolicy(owned, allow_seeded_noise=False).check(
                    protection, protection.noise_multiplier
                )
        anyone = Context(1, 1, {}, RecordDict(), {})
        NodePolicy(anyone, allow_seeded_noise=False).check(protection, protection.noise_multiplier)


UNITS = ClipAndNoise(of_units=True, clipping_norm=1.0, noise_stddev=1.0)
WHOLE = ClipAndNoise(clipping_norm=2.0, noise_stddev=1.0)


@pytest.mark.parametrize(
    ("update", "protection", "message"),
    [
        ({"weight": torch.ones(2)}, UNITS, "sets no bound, but"),
        (
            BoundedSum(value={"weight": torch.ones(2)}, bound=2.0, count=3),
            Protection(),
            "a bound of 2",
        ),
        (
            BoundedSum(value={"weight": torch.ones(2)}, bound=2.0, count=3),
            WHOLE,
            "the plan expects no bound",
        ),
        (
            BoundedSum(value={"weight": torch.ones(2)}, bound=2.0, count=3),
            replace(UNITS, clipping_norm=1.9),
            "a bound of 2, but the plan expects a bound of 1.9",
        ),
        (
            BoundedSum(value={"weight": torch.ones(2)}, bound=math.nan, count=3),
            replace(UNITS, clipping_norm=1.9),
            "a bound of nan",
        ),
        (hidden_sum(2.0), replace(UNITS, clipping_norm=1.9), "a bound of 2"),
        (hidden_sum(2.0), WHOLE, "the plan expects no bound"),
        (hidden_sum(2.0), Unprotected(), "the plan expects no bound"),
    ],
)
def test_the_bound_on_units_of_a_sum_must_be_the_plans(update, protection, message):
    with pytest.raises(ValueError, match=message):
        protected(update, {"weight": torch.zeros(2)}, protection, SecureNoise())


def test_a_hidden_sum_gets_the_noise_of_an_open_sum():
    received = {"weight": torch.zeros(50)}
    facts = {
        **facts_of(private_plan(), seeded_noise=True, bounds_units=True),
        "seed": 3,
        "number": 2,
    }
    value = {"weight": torch.linspace(0, 1, 50, dtype=torch.float64)}

    def finish(noise):
        assert noise.dtype == np.float64
        cells = noise / facts["noise-grid"]  # finer than the steps of an encoding
        assert not (cells == cells.round()).any()
        return (value["weight"].numpy() + noise).tobytes()

    context = Context(
        run_id=1, node_id=1, node_config={"partition-id": 0}, state=RecordDict(), run_config={}
    )
    hidden, opened = (
        leaving(update, received, facts, context=context, allow_seeded_noise=True)
        for update in (
            hidden_sum(0.5, received, finish),
            BoundedSum(value=value, bound=0.5, count=9),
        )
    )
    sent = hidden["sum"].view(np.float64)
    np.testing.assert_allclose(sent, opened["weight"].numpy(), atol=facts["noise-grid"])


def test_a_sum_of_bounded_units_leaves_noised_and_not_clipped():
    received = {"weight": torch.zeros(20_000)}
    summed = BoundedSum(value={"weight": torch.full((20_000,), 9.0).double()}, bound=0.5, count=99)
    facts = facts_of(private_plan(), bounds_units=True)
    sent = leaving(summed, received, facts)["weight"]
    assert sent.dtype == torch.float32
    assert float(sent.mean()) == pytest.approx(9.0, abs=0.02)
    assert float(sent.std()) == pytest.approx(facts["noise-stddev"], rel=0.05)


def test_without_a_plan_for_it_an_update_leaves_as_it_was_trained():
    _, grid = run(NonPrivatePlan(sampling=FullParticipation(CLIENTS)))
    for client, sent in uploads(grid).items():
        np.testing.assert_allclose(sent, trained(client), atol=1e-12)


def test_output_perturbation_keeps_single_precision_and_sends_the_difference_to_what_came():
    received = {"weight": torch.full((1, DIMENSION), 100.0)}
    model = {"weight": torch.full((1, DIMENSION), 101.0)}
    sent = perturbed(model, received)
    assert sent["weight"].dtype == torch.float32
    whole = {name: received[name] + value for name, value in sent.items()}
    assert float(whole["weight"].norm()) == pytest.approx(1.0, rel=1e-3)


def perturbed(model, received):
    """Return a client's upload under little output noise."""
    quiet = plan(OutputPerturbation(clipping_norm=1.0, noise_stddev=1e-6))
    return leaving(model, received, ConfigRecord(facts_of(quiet)))


def test_a_model_is_perturbed_as_it_was_trained_whatever_was_received(monkeypatch):
    seen = []
    apply = OutputPerturbation.released

    def seeing(self, model, noise):
        seen.append(model)
        return apply(self, model, noise)

    monkeypatch.setattr(OutputPerturbation, "released", seeing)
    model = {"weight": torch.tensor([[0.1, 0.2]])}
    perturbed(model, {"weight": torch.full((1, DIMENSION), 1e6)})  # their sum loses all digits
    assert torch.equal(seen[0]["weight"], model["weight"])
    strategy, _ = run(plan(), start=initial(1e6))
    assert strategy.run.progress.row["answered"] == CLIENTS
    for made, client in zip(seen[1:], range(CLIENTS), strict=True):
        np.testing.assert_array_equal(made["weight"].numpy().ravel(), trained(client, start=1e6))


def test_without_a_model_there_is_nothing_that_output_noise_could_protect():
    update = {"weight": torch.zeros(1, DIMENSION)}
    with pytest.raises(ValueError, match=r"return LocalResult\(model=...\)"):
        contribution_of(LocalResult(update=update), update, whole=True)


def test_a_result_is_a_model_or_an_update():
    received = {"weight": torch.ones(1)}
    moved = {"weight": torch.full((1,), 3.0)}
    changed = contribution_of(LocalResult(model=moved), received, whole=False)
    assert changed == {"weight": torch.full((1,), 2.0)}
    assert contribution_of(LocalResult(model=moved), received, whole=True) is moved
    assert contribution_of(LocalResult(update=moved), received, whole=False) is moved
    for result in (LocalResult(), LocalResult(model=moved, update=moved)):
        with pytest.raises(ValueError, match="both a model and an update, or neither"):
            contribution_of(result, received, whole=False)

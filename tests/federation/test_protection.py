"""A client's upload under each protection, observed through a real ClientApp in this process."""

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, MetricRecord, RecordDict
from scipy import stats
from torch import nn

from flower_ext.algorithms import DPFedAvg, Scaffold
from flower_ext.data import ClientData, Examples
from flower_ext.federation import (
    FederatedStrategy,
    FederationNotReady,
    HiddenSum,
    InProcessGrid,
    LocalResult,
    records,
)
from flower_ext.federation.client.node import NodePolicy
from flower_ext.federation.client.upload import contribution_of, protected
from flower_ext.federation.protection import (
    _KINDS,
    Unprotected,
    check_entries,
    from_entries,
    to_entries,
)
from flower_ext.federation.sums.weighted import WEIGHTS
from flower_ext.privacy import (
    ClippedSteps,
    FixedSizeSampling,
    FullParticipation,
    LocalObjective,
    NonPrivatePlan,
    ObjectivePerturbation,
    OutputPerturbation,
    PerturbationPlan,
    RecordLevelPlan,
    ReleasePlan,
    SecureNoise,
    SeededNoise,
)
from flower_ext.privacy.accounting.gaussian import gaussian_loss
from flower_ext.privacy.accounting.participations import Participations
from flower_ext.privacy.guarantee import PreconditionFailed
from flower_ext.privacy.mechanisms.bounds import BoundedSum
from flower_ext.privacy.mechanisms.noise import noise_grid
from flower_ext.privacy.mechanisms.protections import (
    ClipAndNoise,
    ClipSteps,
    ProtectedByServer,
    ProtectedByTraining,
    Protection,
)
from flower_ext.privacy.plans.release_mechanism import ReleaseMechanism
from flower_ext.privacy.run_summary import MethodTraits, RunSummary
from flower_ext.privacy.theorems.upcycled_theorem import (
    perturbation_guarantees,
    upcycled_theorem_6_3,
)
from flower_ext.training import LocalTraining, Task
from tests.support import worlds
from tests.support.jobs import train_one
from tests.support.run_summary import run_summary
from tests.support.strategies import strategy_of
from tests.support.travelling import Recorder, Tampering

CLIENTS = 3
DIMENSION = 2
MU = 0.1
EXACT = LocalTraining(tolerance=1e-10, proximal_weight=MU)
OUTPUT = OutputPerturbation(clipping_norm=0.8, noise_stddev=0.05)
OBJECTIVE = ObjectivePerturbation(rate=2.0)
KNOWN = LocalObjective(
    convex=True,
    generalised_linear=True,
    gradient_bound=1.0,
    curvature_bound=0.25,
    feature_norm_bound=1.0,
)


def facts_of(the_plan, cohort_size=4, *, seeded_noise=False, bounds_units=False):
    """Return the facts in a method's message under a plan."""
    method = MethodTraits(name="method", bounds_units=bounds_units)
    run = RunSummary(
        method=method,
        participations=Participations(),
        training={"local": EXACT},
        proximal_weight=MU,
    )
    mechanism = the_plan.mechanism(method) if isinstance(the_plan, ReleasePlan) else the_plan
    return to_entries(mechanism.protection(run, cohort_size), seeded_noise=seeded_noise)


def leaving(update, received, facts, *, context=None, allow_seeded_noise=False):
    """Return the upload of a client whose request has ``facts``."""
    noise = NodePolicy(context, allow_seeded_noise).noise(facts, "client-noise")
    return protected(update, received, from_entries(facts) or Unprotected(), noise)


def hidden_sum(bound, like=None, finish=None):
    """Return an encrypted sum; ``finish`` takes its noise and returns the bytes of the upload."""
    silo = SimpleNamespace(
        counted=(),
        settings=SimpleNamespace(users=9),
        open_sum=lambda number, weights: SimpleNamespace(finish=finish),
    )
    message = {WEIGHTS: np.empty(0, np.uint8)}
    return HiddenSum(silo, message, training_round=1, users=9, bound=bound, like=like or {})


def logistic_loss(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.softplus(-labels * outputs.squeeze(1)).mean()


def client_data(client: int, size: int = 12) -> ClientData:
    generator = torch.Generator().manual_seed(client)
    x = torch.randn(size, DIMENSION, generator=generator).double()
    x /= x.norm(dim=1, keepdim=True).clamp(min=1.0)
    y = torch.sign(x[:, 0] - 0.3 + 0.1 * torch.randn(size, generator=generator))
    data = Examples(features=x, targets=y)
    return ClientData(train=data, test=data)


def task(sizes: dict[int, int] | None = None) -> Task:
    """Return logistic regression of two classes in float64, without bias."""
    return Task(
        model=lambda: nn.Linear(DIMENSION, 1, bias=False).double(),
        data=lambda client: client_data(client, (sizes or {}).get(client, 12)),
        loss=logistic_loss,
        metrics={},
        device="cpu",
    )


def initial(value: float = 0.5) -> ArrayRecord:
    return ArrayRecord({"weight": torch.full((1, DIMENSION), value).double()})


def plan(perturbation=OUTPUT, **changes) -> PerturbationPlan:
    facts = {
        "sampling": FullParticipation(CLIENTS),
        "perturbation": perturbation,
        "objective": KNOWN,
        "delta": 1e-3,
    }
    return PerturbationPlan(**{**facts, **changes})


def run(the_plan, *, start=None, rounds=1, clients=CLIENTS, app=None, **options):
    """Run FedAvg under a plan; return the strategy and all messages."""
    app = app or DPFedAvg.client_app(task(), allow_seeded_noise=True)
    grid = Recorder(app, num_clients=clients)
    strategy = strategy_of(
        DPFedAvg, plan=the_plan, **{"local": EXACT, "evaluate_every": 0, **options}
    )
    strategy.start(grid, start or initial(), num_rounds=rounds)
    return strategy, grid


def of_training(messages):
    return [m for m in messages if m.metadata.message_type.startswith("train")]


def uploads(grid) -> dict[int, np.ndarray]:
    """Return the model that each client sent in the only round, by partition."""
    sent = {}
    for question, reply in zip(of_training(grid.sent), of_training(grid.received), strict=True):
        base = question.content.array_records[records.MODEL]["weight"].numpy()
        update = reply.content.array_records[records.UPDATE]["weight"].numpy()
        sent[reply.metadata.src_node_id - 1_000] = (base + update).ravel()
    return sent


def trained(client: int, start: float = 0.5) -> np.ndarray:
    """Return a client's exact local model, without any protection."""
    params = {"weight": torch.full((1, DIMENSION), start).double()}
    moved = train_one(task(), params, client_data(client).train, EXACT, generator=torch.Generator())
    return moved["weight"].numpy().ravel()


# Output perturbation ----------------------------------------------------------------------------


def test_output_perturbation_sends_a_clipped_model_plus_the_clients_noise():
    """The noise is the seeded stream of client and round, on the clipped trained model."""
    tight = OutputPerturbation(clipping_norm=0.4, noise_stddev=0.05)
    _, grid = run(plan(tight), seed=6, seeded_noise=True)
    sent, clipped = uploads(grid), 0
    assert sorted(sent) == list(range(CLIENTS))
    for client, released in sent.items():
        local = trained(client)
        inside = local * min(1.0, 0.4 / np.linalg.norm(local))
        clipped += np.linalg.norm(local) > 0.4
        stream = SeededNoise(6, "client-noise", client, 1)
        noise = stream.add_gaussian({"weight": np.zeros((1, DIMENSION))}, 0.05)["weight"].ravel()
        np.testing.assert_allclose(released, inside + noise, atol=noise_grid(0.05))
    assert clipped > 0


def test_the_whole_model_is_clipped_not_what_changed():
    """From a model far outside, every upload returns to the ball, so its update is large."""
    quiet = OutputPerturbation(clipping_norm=0.8, noise_stddev=1e-9)
    _, grid = run(plan(quiet), start=initial(50.0), local=LocalTraining(epochs=0))
    for released in uploads(grid).values():
        assert np.linalg.norm(released) == pytest.approx(0.8, rel=1e-6)
        np.testing.assert_allclose(released, 0.8 / math.sqrt(2), rtol=1e-6)


def test_output_noise_has_its_stddev_and_is_fresh_for_client_and_round():
    """200 clients, two rounds, secure noise: the test would detect ±20 % of σ."""
    clients, sigma = 200, 3.0
    _, grid = run(
        plan(
            OutputPerturbation(clipping_norm=1e-6, noise_stddev=sigma),
            sampling=FullParticipation(clients),
        ),
        clients=clients,
        rounds=2,
        local=LocalTraining(epochs=0),
    )
    # The received model plus the update equals the upload, within 1e-6 of the noise.
    noise = np.array(
        [
            question.content.array_records[records.MODEL]["weight"].numpy()
            + reply.content.array_records[records.UPDATE]["weight"].numpy()
            for question, reply in zip(
                of_training(grid.sent), of_training(grid.received), strict=True
            )
        ]
    ).reshape(2, -1)
    assert noise.shape[1] == clients * DIMENSION
    assert stats.kstest(noise.ravel() / sigma, "norm").pvalue > 1e-5
    assert noise.std() == pytest.approx(sigma, rel=0.15)
    released = noise.reshape(-1, DIMENSION)  # single numbers coincide on the grid by chance
    assert len(np.unique(released, axis=0)) == len(released)
    assert abs(np.corrcoef(noise)[0, 1]) < 0.3


def test_the_server_averages_what_the_clients_sent_and_adds_nothing():
    grid = Recorder(DPFedAvg.client_app(task()), num_clients=CLIENTS)
    strategy = FederatedStrategy(DPFedAvg(local=EXACT), plan(), evaluate_every=0)
    result = strategy.start(grid, initial(), num_rounds=1)
    mean = np.mean(list(uploads(grid).values()), axis=0)
    np.testing.assert_allclose(result.arrays["weight"].numpy().ravel(), mean, atol=1e-12)


def test_noise_of_zero_is_refused_by_the_plan_and_by_the_client():
    with pytest.raises(ValueError, match="noise_stddev="):
        OutputPerturbation(clipping_norm=1.0, noise_stddev=0.0)
    received = {"weight": torch.zeros(1, DIMENSION).double()}
    facts = facts_of(plan())
    for changes, said in (
        ({"noise-stddev": 0.0}, "noise-stddev=0.0"),
        ({"clipping-norm": -1.0}, "clipping-norm=-1.0"),
    ):
        with pytest.raises(ValueError, match=said):
            leaving(received, received, ConfigRecord({**facts, **changes}))


def test_a_fact_that_is_no_number_is_refused_by_name():
    received = {"weight": torch.zeros(1, DIMENSION).double()}
    facts = facts_of(plan())
    with pytest.raises(TypeError, match="noise-stddev='much'.*expected a number"):
        leaving(received, received, ConfigRecord({**facts, "noise-stddev": "much"}))


# Objective perturbation -------------------------------------------------------------------------


def slope_at(client: int, released: np.ndarray, start: float, mu: float = MU) -> np.ndarray:
    """Return the gradient of the client's mean loss and proximal term, written out."""
    data = client_data(client).train
    x, y = data.features.numpy(), data.targets.double().numpy()
    share = -y / (1 + np.exp(y * (x @ released)))
    return x.T @ share / len(y) + mu * (released - start)


def test_under_objective_perturbation_the_slope_at_an_upload_is_minus_its_noise():
    _, grid = run(plan(OBJECTIVE), seed=6, seeded_noise=True)
    sent = uploads(grid)
    assert sorted(sent) == list(range(CLIENTS))
    for client, released in sent.items():
        like = {"weight": np.zeros((1, DIMENSION))}
        stream = SeededNoise(6, "client-noise", client, 1)
        noise = OBJECTIVE.direction(like, stream)["weight"].ravel()
        np.testing.assert_allclose(slope_at(client, released, 0.5), -noise, atol=1e-9)
        assert np.linalg.norm(released - trained(client)) > 0.01


@pytest.mark.full
def test_the_objective_noise_of_many_clients_has_the_norm_of_the_paper():
    """80 clients: ‖n‖ ~ Gamma(d, 1/α), computed from the gradient at each upload."""
    clients = 80
    _, grid = run(
        plan(OBJECTIVE, sampling=FullParticipation(clients)),
        clients=clients,
        seed=6,
        seeded_noise=True,
    )
    norms = [
        float(np.linalg.norm(slope_at(client, released, 0.5)))
        for client, released in uploads(grid).items()
    ]
    assert len(norms) == clients
    assert stats.kstest(norms, stats.gamma(DIMENSION, scale=1 / 2.0).cdf).pvalue > 1e-5
    for wrong in (0.4, 2.5):
        assert stats.kstest(norms, stats.gamma(DIMENSION, scale=wrong / 2.0).cdf).pvalue < 1e-5


@pytest.mark.parametrize(("size", "refused"), [(5, 0), (4, 1), (1, 1)])
def test_a_client_with_too_few_examples_for_its_noise_sends_nothing(size, refused):
    """The client needs 2u₂/μ = 5 examples."""
    app = DPFedAvg.client_app(task({1: size}))
    strategy, grid = run(plan(OBJECTIVE), app=app)
    assert len(strategy.refusals) == refused
    if refused:
        (said,) = strategy.refusals
        assert "trains on too few examples" in said
        assert "at least 5, which is 2u₂/μ (Upcycled-FL, Theorem 6.3), where u₂ bounds" in said
        (failed,) = [reply for reply in of_training(grid.received) if reply.has_error()]
        assert not failed.has_content()
    assert strategy.run.progress.row["answered"] == CLIENTS - refused


def test_output_perturbation_asks_for_no_number_of_examples():
    strategy, _ = run(plan(OUTPUT), app=DPFedAvg.client_app(task({1: 1})))
    assert strategy.refusals == []


@pytest.mark.parametrize(
    ("changes", "local", "said"),
    [
        ({"generalised_linear": False}, EXACT, "generalised linear model"),
        ({"feature_norm_bound": 2.0}, EXACT, "features have norm at most 1"),
        ({}, LocalTraining(epochs=1), "the proximal weight is above 0"),
    ],
)
def test_a_problem_outside_theorem_6_3_ends_the_run_before_sending(changes, local, said):
    grid = Recorder(DPFedAvg.client_app(task()), num_clients=CLIENTS)
    the_plan = plan(OBJECTIVE, objective=replace(KNOWN, **changes))
    with pytest.raises(PreconditionFailed, match=said):
        FederatedStrategy(DPFedAvg(local=local), the_plan).start(grid, initial())
    assert of_training(grid.sent) == []


# Both -------------------------------------------------------------------------------------------


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
    for said in strategy.refusals:
        assert "seeded noise, which this client does not allow" in said
        assert "allow_seeded_noise=True" in said
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


def release_plan(**changes) -> ReleasePlan:
    facts = {
        "sampling": FullParticipation(CLIENTS),
        "clipping_norm": 0.5,
        "noise_multiplier": 1.0,
        "rounds": 3,
        "delta": 0.1,
    }
    return ReleasePlan(**{**facts, **changes})


def test_every_message_asks_for_one_protection_only():
    kinds = {
        "ClipUpdate": release_plan(),
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
    facts = facts_of(release_plan())
    assert facts["clipping-norm"] == 0.5
    assert facts["noise-stddev"] == pytest.approx(0.5 / math.sqrt(4))
    assert facts_of(release_plan(), 0) == {}


@pytest.mark.parametrize("kind", ["an update", "units of a sum"])
def test_uploads_of_cohorts_of_any_size_lie_on_one_grid(kind):
    """Single precision keeps uploads on the grid, so that they add up as whole numbers."""
    received = {"weight": torch.zeros(5_000)}
    value = {"weight": torch.linspace(-1, 1, 5_000, dtype=torch.float64) / 100}
    for cohort_size in (1, 3, 100):
        units = kind == "units of a sum"
        facts = facts_of(release_plan(), cohort_size, bounds_units=units)
        update = {"weight": value["weight"].float()}
        if units:
            update = BoundedSum(value=value, bound=0.5, count=9)
        sent = leaving(update, received, facts)["weight"]
        assert sent.dtype == torch.float32
        cells = sent.double() / release_plan().mechanism().noise_grid
        assert bool((cells == cells.round()).all())
        assert 0.45 < float((cells % 2).mean()) < 0.55


@pytest.mark.parametrize(
    "wrong",
    [
        *({"number": 0}, {"number": 1.0}, {"seed": -1}, {"seed": None}, {"remembered": -1}),
        *({"run": 1}, {"clipping-norm": 0.0}, {"clipping-norm": math.inf}, {"noise-stddev": 0.0}),
        *({"seeded-noise": 1}, {"seeded-noise": "no"}, {"seeded-noise": None}),
    ],
)
def test_a_round_that_is_none_is_refused(wrong):
    facts = {**facts_of(release_plan()), "number": 1, "seed": 0}
    check_entries(facts)
    check_entries({**facts, "remembered": 0})
    with pytest.raises((TypeError, ValueError), match=next(iter(wrong))):
        check_entries({**facts, **wrong})


@pytest.mark.parametrize(
    "left_out", ["protection", "clipping-norm", "noise-stddev", "seeded-noise"]
)
def test_a_protection_that_lacks_a_part_is_refused(left_out):
    facts = {**facts_of(release_plan()), "number": 1, "seed": 0}
    del facts[left_out]
    with pytest.raises((TypeError, ValueError), match=f"a known protection|{left_out}=None"):
        check_entries(facts)


def test_objective_perturbation_may_need_no_number_of_examples():
    settled = replace(KNOWN, proximal_weight=MU, distance_to_minimiser=1e-9)
    asked = facts_of(plan(OBJECTIVE, objective=settled))
    facts = {**asked, "number": 1, "seed": 0}
    check_entries({**facts, "least-examples": 0})
    with pytest.raises(ValueError, match="least-examples=-1"):
        check_entries({**facts, "least-examples": -1})


def test_what_is_protected_is_known_from_the_facts():
    assert from_entries(facts_of(release_plan())).bounds_uploads
    assert from_entries(to_entries(ProtectedByServer(), seeded_noise=True)).bounds_uploads
    assert from_entries({"number": 1, "seed": 0, "diagnostics": True}) is None
    by_training = from_entries(to_entries(ProtectedByTraining(), seeded_noise=False))
    for protection in (by_training, Unprotected()):
        assert not protection.bounds_uploads


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
    None,
]


def test_every_protection_of_the_package_is_among_those_that_arrive():
    def kinds(of):
        return {of} | {kind for own in of.__subclasses__() for kind in kinds(own)}

    named = {type(protection) for protection in PROTECTIONS} - {type(None)}
    own = {kind for kind in kinds(Protection) if kind.__module__.startswith("flower_ext.")}
    public = {kind for kind in own if not kind.__name__.startswith("_")}
    assert public - {Protection, Unprotected} == named


@pytest.mark.parametrize("base", [ClipAndNoise, ProtectedByServer, ProtectedByTraining, Protection])
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
    strategy = FederatedStrategy(DPFedAvg(local=EXACT), Plan(**vars(release_plan())))
    with pytest.raises(TypeError, match="Unknown: no message can ask for this protection"):
        strategy.start(grid, initial(), num_rounds=1)
    assert not of_training(grid.sent)


@pytest.mark.parametrize("protection", PROTECTIONS)
def test_a_protection_arrives_as_it_was_sent(protection):
    facts = {"number": 1, "seed": 0, "report-size": True}
    sent = ConfigRecord({**facts, **to_entries(protection, seeded_noise=False)})
    assert check_entries(dict(sent)) == protection


def test_every_kind_in_messages_is_the_kind_of_a_protection():
    kinds = {to_entries(each, seeded_noise=False)["protection"] for each in PROTECTIONS if each}
    assert kinds == set(_KINDS)


def test_a_protection_is_on_one_grid_only():
    with pytest.raises(ValueError, match="noise_grid=0.25: expected None"):
        ClipAndNoise(clipping_norm=1.0, noise_stddev=0.5, cell=2.0**-9, noise_grid=0.25)


@pytest.mark.parametrize("protection", PROTECTIONS[:8])
def test_no_part_of_a_protection_stands_for_another(protection):
    """Without one of its parts, a protection is refused, unless that part is optional."""
    facts = to_entries(protection, seeded_noise=False)
    for name in facts:
        rest = {other: value for other, value in facts.items() if other != name}
        if name in ("noise-grid", "num-examples"):
            without = replace(protection, **{name.replace("-", "_"): None})
            assert from_entries(rest) == without
        else:
            missing = f"a known protection|without cell|{name.replace('-', '[-_]')}=None"
            with pytest.raises((TypeError, ValueError), match=missing):
                from_entries(rest)


@pytest.mark.parametrize("grid", ["fine", 0.3, True, 1e-30])
def test_a_client_refuses_a_grid_that_leaves_low_bits_bare(grid):
    facts = {**facts_of(release_plan()), "noise-grid": grid}
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
    "an update": (facts_of(release_plan()), 1.0 / 2),
    "units of a sum": (facts_of(release_plan(), bounds_units=True), 1.0 / 2),
    "a model": (facts_of(plan(OUTPUT)), 0.05 / 0.8),
    "a model in every round": (facts_of(record_level_plan()), 0.2),
    "steps": (facts_of(record_level_plan(steps=STEPS)), 0.6),
}


@pytest.mark.parametrize("kind", SHARES)
def test_the_owners_least_noise_is_the_clients_whatever_it_clips(kind):
    facts, share = SHARES[kind]
    protection = from_entries(facts)
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
        protection = from_entries(facts) or Unprotected()
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
    ("update", "protection", "said"),
    [
        ({"weight": torch.ones(2)}, UNITS, "sets no bound for"),
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
            "a bound of 2 for .* the plan expects a bound of 1.9",
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
def test_the_bound_on_units_of_a_sum_must_be_the_plans(update, protection, said):
    with pytest.raises(ValueError, match=said):
        protected(update, {"weight": torch.zeros(2)}, protection, SecureNoise())


def test_a_hidden_sum_gets_the_noise_of_an_open_sum():
    received = {"weight": torch.zeros(50)}
    facts = {
        **facts_of(release_plan(), seeded_noise=True, bounds_units=True),
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
    facts = facts_of(release_plan(), bounds_units=True)
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


# What the strategy makes of it ------------------------------------------------------------------


@pytest.mark.parametrize("perturbation", [OUTPUT, OBJECTIVE])
def test_a_runs_guarantees_rest_on_its_uploads_sizes_and_training(perturbation):
    """With sampled cohorts there is no amplification: each client counts by its own requests."""
    sizes = {0: 12, 1: 30, 2: 7, 3: 9}
    app = DPFedAvg.client_app(task(sizes))
    sampled = plan(perturbation, sampling=FixedSizeSampling(4, 2))
    strategy, grid = run(sampled, app=app, clients=4, rounds=5, seed=3)
    asked = [m.metadata.dst_node_id - 1_000 for m in of_training(grid.sent)]
    counts = {client: asked.count(client) for client in set(asked)}
    assert sum(counts.values()) == 10
    assert len(set(counts.values())) > 1
    trained_objective = replace(
        KNOWN, proximal_weight=MU, distance_to_minimiser=1e-10 / MU, memoryless=True
    )
    expected = perturbation_guarantees(
        perturbation,
        trained_objective,
        run_summary(
            counts, num_examples=sizes, not_covered=["whether and when each client answered"]
        ),
        delta=1e-3,
    )
    assert [replace(one, units=None) for one in strategy.guarantees()] == expected
    assert strategy.guarantees()[0].units == sum(strategy.run.num_examples.values())
    assert math.isfinite(expected[1].epsilon)
    if perturbation is OBJECTIVE:
        assert expected[1].epsilon == max(
            upcycled_theorem_6_3(
                OBJECTIVE, trained_objective, num_examples=sizes[c], participations=counts[c]
            )
            for c in counts
        )


def test_the_numbers_of_a_round_say_what_was_spent():
    strategy, _ = run(plan(OUTPUT), rounds=2)
    published, provable = strategy.guarantees()
    assert strategy.run.progress.row["epsilon_published"] == published.epsilon
    assert strategy.run.progress.row["epsilon_provable"] == provable.epsilon


def test_training_by_sgd_is_not_taken_for_an_exact_minimiser():
    sgd = LocalTraining(epochs=1, proximal_weight=MU)
    _, provable = run(plan(OUTPUT), local=sgd)[0].guarantees()
    assert "sensitivity 2τ = 1.6" in provable.source
    published, provable = run(plan(OBJECTIVE), local=sgd)[0].guarantees()
    assert math.isfinite(published.epsilon)
    assert math.isinf(provable.epsilon)


def test_a_method_whose_clients_remember_is_not_taken_for_memoryless():
    sgd = LocalTraining(epochs=1, proximal_weight=MU)
    for method, remembers in ((Scaffold, True), (DPFedAvg, False)):
        grid = Recorder(method.client_app(task()), num_clients=CLIENTS)
        strategy = strategy_of(method, plan=plan(OBJECTIVE), local=sgd, evaluate_every=0)
        strategy.start(grid, initial(), num_rounds=1)
        assert strategy.refusals == []
        for guarantee in strategy.guarantees():
            assert ("clients keep no state" in guarantee.statement()) == remembers


def test_the_number_of_examples_is_sent_only_for_record_level_privacy():
    for the_plan, told in ((plan(OUTPUT), True), (release_plan(), False)):
        strategy, grid = run(the_plan)
        for reply in of_training(grid.received):
            assert (records.METRICS in reply.content) == told
        assert strategy.run.num_examples == (dict.fromkeys(range(CLIENTS), 12) if told else {})


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 4)
        self.temperature = nn.Parameter(torch.tensor(1.0))

    def forward(self, x):
        return self.layer(x) * self.temperature


@pytest.mark.parametrize(
    "the_plan",
    [
        NonPrivatePlan(sampling=FullParticipation(3)),
        ReleasePlan(
            sampling=FullParticipation(3),
            clipping_norm=1.0,
            noise_multiplier=1.0,
            rounds=1,
            delta=0.1,
        ),
        PerturbationPlan(sampling=FullParticipation(3), perturbation=OUTPUT, delta=0.1),
    ],
    ids=["none", "release", "perturbation"],
)
def test_a_model_with_a_scalar_parameter_can_be_trained(the_plan):
    world = Task(model=Scaled, data=worlds.client_data, device="cpu")
    grid = InProcessGrid(DPFedAvg.client_app(world), num_clients=3)
    result = FederatedStrategy(DPFedAvg(local=LocalTraining(epochs=1)), the_plan).start(
        grid, ArrayRecord(world.initial_params(0)), num_rounds=1
    )
    assert result.arrays["temperature"].numpy().shape == ()


@pytest.mark.parametrize("lie", [0.5, *(pytest.param(n, marks=pytest.mark.full) for n in (0, -3))])
def test_one_client_that_sends_an_invalid_size_does_not_end_the_run(lie):
    grid = Tampering(DPFedAvg.client_app(task()), num_clients=CLIENTS)

    def tell(reply):
        reply.content["metrics"] = MetricRecord({"num-examples": lie})
        return [reply]

    grid.tamper = {1: tell}
    strategy = FederatedStrategy(DPFedAvg(local=EXACT), plan(), evaluate_every=0)
    strategy.start(grid, initial(), num_rounds=1)
    assert strategy.guarantees()


def test_a_size_that_changes_between_rounds_is_accounted_by_the_smallest():
    told = iter([5] * CLIENTS + [5000] * CLIENTS)
    grid = Tampering(DPFedAvg.client_app(task()), num_clients=CLIENTS)

    def tell(reply):
        reply.content["metrics"] = MetricRecord({"num-examples": next(told)})
        return [reply]

    grid.tamper = dict.fromkeys(range(CLIENTS), tell)
    strategy = FederatedStrategy(DPFedAvg(local=EXACT), plan(), evaluate_every=0)
    strategy.start(grid, initial(), num_rounds=2)
    assert set(strategy.run.num_examples.values()) == {5}

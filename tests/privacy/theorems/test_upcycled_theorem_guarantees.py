"""The guarantees of runs of Upcycled-FL, published and provable, and their limits."""

import math
from dataclasses import replace

import dp_accounting
import pytest
import torch
from dp_accounting import pld, rdp

from flower_ext.privacy import (
    AdversaryView,
    Guarantee,
    LocalObjective,
    NeighboringRelation,
    OutputPerturbation,
    PrivacyUnit,
    epsilon_text,
)
from flower_ext.privacy.accounting.gaussian import EXACT_GAUSSIAN
from flower_ext.privacy.theorems import upcycled_theorem
from flower_ext.privacy.theorems.upcycled_theorem import (
    clipped_model_sensitivity,
    upcycled_theorem_6_2,
    upcycled_theorem_6_3,
)
from tests.support.grids import grid
from tests.support.perturbed import noiseless
from tests.support.run_summary import run_summary
from tests.support.upcycled_problems import (
    KNOWN,
    OBJECTIVE,
    OUTPUT,
    delta_of_gaussians,
    epsilons_by_client,
)

SIZES = {0: 50, 1: 400, 2: 120}
UPLOADS = {0: 3, 1: 12, 2: 1}


def pair(perturbation, objective=KNOWN, *, sizes=SIZES, uploads=UPLOADS, delta=1e-3, **how):
    """Return the published and the provable guarantee."""
    run = run_summary(uploads, num_examples=sizes, **how)
    return upcycled_theorem.perturbation_guarantees(perturbation, objective, run, delta=delta)


def spread(values):
    """Return the text by which a guarantee states values of several clients."""
    values = list(values)
    return (
        f"{len(values)} clients: min {min(values):.4g}, mean {sum(values) / len(values):.4g}, "
        f"max {max(values):.4g}"
    )


def test_output_perturbation_is_guaranteed_as_published_and_as_provable():
    """All numbers by hand: Theorem 6.2, and Gaussians min(2τ, 2u₁/(|D|μ)) apart."""
    published, provable = pair(OUTPUT)
    theorem = {
        client: upcycled_theorem_6_2(
            OUTPUT, num_examples=SIZES[client], participations=UPLOADS[client], delta=1e-3
        )
        for client in SIZES
    }
    assert published.epsilon == max(theorem.values())
    assert "Theorem 6.2" in published.source
    assert spread(theorem.values()) in published.source
    by_client = epsilons_by_client(
        OUTPUT, KNOWN, num_examples=SIZES, participations=UPLOADS, delta=1e-3
    )
    assert {client: both[0] for client, both in by_client.items()} == theorem
    for client, (_, epsilon) in by_client.items():
        distance = min(2 * 1.5, 2 * 1.0 / (SIZES[client] * 0.1))
        facts = (distance, 0.2, UPLOADS[client])
        # The ε is never below the correct one.
        assert delta_of_gaussians(*facts, epsilon) <= 1e-3 * (1 + 1e-12)
        assert delta_of_gaussians(*facts, epsilon * 0.999) > 1e-3  # and not above it
    assert provable.epsilon == max(both[1] for both in by_client.values())
    assert spread(both[1] for both in by_client.values()) in provable.source
    assert "2u₁/(|D_i|μ), at most 0.4" in provable.source
    assert provable.accountant == EXACT_GAUSSIAN


@pytest.mark.parametrize(
    ("objective", "stddev", "rounds", "delta"),
    grid(
        [
            pytest.param(objective, *facts, id=f"{name}-{facts[1]}")
            for name, objective in (("stable", KNOWN), ("unknown", LocalObjective()))
            for facts in ((1.0, 2, 1e-2), (4.0, 30, 1e-5))
        ],
        lambda name: name != "unknown-2",
    ),
)
def test_the_provable_epsilon_is_what_dp_accounting_composes(objective, stddev, rounds, delta):
    size, perturbation = 60, OutputPerturbation(clipping_norm=1.5, noise_stddev=stddev)
    ((_, provable),) = epsilons_by_client(
        perturbation,
        objective,
        num_examples={3: size},
        participations={3: rounds},
        delta=delta,
    ).values()
    distance = min(2 * 1.5, 2 / (60 * 0.1)) if objective.convex else 2 * 1.5
    accountants = pld.PLDAccountant(), rdp.RdpAccountant()
    for accountant in accountants:
        accountant.compose(dp_accounting.GaussianDpEvent(stddev / distance), rounds)
    tight, loose = (accountant.get_epsilon(delta) for accountant in accountants)
    assert provable == pytest.approx(tight, rel=1e-5)
    assert provable < loose


def test_the_provable_epsilon_grows_with_everything_that_reveals_more():
    def provable(**changes):
        facts = {"stddev": 1.0, "size": 50, "rounds": 5, "delta": 1e-3, **changes}
        ((_, value),) = epsilons_by_client(
            OutputPerturbation(clipping_norm=1.5, noise_stddev=facts["stddev"]),
            KNOWN,
            num_examples={0: facts["size"]},
            participations={0: facts["rounds"]},
            delta=facts["delta"],
        ).values()
        return value

    for more in ({"stddev": 0.5}, {"size": 25}, {"rounds": 6}, {"delta": 1e-4}):
        assert provable(**more) > provable() > 0


def test_a_published_epsilon_below_the_provable_one_says_which_condition_fails():
    published, provable = pair(OUTPUT)
    assert published.epsilon < provable.epsilon
    assert not published.conditions_hold
    assert "Conditions NOT met: one record moves a clipped local model" in published.statement()
    assert provable.conditions_hold
    # The ball is so large that stability is below τ/|D| of every client, so the condition is met.
    stiff = replace(KNOWN, proximal_weight=10.0)
    wide = OutputPerturbation(clipping_norm=5.0, noise_stddev=1.0)
    assert pair(wide, stiff)[0].conditions_hold
    assert not pair(wide, replace(stiff, memoryless=False))[0].conditions_hold


def test_without_bounds_output_perturbation_is_accounted_across_the_ball():
    _, provable = pair(OUTPUT, LocalObjective())
    assert "sensitivity 2τ = 3" in provable.source
    assert delta_of_gaussians(3.0, 0.2, 12, provable.epsilon) == pytest.approx(1e-3, rel=1e-3)


def test_objective_perturbation_is_guaranteed_by_theorem_6_3_where_its_conditions_hold():
    published, provable = pair(OBJECTIVE)
    theorem = [
        UPLOADS[client] * (2 * 3.0 * 1.0 * 0.1 + 2.8 * 0.25) / (SIZES[client] * 0.1)
        for client in SIZES
    ]
    for guarantee in (published, provable):
        assert guarantee.epsilon == pytest.approx(max(theorem))
        assert guarantee.delta == 0.0
        assert "Theorem 6.3" in guarantee.source
        assert spread(theorem) in guarantee.source
        assert guarantee.conditions_hold


@pytest.mark.parametrize(
    ("unmet", "message"),
    [
        ({"distance_to_minimiser": math.inf}, "exact minimisers (training by SGD"),
        ({"distance_to_minimiser": 1e-4}, "exact minimisers (distance at most 0.0001)"),
        ({"memoryless": False}, "clients keep no state"),
    ],
)
def test_objective_perturbation_of_an_inexact_solver_proves_nothing(unmet, message):
    published, provable = pair(OBJECTIVE, replace(KNOWN, **unmet))
    assert math.isfinite(published.epsilon)
    assert math.isinf(provable.epsilon)
    assert "No (ε, δ) is promised" in provable.statement()
    for guarantee in (published, provable):
        assert not guarantee.conditions_hold
        assert message in guarantee.statement()


@pytest.mark.parametrize("perturbation", [OUTPUT, OBJECTIVE])
def test_a_small_client_or_one_of_unknown_size_is_shown(perturbation):
    for sizes in ({**SIZES, 0: 4}, {1: 400, 2: 120}):  # 2u₂/μ = 5
        by_client = epsilons_by_client(
            perturbation, KNOWN, num_examples=sizes, participations=UPLOADS, delta=1e-3
        )
        others = epsilons_by_client(
            perturbation,
            KNOWN,
            num_examples=SIZES,
            participations={1: 12, 2: 1},
            delta=1e-3,
        )
        assert {client: by_client[client] for client in others} == others
        published, provable = pair(perturbation, sizes=sizes)
        assert provable.epsilon == max(both[1] for both in by_client.values())
        if perturbation is OBJECTIVE:
            assert by_client[0] == (math.inf, math.inf)
            assert math.isinf(published.epsilon)
        else:
            assert delta_of_gaussians(3.0, 0.2, 3, provable.epsilon) == pytest.approx(
                1e-3, rel=1e-3
            )
            assert math.isinf(published.epsilon) == (0 not in sizes)


def test_each_client_is_accounted_by_its_uploads_and_size():
    every = epsilons_by_client(
        OUTPUT, KNOWN, num_examples=SIZES, participations=UPLOADS, delta=1e-3
    )
    for client in UPLOADS:
        alone = epsilons_by_client(
            OUTPUT,
            KNOWN,
            num_examples={client: SIZES[client]},
            participations={client: UPLOADS[client]},
            delta=1e-3,
        )
        assert alone[client] == every[client]
    # Sizes of clients that the server never asked change nothing.
    more = {**SIZES, 9: 1}
    assert pair(OUTPUT, sizes=more) == pair(OUTPUT)
    assert pair(OBJECTIVE, sizes=more) == pair(OBJECTIVE)


@pytest.mark.parametrize("perturbation", [OUTPUT, OBJECTIVE])
def test_a_run_that_asked_nobody_spent_nothing_and_says_so(perturbation):
    for guarantee in pair(perturbation, uploads={}):
        assert guarantee.epsilon == 0.0
        assert "no client was asked" in guarantee.source


@pytest.mark.parametrize("perturbation", [OUTPUT, OBJECTIVE])
@pytest.mark.parametrize("objective", [KNOWN, LocalObjective()], ids=["known", "unknown"])
def test_every_guarantee_names_all_that_it_needs_and_survives_json(perturbation, objective):
    guarantees = pair(perturbation, objective, delta=2.5e-4, not_covered=["test scores"])
    assert [guarantee.basis for guarantee in guarantees] == ["published", "provable"]
    for guarantee in guarantees:
        assert guarantee.unit is PrivacyUnit.RECORD
        assert guarantee.relation is NeighboringRelation.REPLACE_ONE
        assert guarantee.view is AdversaryView.EACH_UPLOAD
        text = guarantee.statement()
        for word in (
            "one record",
            "replace-one",
            "every upload and who sent it",
            guarantee.basis,
            guarantee.accountant,
            guarantee.source,
            "Not covered: test scores",
        ):
            assert word in text
        if math.isfinite(guarantee.epsilon):
            assert f"ε = {epsilon_text(guarantee.epsilon)} at" in text
            assert ("δ = 0.00025" if perturbation is OUTPUT else "δ = 0 ") in text
        assert Guarantee.from_dict(guarantee.to_dict()) == guarantee
    assumed = guarantees[1].statement()
    for word in ("Assumes:", "add noise as instructed", "examples are public"):
        assert word in assumed
    assert ("rounded to a public grid" in assumed) == (perturbation is OUTPUT)
    assert ("low-order bits" in assumed) == (perturbation is OBJECTIVE)  # its noise is on no grid


@pytest.mark.parametrize("norm", [0.5, 1.0, 7.0, 1e6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_rounding_to_a_models_precision_is_within_the_sensitivity(norm, dtype):
    """One of 10⁹ records hardly moves the minimiser; rounding moves the value that is noised."""
    if norm == 1e6 and dtype is torch.float16:
        pytest.skip("a float16 model of this norm is infinite")
    tau, size = 1.5, 10**9
    objective = replace(KNOWN, proximal_weight=1.0, rounding=torch.finfo(dtype).eps / 2)
    unrounded = clipped_model_sensitivity(OUTPUT, replace(objective, rounding=0.0), size)
    for seed in range(20):
        model = torch.randn(8_000, generator=torch.Generator().manual_seed(seed)).double()
        model *= norm * tau / model.norm()
        exact = noiseless({"w": model}, tau)["w"]
        rounded = noiseless({"w": model.to(dtype)}, tau)["w"]
        assert rounded.dtype == torch.float64  # not rounded before the noise was added
        assert (
            unrounded
            < (rounded - exact).norm()
            <= clipped_model_sensitivity(OUTPUT, objective, size) / 2
        )


def test_a_bound_by_the_minimiser_assumes_that_training_finds_it():
    """A client whose training fails sends the received model, up to 2τ from a neighbour's model."""
    for objective, is_assumed in ((KNOWN, True), (replace(KNOWN, convex=False), False)):
        _, provable = pair(OUTPUT, objective)
        assert any("training ends" in text for text in provable.assumptions) == is_assumed


def test_seeded_noise_is_named_as_simulation():
    for secure, word in ((True, "cryptographic generator"), (False, "SIMULATION")):
        _, provable = pair(OUTPUT, secure_noise=secure)
        assert any(word in text for text in provable.assumptions)


@pytest.mark.parametrize("delta", [0.0, 1.0, math.nan])
@pytest.mark.parametrize("perturbation", [OUTPUT, OBJECTIVE])
def test_an_unfit_delta_is_refused_by_name(perturbation, delta):
    with pytest.raises(ValueError, match="delta="):
        pair(perturbation, delta=delta)


def test_outside_theorem_6_3_epsilon_is_infinite():
    """As for an unknown u₂, ε is infinite, as `epsilons_by_client` documents."""
    objective = replace(KNOWN, generalised_linear=False)
    run = {"num_examples": {0: 50}, "participations": {0: 1}, "delta": 0.1}
    unknown = {0: (math.inf, math.inf)}
    assert epsilons_by_client(OBJECTIVE, LocalObjective(), **run) == unknown
    assert epsilons_by_client(OBJECTIVE, objective, **run) == unknown


def test_with_no_size_known_the_published_condition_is_not_said_to_hold():
    published, _ = pair(OUTPUT, sizes={}, uploads={0: 1}, delta=0.1)
    assert not published.conditions_hold


def test_the_source_names_the_sensitivity_that_the_largest_epsilon_was_computed_with():
    """Client 0 never reported its size: it counts at 2τ = 3, the source says 'at most 0.4'."""
    _, provable = pair(OUTPUT, sizes={1: 50}, uploads={0: 1, 1: 1}, delta=0.1)
    assert "at most 0.4" not in provable.source
    assert "sensitivity 2τ = 3" in provable.source


def test_negative_participations_are_refused_by_theorem_6_3_as_by_6_2():
    with pytest.raises(ValueError, match="participations="):
        upcycled_theorem_6_3(OBJECTIVE, KNOWN, num_examples=50, participations=-1)


def test_a_loss_of_no_slope_spends_nothing():
    run = {"num_examples": {0: 50}, "participations": {0: 1}, "delta": 0.1}
    assert epsilons_by_client(OUTPUT, replace(KNOWN, gradient_bound=0.0), **run)[0][1] == 0.0

"""Bounds for clipped steps, compared with the distances that neighbours really reach."""

import numpy as np
import pytest

from flower_ext.privacy import FullParticipation, RecordLevelPlan, gaussian_loss
from flower_ext.privacy.theorems.dp_ditto_theorem import composed_noise_stddev
from tests.support.plans import steps


def plan_with(clipped_steps, *, epsilon=3.0, rounds=10):
    return RecordLevelPlan.for_target(
        epsilon=epsilon,
        delta=1e-3,
        sampling=FullParticipation(20),
        num_examples=clipped_steps.num_examples,
        rounds=rounds,
        clipping_norm=1.0,
        steps=clipped_steps,
    )


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 10.0, 100.0])
@pytest.mark.parametrize("releases", [1, 80])
def test_the_provable_noise_meets_its_target_and_a_little_less_misses_it(epsilon, releases):
    facts = {"delta": 1e-3, "releases": releases}
    stddev = composed_noise_stddev(sensitivity=0.3, epsilon=epsilon, **facts)
    reached = gaussian_loss(stddev / 0.3, **facts).epsilon
    assert epsilon * (1 - 1e-6) < reached <= epsilon
    assert gaussian_loss(0.99 * stddev / 0.3, **facts).epsilon > epsilon


def test_noise_for_no_release_is_refused_by_the_parameter_s_name():
    with pytest.raises(ValueError, match="releases=0: expected"):
        composed_noise_stddev(sensitivity=0.3, epsilon=1.0, delta=1e-3, releases=0)


def test_each_noised_step_is_a_release_of_the_records_it_uses():
    full = steps(local_steps=5)
    batches = steps(local_steps=5, batch_size=10)  # one pass: each record in one step
    two_passes = steps(local_steps=7, batch_size=10)
    uneven = steps(local_steps=3, batch_size=20)  # 20, 20 and 10 of 50: one pass
    assert [s.uses_per_round for s in (steps(), full, batches, two_passes, uneven)] == [
        1,
        5,
        1,
        2,
        1,
    ]
    assert full.sensitivity == pytest.approx(2 * 0.1 * 2.0 / 50)
    assert batches.sensitivity == pytest.approx(5 * full.sensitivity)


@pytest.mark.parametrize("bad", [{"rounds": 0}, {"epsilon": -1}])
def test_a_target_out_of_range_is_refused_with_clipped_steps(bad):
    ((name, value),) = bad.items()
    with pytest.raises(ValueError, match=f"{name}={value}"):
        plan_with(steps(), **bad)


def clipped_step(u, records, s):
    """Take one full step on losses like |⟨u, x⟩ − y|³, whose gradients have any direction."""
    gradients = [x * (u @ x - y) ** 3 for x, y in records]
    norms = [np.linalg.norm(g) for g in gradients]
    G = s.gradient_clipping_norm
    clipped = [g * min(1, G / n) for g, n in zip(gradients, norms, strict=True)]
    return u - s.learning_rate * np.mean(clipped, axis=0)


def test_neighbours_stay_within_the_sensitivity_of_one_step_and_of_several():
    rng = np.random.default_rng(0)
    for count in (1, 4):
        s, worst = steps(num_examples=5, local_steps=count), 0.0
        for _ in range(300):
            records = [(3 * rng.normal(size=2), 3 * rng.normal()) for _ in range(5)]
            x = 3 * rng.normal(size=2)
            flipped = [*records[:-1], (x, 9.0)]
            records[-1] = (x, -9.0)  # gradients of opposite signs
            one = other = rng.normal(size=2)
            for _ in range(count):
                one, other = clipped_step(one, records, s), clipped_step(other, flipped, s)
            worst = max(worst, float(np.linalg.norm(one - other)))
        assert worst <= s.upload_sensitivity * (1 + 1e-12)
        if count == 1:
            assert worst > 0.99 * s.upload_sensitivity


def test_k_full_noised_steps_leave_k_times_one_steps_noise():
    one, nine = (plan_with(steps(local_steps=number)).upload_stddev for number in (1, 9))
    assert nine == pytest.approx(9 * one, rel=1e-12)


@pytest.mark.parametrize(("rate", "bound", "number"), [(0.1, 2.0, 3), (5.0, 3.0, 4), (2.0, 0.1, 2)])
def test_what_several_steps_without_noise_may_do_is_done_by_opposite_gradients(rate, bound, number):
    """From the second step on nothing bounds them, whether a step is longer than 1 or shorter."""
    taken = steps(learning_rate=rate, gradient_clipping_norm=bound, local_steps=number)
    one = other = 0.0
    for _ in range(number):
        one, other = one - rate * bound, other + rate * bound
    assert other - one == pytest.approx(taken.upload_sensitivity)


def test_a_batch_may_hold_a_single_record():
    assert steps(batch_size=1).sensitivity == pytest.approx(2 * 0.1 * 2.0)
    assert steps(batch_size=1, local_steps=50).uses_per_round == 1
    assert steps(batch_size=1, local_steps=51).uses_per_round == 2

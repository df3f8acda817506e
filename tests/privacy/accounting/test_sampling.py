"""Samplers draw cohorts at the rate that is accounted for."""

import numpy as np
import pytest

from flower_ext.errors import InvalidValue
from flower_ext.privacy import (
    FixedSizeSampling,
    FullParticipation,
    PoissonSampling,
    Release,
    SpacedSampling,
    seeded_generator,
    size_for_rate,
)
from flower_ext.privacy.accounting.participations import Participations

SAMPLERS = [PoissonSampling(40, 0.3), FixedSizeSampling(40, 12), FullParticipation(40)]
ALL = [*SAMPLERS, SpacedSampling(40, 12, 3, 5)]
RELEASE = {"noise_multiplier": 1.0, "relation": "replace-one", "approximation_error": 0.0}


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_cohorts_are_distinct_members_of_the_population_at_the_accounted_rate(sampler):
    rng = np.random.default_rng(0)
    counts, sizes = np.zeros(40), []
    for _ in range(4_000):
        cohort = sampler.draw(rng)
        assert cohort == sorted(set(cohort))
        sizes.append(len(cohort))
        counts[cohort] += 1
    rate = sampler.sampling_rate
    error = 5 * np.sqrt(rate * (1 - rate) / 4_000)
    np.testing.assert_allclose(counts / 4_000, rate, atol=error)
    assert np.mean(sizes) == pytest.approx(sampler.expected_cohort_size, rel=0.02)


def test_poisson_members_are_independent_and_cohorts_may_be_empty():
    rng = np.random.default_rng(1)
    drawn = np.zeros((20_000, 3), dtype=bool)
    for row in drawn:
        row[PoissonSampling(3, 0.4).draw(rng)] = True
    np.testing.assert_allclose(np.corrcoef(drawn.T), np.eye(3), atol=0.04)
    assert (~drawn.any(axis=1)).mean() == pytest.approx(0.6**3, rel=0.05)


def test_fixed_size_cohorts_have_their_size():
    rng = np.random.default_rng(2)
    assert {len(FixedSizeSampling(9, 4).draw(rng)) for _ in range(200)} == {4}


@pytest.mark.parametrize("sampler", ALL)
def test_cohorts_repeat_under_a_seed_and_samplers_survive_json(sampler):
    again = type(sampler).from_dict(sampler.to_dict())
    assert again == sampler
    cohorts = [s.draw(seeded_generator(3, "cohort", 5)) for s in (sampler, again)]
    assert cohorts[0] == cohorts[1]


@pytest.mark.parametrize("of", [PoissonSampling, FixedSizeSampling])
def test_a_population_may_be_one(of):
    assert of(1, 1).population == FullParticipation(1).population == 1


@pytest.mark.parametrize(
    ("build", "field"),
    [
        (lambda: PoissonSampling(0, 0.1), "population=0"),
        (lambda: PoissonSampling(5, 0.0), r"rate=0\.0"),
        (lambda: PoissonSampling(5, 1.1), r"rate=1\.1"),
        (lambda: FixedSizeSampling(0, 1), "population=0"),
        (lambda: FixedSizeSampling(5, 6), "size=6"),
        (lambda: FixedSizeSampling(5, 0), "size=0"),
        (lambda: FullParticipation(-1), "population=-1"),
        (lambda: Release.from_dict({**RELEASE, "sampling": {"kind": "lottery"}}), "kind='lottery'"),
    ],
)
def test_unfit_samplers_are_refused_by_field(build, field):
    with pytest.raises(ValueError, match=field):
        build()


def test_a_rate_becomes_the_nearest_size_of_at_least_one():
    assert [size_for_rate(100, r) for r in (0.001, 0.104, 0.106, 1.0)] == [1, 10, 11, 100]


def test_everybody_may_be_drawn_and_a_single_one():
    rng = np.random.default_rng(4)
    assert PoissonSampling(5, 1.0).draw(rng) == FixedSizeSampling(5, 5).draw(rng) == [*range(5)]
    assert len(FixedSizeSampling(5, 1).draw(rng)) == 1


def taking_turns(sampler, rounds):
    """Return the cohorts of rounds in which nobody answers."""
    so_far, cohorts = Participations(), []
    for _ in range(rounds):
        cohorts.append(sampler.draw(np.random.default_rng(0), so_far))
        so_far.record(cohorts[-1], 0)
    return cohorts, so_far


@pytest.mark.parametrize(
    "sampler",
    [
        SpacedSampling(12, 2, 3, 4),
        SpacedSampling(12, 2, 6, 1),
        SpacedSampling(7, 3, 2, 5),
        SpacedSampling(5, 5, 1, 3),
    ],
)
def test_turns_are_apart_and_few_and_whoever_waited_longest_comes_first(sampler):
    cohorts, so_far = taking_turns(sampler, 40)
    assert cohorts[0] == list(range(sampler.size))
    for unit in range(sampler.population):
        turns = [number for number, cohort in enumerate(cohorts) if unit in cohort]
        assert len(turns) == sampler.participations == so_far.uploads[unit]
        assert all(np.diff(turns) >= sampler.rounds_apart)
    full = sampler.population * sampler.participations // sampler.size
    if sampler.population % sampler.size == 0:
        assert all(len(cohort) == sampler.size for cohort in cohorts[:full])
    assert not any(cohorts[full + sampler.rounds_apart :])


def test_whoever_may_be_anyone_waits_as_long_as_the_last():
    sampler = SpacedSampling(12, 2, 3, 4)
    _, so_far = taking_turns(sampler, 7)
    so_far.level(range(12))
    cohorts = []
    for _ in range(5):
        cohorts.append(sampler.draw(np.random.default_rng(0), so_far))
        so_far.record(cohorts[-1], 0)
    assert [len(cohort) for cohort in cohorts] == [0, 0, 2, 2, 2]
    restored = Participations.from_dict(so_far.to_dict())
    assert restored.newest == so_far.newest


def test_turns_that_too_few_units_have_waited_for_are_refused():
    with pytest.raises(InvalidValue, match="rounds_apart=7 .*: expected at most 6"):
        SpacedSampling(12, 2, 7, 4)

"""The participations of units in a run's releases: the most exposed unit counts."""

import json

import pytest

from flower_ext.privacy.accounting.participations import Participations
from tests.support.run_summary import worst_case


def test_the_most_exposed_unit_counts():
    seen = Participations()
    seen.record([0, 1], answered=2)
    seen.record([1, 2, 3, 4], answered=4)
    seen.record([], answered=0)
    assert seen.rounds == 3
    assert seen.in_sums == 2.0  # unit 1 was in two sums
    assert seen.in_uploads == 2 + 4  # each of its uploads had 1/2 and 1/4 of the noise


def test_a_sum_short_of_noise_weighs_more_and_an_empty_sum_nothing():
    seen = Participations()
    seen.record([0, 1, 2, 3], answered=1)
    seen.record([0, 1], answered=0)
    assert seen.in_sums == 4.0


def test_a_refused_upload_counts_as_seen():
    seen = Participations()
    seen.record([0, 1, 2], answered=0)
    assert (seen.in_sums, seen.in_uploads) == (0.0, 3.0)


def test_constant_participation_counts_once_for_each_sum_and_each_upload():
    worst = worst_case(rounds=7, cohort_size=3)
    assert (worst.rounds, worst.in_sums, worst.in_uploads) == (7, 7.0, 21.0)


def test_nothing_happened_yet():
    assert (Participations().in_sums, Participations().in_uploads) == (0.0, 0.0)


def test_more_answers_than_were_asked_for_are_refused():
    with pytest.raises(ValueError, match="answered=4"):
        Participations().record([0, 1], answered=4)


def test_units_that_are_not_the_uploaders_take_part_in_each_upload():
    seen = Participations()
    seen.record([4, 7, 9], answered=2, needed=3)
    seen.record([7], answered=3, needed=3)
    assert seen.uploads == {4: 1, 7: 2, 9: 1}
    assert (seen.in_sums, seen.in_uploads) == (1.5 + 1.0, 6.0)
    with pytest.raises(ValueError, match="answered=4: expected a number from 0 to needed=3"):
        seen.record([4], answered=4, needed=3)


def test_clients_of_unknown_identity_all_count_as_the_most_exposed():
    """Each weight separately: the unit in most uploads need not be the one in the worst sum."""
    seen = Participations()
    # 0 and 2: one round, whose sum lacks two thirds of the noise.
    seen.record([0, 1, 2], answered=1)
    for _ in range(2):
        seen.record([1], answered=1)
    seen.record([3, 4], answered=0, needed=9)
    exposed = seen.in_sums, seen.in_uploads
    seen.level(range(6))
    assert (seen.in_sums, seen.in_uploads, seen.rounds) == (*exposed, 4)
    assert seen.uploads == dict.fromkeys(range(6), 3)
    for unit in range(6):  # later participations of any unit are added to that
        later = Participations.from_dict(seen.to_dict())
        later.record([unit], answered=1)
        assert (later.in_sums, later.in_uploads) == (exposed[0] + 1, exposed[1] + 1)
    nobody = Participations()
    nobody.level(range(3))
    assert (nobody.in_sums, nobody.in_uploads, sum(nobody.uploads.values())) == (0.0, 0.0, 0)


def test_stored_participations_continue_to_count_as_if_never_stored():
    seen = Participations()
    seen.record([0, 1], answered=1)
    seen.record([1, 2], answered=0, needed=5)
    again = Participations.from_dict(json.loads(json.dumps(seen.to_dict())))
    for one in (seen, again):
        one.record([2, 1], answered=2)
    assert (again.rounds, again.uploads) == (3, {0: 1, 1: 3, 2: 2})
    assert (again.in_sums, again.in_uploads) == (seen.in_sums, seen.in_uploads) == (3.0, 9.0)
    assert again.to_dict() == seen.to_dict()

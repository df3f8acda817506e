"""The clients to ask and the units to count: clients, users in silos, users under masks."""

import numpy as np
import pytest

from flower_ext.errors import InvalidValue
from flower_ext.federation.method_state import State
from flower_ext.federation.population import Cohort, HiddenUsers, Population, UsersInSilos
from flower_ext.privacy import FullParticipation, PoissonSampling
from flower_ext.privacy.accounting.participations import Participations

UNITS, SILOS = 20, 3
SOME = PoissonSampling(UNITS, 0.4)


def rng():
    return np.random.default_rng(1)


def hidden_users(sampling=SOME, *, drawn_by_server=True):
    return HiddenUsers(sampling, SILOS, drawn_by_server=drawn_by_server)


def counted(record, *rounds):
    """Return the counts after ``rounds``, each a triple (units, answered, asked)."""
    expected = Participations()
    for units, answered, invited in rounds:
        expected.record(units, answered, needed=invited)
    return record.to_dict() == expected.to_dict()


@pytest.mark.parametrize("name", ["arrays", "round", "address", "sum.masked", "training.local"])
def test_no_group_of_a_cohort_replaces_another_record(name):
    groups = {1: {name: {"w": np.zeros(2)}}}
    with pytest.raises(InvalidValue, match=f"names other than .'{name}'"):
        Cohort(partitions=[0, 1], units=[0, 1], population=2, requests=groups)
    with pytest.raises(InvalidValue):
        State(everyone=groups[1])


def test_clients_are_asked_for_their_data():
    clients = Population(SOME)
    cohort = clients.draw(rng())
    assert cohort.partitions == cohort.units == SOME.draw(rng())
    assert clients.num_nodes == UNITS
    clients.count(cohort.units, 2, needed=len(cohort.partitions))
    assert counted(clients.participations, (cohort.units, 2, len(cohort.partitions)))


def test_users_are_drawn_and_all_silos_are_asked():
    users = UsersInSilos(SOME, SILOS)
    cohort = users.draw(rng())
    assert list(cohort.partitions) == list(range(SILOS))
    assert cohort.units == SOME.draw(rng())
    assert users.num_nodes == SILOS
    # A missing silo means less noise for every user of the round.
    users.count(cohort.units, 2, needed=len(cohort.partitions))
    assert counted(users.participations, (cohort.units, 2, SILOS))


@pytest.mark.parametrize("population", [Population(SOME), UsersInSilos(SOME, SILOS)])
def test_an_abandoned_round_counts_for_the_clients_that_were_asked(population):
    population.count_abandoned([1, 4], 2, needed=3)
    assert counted(population.participations, ([1, 4], 2, 3))


def test_an_oblivious_draw_may_have_taken_anybody():
    assert list(hidden_users(drawn_by_server=False).draw(rng()).units) == list(range(UNITS))
    assert hidden_users().draw(rng()).units == SOME.draw(rng())


def test_an_adversary_without_a_masked_part_has_seen_no_sum():
    users = hidden_users()
    users.count([1, 2], 1, needed=SILOS)
    assert counted(users.participations, ([1, 2], SILOS, SILOS))


def test_places_of_a_lost_order_count_for_everybody():
    users = hidden_users()
    users.count([1, 2], SILOS, needed=SILOS)
    users.count_abandoned([3], 0, needed=SILOS)
    assert users.participations.rounds == 2
    assert set(users.participations.uploads.values()) == {2}
    assert len(users.participations.uploads) == UNITS


def test_where_everyone_takes_part_there_is_no_order_to_forget():
    users = hidden_users(FullParticipation(UNITS))
    users.count_abandoned(range(UNITS), 0, needed=SILOS)
    assert set(users.participations.uploads.values()) == {1}


def test_strangers_count_as_the_one_that_took_part_most():
    clients = Population(SOME)
    clients.count([1, 2], 2, needed=2)
    clients.count([1], 1, needed=1)
    clients.equalise_counts()
    assert dict(clients.participations.uploads) == dict.fromkeys(range(UNITS), 2)


@pytest.mark.parametrize(
    "clients",
    [Population(SOME), UsersInSilos(SOME, SILOS), hidden_users()],
)
def test_a_coming_rounds_participations_are_those_its_answers_would_count(clients):
    cohort = clients.draw(rng())
    before = clients.participations.to_dict()
    ahead = clients.after(cohort).to_dict()
    assert clients.participations.to_dict() == before != ahead
    size = len(cohort.partitions)
    clients.count(cohort.units, size, needed=size)
    assert clients.participations.to_dict() == ahead

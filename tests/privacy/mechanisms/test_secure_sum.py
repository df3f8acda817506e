"""Parameters of secure sums: neighbours, thresholds, and what they withstand."""

import math
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest

from flower_ext.errors import InvalidValue
from flower_ext.privacy import (
    SecureSum,
)
from flower_ext.privacy.mechanisms import secure_sum as module
from flower_ext.privacy.mechanisms.secure_sum import ring_bits
from flower_ext.secure.aggregation.context import graph_of
from tests.support.pages import DOCS

INSECURE, FAILED = Fraction(1, 2**40), Fraction(1, 2**20)
SHARES = [(0.05, 0.1), (0.1, 0.1), (0.2, 0.1), (0.1, 0.3), (0.2, 0.2), (0.0, 0.1)]
SIZES = [(100, 100, 1), (300, 300, 1), (1_000, 1_000, 1), (10_000, 10_000, 1)]
SAMPLED = [(100, 1_000, 60), (1_000, 10_000, 1_000)]


def at_least(least, population, marked, drawn):
    """Return the exact probability that ``drawn`` of a population hold ``least`` marked ones."""
    numbers = range(max(0, least, drawn - population + marked), min(marked, drawn) + 1)
    ways = (math.comb(marked, m) * math.comb(population - marked, drawn - m) for m in numbers)
    return Fraction(sum(ways), math.comb(population, drawn))


def bounds(sums, members, population, rounds, num_neighbors, threshold):
    """Return how often a run breaks each bound, in parts of what is allowed, by plain counting."""
    corrupt, lost = (
        math.ceil(Fraction(str(share)) * size)
        for share, size in ((sums.colluding, population), (sums.dropouts, members))
    )
    parameters = sums.for_cohort(members, population=population, rounds=rounds)
    others, stay = members - 1, members - 1 - lost
    empty = parameters.colluders + members - parameters.least_answers
    both = 2 * threshold - num_neighbors if sums.resist_equivocation else threshold
    pairs = Fraction(members * (members - 1), 2)
    few = 1 - at_least(threshold, others, stay, num_neighbors)
    return {
        "unmasked": rounds
        * members
        * at_least(both, population - 1, corrupt, num_neighbors)
        / INSECURE,
        "split": rounds * pairs * at_least(num_neighbors, members, empty, num_neighbors) / INSECURE,
        "failed": rounds * members * few / FAILED,
    }


@pytest.mark.parametrize("resist", [True, False])
@pytest.mark.parametrize("shares", SHARES, ids=str)
@pytest.mark.parametrize(
    ("members", "population", "rounds"),
    [*SIZES[:2], *SAMPLED[:1], *(pytest.param(*x, marks=pytest.mark.full) for x in SIZES[2:3])],
)
def test_graphs_have_the_fewest_neighbours_that_break_no_bound_of_a_run(
    members, population, rounds, shares, resist
):
    sums = SecureSum(colluding=shares[0], dropouts=shares[1], resist_equivocation=resist)
    graph_parameters = sums.for_cohort(members, population=population, rounds=rounds)
    assert graph_parameters.threshold <= graph_parameters.num_neighbors <= members - 1
    if graph_parameters.num_neighbors == members - 1:
        both = (
            2 * graph_parameters.threshold - graph_parameters.num_neighbors
            if resist
            else graph_parameters.threshold
        )
        assert graph_parameters.colluders < both
    else:
        assert graph_parameters.num_neighbors % 2 == 0
        facts = (sums, members, population, rounds)
        broken = bounds(*facts, graph_parameters.num_neighbors, graph_parameters.threshold)
        assert max(broken.values()) <= 1, broken
        for threshold in range(1, graph_parameters.num_neighbors - 1):
            assert max(bounds(*facts, graph_parameters.num_neighbors - 2, threshold).values()) > 1


@pytest.mark.parametrize(
    ("share", "members", "population", "rounds"),
    [(0.1, 100, 1_000, 1), (0.1, 100, 1_000, 60), (0.05, 1_000, 10_000, 1_000), (0.1, 10, 50, 40)],
)
def test_no_cohort_of_a_run_has_more_colluders_than_are_counted(share, members, population, rounds):
    graph_parameters = SecureSum(colluding=share).for_cohort(
        members, population=population, rounds=rounds
    )
    law = (population, math.ceil(share * population), members)
    assert rounds * at_least(graph_parameters.colluders + 1, *law) <= INSECURE
    assert rounds * at_least(graph_parameters.colluders, *law) > INSECURE
    assert (
        graph_parameters.honest_answers
        == graph_parameters.least_answers - graph_parameters.colluders
    )


def test_of_few_clients_one_may_collude_and_all_of_them_count():
    for population, expected in ((3, 1), (9, 1), (10, 1), (11, 2), (50, 5)):
        graph_parameters = SecureSum(colluding=0.1, dropouts=0.0).for_cohort(population, rounds=100)
        assert graph_parameters.colluders == expected
    assert SecureSum(colluding=0.0).for_cohort(9).colluders == 0


@pytest.mark.parametrize("members", [4, 5, 10, 11, 63, 64])
@pytest.mark.parametrize(("colluding", "dropouts"), [(0, 0), (0.1, 0.1), (0.25, 0.2), (0, 0.3)])
def test_in_complete_graphs_only_the_honest_members_reach_the_threshold(
    members, colluding, dropouts
):
    for resist in (True, False):
        sums = SecureSum(colluding=colluding, dropouts=dropouts, resist_equivocation=resist)
        if resist and members - 1 <= 2 * math.ceil(dropouts * members) + math.ceil(
            colluding * members
        ):
            with pytest.raises(ValueError, match="or set SecureSum.resist_equivocation=False"):
                sums.for_cohort(members)
            continue
        graph_parameters = sums.for_cohort(members)
        lost = members - graph_parameters.least_answers
        assert graph_parameters.num_neighbors == members - 1
        assert graph_parameters.colluders < graph_parameters.threshold == members - 1 - lost
        assert (
            not resist or 2 * graph_parameters.threshold > members - 1 + graph_parameters.colluders
        )
        assert lost >= dropouts * members - 1e-9
        assert graph_parameters.honest_answers >= 2


def test_up_to_64_members_are_all_neighbours():
    sums = SecureSum(colluding=0.0, dropouts=0.0)
    assert sums.for_cohort(64).num_neighbors == 63
    assert sums.for_cohort(65).num_neighbors < 64


@pytest.mark.parametrize(
    ("members", "population", "colluding", "dropouts"),
    [(24, 1_000, 0.1, 0.1), (28, 5_000, 0.05, 0.2)],
)
def test_in_complete_graphs_of_random_cohorts_only_the_colluders_are_random(
    members, population, colluding, dropouts
):
    """The bound of a random graph would count it once for each member, and refuse the cohort."""
    graph_parameters = SecureSum(colluding=colluding, dropouts=dropouts).for_cohort(
        members, population=population
    )
    assert (graph_parameters.num_neighbors, graph_parameters.threshold) == (
        members - 1,
        graph_parameters.least_answers - 1,
    )
    assert (
        graph_parameters.colluders < 2 * graph_parameters.threshold - graph_parameters.num_neighbors
    )


def test_without_a_number_of_rounds_a_run_has_one():
    sums = SecureSum(colluding=0.05)
    one, usual, two = (
        sums.for_cohort(50, population=1_000, **rounds)
        for rounds in ({"rounds": 1}, {}, {"rounds": 2})
    )
    assert one == usual
    assert one.colluders == 17
    assert two.colluders == 18


@pytest.mark.parametrize(("which", "threshold"), [("unmasked", 6), ("split", 9), ("failed", 8)])
def test_each_bound_is_that_of_plain_counting(which, threshold, monkeypatch):
    members, population, corrupt, colluders, lost, rounds = 30, 60, 6, 5, 6, 3
    cohort = module._Cohort(
        members=members,
        population=population,
        corrupt=corrupt,
        colluders=colluders,
        lost=lost,
        rounds=rounds,
        equivocation=True,
    )
    num_neighbors, others = 10, members - 1
    broken = {
        "unmasked": members
        * at_least(2 * threshold - num_neighbors, population - 1, corrupt, num_neighbors),
        "split": members
        * (members - 1)
        / 2
        * at_least(num_neighbors, members, colluders + lost, num_neighbors),
        "failed": members * (1 - at_least(threshold, others, others - lost, num_neighbors)),
    }
    law = cohort._succeeds if which == "failed" else cohort._is_secure
    for part, holds in ((0.9999, False), (1.0001, True)):
        allowed = float(rounds * broken[which]) * part
        monkeypatch.setattr(module, "_FAILED" if which == "failed" else "_INSECURE", allowed)
        assert law(num_neighbors, threshold) is holds


@pytest.fixture
def likely(monkeypatch):
    """Allow every bound to be broken once in 100 runs, which a simulation can count."""

    def allow(failed):
        monkeypatch.setattr(module, "_INSECURE", 0.01)
        monkeypatch.setattr(module, "_FAILED", failed)

    caches = (module._parameters, module._most_colluders)
    for cache in caches:
        cache.cache_clear()
    yield allow
    for cache in caches:
        cache.cache_clear()


def splits(rng, members, empty, num_neighbors, trials):
    """Return the share of random circles on which the members that stay are not connected."""
    gone = rng.permuted(np.tile(np.arange(members) < empty, (trials, 1)), axis=1)
    count = 0
    for places in gone:
        stay = np.flatnonzero(~places)
        steps = np.diff(stay, append=stay[0] + members)
        count += np.count_nonzero(steps > num_neighbors // 2) >= 2
    return count / trials


def test_a_circle_splits_if_two_steps_exceed_half_the_neighbours():
    rng, members, num_neighbors = np.random.default_rng(1), 30, 4
    for _ in range(200):
        order = tuple(rng.permutation(members).tolist())
        graph = graph_of(order, num_neighbors)
        stay = {order[place] for place in rng.choice(members, 18, replace=False)}
        reached, edge, graph = set(), {min(stay)}, graph_of(order, num_neighbors)
        while edge:
            reached |= edge
            near = (set(graph[member]) for member in edge)
            edge = (set().union(*near) & stay) - reached
        places = [place for place, member in enumerate(order) if member in stay]
        steps = [b - a for a, b in pairwise([*places, places[0] + members])]
        assert (reached == stay) == (sum(step > num_neighbors // 2 for step in steps) < 2)


@pytest.mark.parametrize(
    ("members", "dropouts"),
    [
        (100, 0.3),
        *(pytest.param(n, d, marks=pytest.mark.full) for n, d in ((200, 0.3), (400, 0.3))),
        pytest.param(1_000, 0.1, marks=pytest.mark.full),
    ],
)
def test_random_circles_stay_whole_as_often_as_planned_unlike_with_fewer_neighbours(
    likely, members, dropouts
):
    """A bound for a single member without neighbours is wrong by half the number of members."""
    likely(failed=1.0)
    sums = SecureSum(colluding=0.0, dropouts=dropouts, resist_equivocation=False)
    graph_parameters = sums.for_cohort(members)
    empty, rng, trials = round(dropouts * members), np.random.default_rng(2), 10_000
    assert (
        splits(rng, members, empty, graph_parameters.num_neighbors, trials) < 0.0155
    )  # 0.01, and 5.5 stddevs
    fewer = next(
        k for k in range(2, members, 2) if members * at_least(k, members - 1, empty, k) <= 0.01
    )
    assert fewer < graph_parameters.num_neighbors
    assert splits(rng, members, empty, fewer, trials) > 0.05


@pytest.mark.parametrize("resist", [True, False])
def test_in_random_cohorts_colluders_unmask_as_rarely_as_planned(likely, resist):
    likely(failed=2.0**-10)
    members, population, trials = 100, 1_000, 10_000
    sums = SecureSum(colluding=0.1, dropouts=0.1, resist_equivocation=resist)
    graph_parameters = sums.for_cohort(members, population=population)
    rng, half = np.random.default_rng(6), graph_parameters.num_neighbors // 2
    everyone = np.tile(np.arange(population) < 100, (trials, 1))
    colluding = rng.permuted(everyone, axis=1)[:, :members].astype(np.int16)
    around = np.concatenate([colluding[:, -half:], colluding, colluding[:, :half]], axis=1)
    ahead = np.cumsum(np.pad(around, ((0, 0), (1, 0))), axis=1)
    near = ahead[:, 2 * half + 1 :] - ahead[:, :members] - colluding
    both = (
        2 * graph_parameters.threshold - graph_parameters.num_neighbors
        if resist
        else graph_parameters.threshold
    )
    broken = np.any((near >= both) & (colluding == 0), axis=1)
    assert 0.0001 < np.mean(broken) < 0.0155
    assert np.mean(colluding.sum(axis=1) > graph_parameters.colluders) < 0.0155


def test_the_table_of_the_documentation_is_what_the_code_computes():
    page = (DOCS / "proved" / "secure-sums.md").read_text(encoding="utf-8")
    for colluding, dropouts in ((0.05, 0.1), (0.1, 0.1), (0.2, 0.2)):
        cells = []
        for members, population, rounds in (*SIZES, *SAMPLED):
            sums = SecureSum(colluding=colluding, dropouts=dropouts)
            try:
                graph = sums.for_cohort(members, population=population, rounds=rounds)
                cells.append(f"{graph.num_neighbors}, {graph.threshold}; {graph.colluders}")
            except ValueError:
                cells.append("none")
        row = f"| {colluding:g}, {dropouts:g} | {' | '.join(cells)} |"
        assert row in page, f"expected {row}"


@pytest.mark.parametrize("members", [0, 1, 2])
def test_two_members_have_no_sum_that_hides_anything(members):
    with pytest.raises(ValueError, match="expected at least 3 members for a secure sum"):
        SecureSum().for_cohort(members)


def test_what_no_sum_withstands_is_refused_by_what_to_change():
    for wrong in ({"colluding": 1.0}, {"dropouts": -0.1}, {"colluding": math.nan}):
        with pytest.raises(ValueError, match=r"expected a number in \[0, 1\)"):
            SecureSum(**wrong)
    with pytest.raises(ValueError, match="expected a sum below 1"):
        SecureSum(colluding=0.5, dropouts=0.5)
    with pytest.raises(ValueError, match="lower dropouts or colluding, or take larger cohorts"):
        SecureSum(colluding=0.6, dropouts=0.39).for_cohort(20)
    with pytest.raises(ValueError, match="take larger cohorts, or set SecureSum.resist_equiv"):
        SecureSum(dropouts=0.45).for_cohort(20)
    with pytest.raises(ValueError, match="from 1000 clients may have 10 colluders"):
        SecureSum().for_cohort(10, population=1_000)  # all ten, once in 10^10 cohorts


@pytest.mark.parametrize("whole", [2**31, 2**63])
@pytest.mark.parametrize("share", [0.0, 0.5, 0.999])
def test_a_ring_has_room_for_eleven_stddevs_beside_the_largest_sum(whole, share):
    bits = {2**31: 32, 2**63: 64}[whole]
    rest = whole * (1 - share) / 11
    assert ring_bits(whole * share, 0.99 * rest) == bits
    if bits == 32:
        assert ring_bits(whole * share, 1.01 * rest) == 64
    else:
        with pytest.raises(ValueError, match=r"expected less than 2\*\*63"):
            ring_bits(whole * share, 1.01 * rest)


def smallest_sum(parameters, seen, lost):
    """Return the fewest honest vectors in a sum that a lying server learns; None if it learns none.

    ``seen`` has, for each honest member, the members whose keys and shares the server delivered;
    ``lost`` those of them that the server says were lost. Members below ``colluders`` collude.
    """
    colluders, threshold = range(parameters.colluders), parameters.threshold
    honest = range(parameters.colluders, parameters.members)

    def rebuilt(owner, says_lost):
        holders = [j for j in honest if j != owner and j in seen[owner] and owner in seen[j]]
        revealed = sum((owner in lost[j]) is says_lost for j in holders)
        return revealed + sum(c in seen[owner] for c in colluders) >= threshold

    keys = {i for i in honest if rebuilt(i, True)}
    seeds = {i for i in honest if rebuilt(i, False)}
    assert not keys & seeds  # both secrets of a member would open its upload
    # A vector stays hidden if one mask does: of a pair, or the own mask of a member beside it.
    shown = seeds
    while hidden := {i for i in shown if {j for j in seen[i] if j in honest} - keys - shown}:
        shown = shown - hidden
    sizes = []
    while shown:
        group, fresh = set(), {min(shown)}
        while fresh:
            group |= fresh
            fresh = {j for i in fresh for j in seen[i] if j in shown} - group
        sizes.append(len(group))
        shown = shown - group
    return min(sizes, default=None)


SIGNED = [(12, 1 / 12, 2 / 12), (20, 0.1, 0.1), (9, 0.0, 1 / 9), (30, 0.1, 0.1), (8, 1 / 8, 0.0)]


@pytest.mark.parametrize(("members", "colluding", "dropouts"), SIGNED)
def test_no_lie_about_losses_shows_a_sum_of_too_few_honest_members(members, colluding, dropouts):
    sums = SecureSum(colluding=colluding, dropouts=dropouts, signed=True)
    parameters = sums.for_cohort(members)
    most, count = members - parameters.least_answers, parameters.colluders
    everyone, rng = range(members), np.random.default_rng(members)
    assert parameters.num_neighbors == members - 1
    # The best lie that we know: all say that the same members were lost, and see as few others.
    gone = {*range(count, count + most)}
    circle = {*range(parameters.threshold + 1)}
    seen = {i: (circle if i in circle else {*everyone}) - {i} for i in range(count, members)}
    lost = {i: gone - {i} for i in seen}
    graph_parameters = smallest_sum(parameters, seen, lost)
    assert graph_parameters is None or graph_parameters >= parameters.honest_answers
    sizes = []
    for _ in range(300):
        picked = rng.permutation(members)[: parameters.threshold + 1]
        core = {*picked.tolist()}
        gone = [i for i in core if i >= count][: most + 1]
        seen = {i: (core if i in core else {*everyone}) - {i} for i in range(count, members)}
        lost = {}
        for i in seen:
            named = [j for j in gone if j != i and j in seen[i]]
            lost[i] = {*rng.permutation(named)[:most].tolist()} if named else set()
        sizes.append(smallest_sum(parameters, seen, lost))
    known = [size for size in sizes if size is not None]
    assert min(known, default=members) >= parameters.honest_answers


def test_the_bound_on_lies_is_reached():
    parameters = SecureSum(colluding=1 / 12, dropouts=2 / 12, signed=True).for_cohort(12)
    assert (parameters.threshold, parameters.honest_answers) == (9, 7)
    core, gone = {*range(10)}, {1, 2}
    seen = {i: (core if i in core else {*range(12)}) - {i} for i in range(1, 12)}
    assert smallest_sum(parameters, seen, {i: gone - {i} for i in seen}) == 7


def test_signed_sums_that_leave_no_sum_to_hide_in_are_refused():
    with pytest.raises(InvalidValue, match="signed=True with dropouts=0.1 and 5 members"):
        SecureSum(colluding=0.1, dropouts=0.1, signed=True).for_cohort(5)
    assert SecureSum(colluding=0.1, dropouts=0.0, signed=True).for_cohort(5).honest_answers == 4
    assert SecureSum(signed=True, colluding=0.0, dropouts=0.05).for_cohort(200).num_neighbors == 199
    with pytest.raises(InvalidValue, match="resist_equivocation"):
        SecureSum(signed=True, resist_equivocation=False)
    with pytest.raises(InvalidValue, match="or take larger cohorts$"):  # and names nothing refused
        SecureSum(signed=True, dropouts=0.4).for_cohort(10)

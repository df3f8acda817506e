"""Whole rounds give the right sum, or none."""

import subprocess
import sys

import numpy as np
import pytest

from flower_ext.errors import IncompleteRound
from tests.support.secure_sum import Round, round_context


@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize(("members", "num_neighbors"), [(2, 1), (5, 10), (9, 4), (30, 8)])
def test_the_sum_is_exact_modulo_the_ring(bits, members, num_neighbors):
    context = round_context(members, num_neighbors, 1, 2, bits=bits, length=20_001)
    one = Round(context)
    np.testing.assert_array_equal(one.run(), one.plain_sum())
    assert one.server.answered == set(range(members))


@pytest.mark.parametrize("num_neighbors", [4, 8])
@pytest.mark.parametrize("stage", range(4))
def test_a_member_lost_at_any_stage_leaves_the_sum_of_the_others(stage, num_neighbors):
    one = Round(round_context(9, num_neighbors, 2, 3))
    lost = [(), (), (), ()]
    lost[stage] = (4,)
    np.testing.assert_array_equal(one.run(lost), one.plain_sum())
    assert (4 in one.server.answered) == (stage == 3)


def random_round(seed):
    """Return True if the round gave a sum, which then is right; False if it was discarded."""
    rng = np.random.default_rng(seed)
    members = int(rng.integers(3, 25))
    num_neighbors = int(rng.integers(2, members + 2))
    facts = {"bits": int(rng.choice([32, 64])), "length": 17, "number": seed}
    context = round_context(members, num_neighbors, 1, 2, **facts)
    threshold = int(rng.integers(1, context.num_neighbors // 2 + 2))
    least = int(rng.integers(2, max(3, members * 3 // 4)))
    one = Round(round_context(members, num_neighbors, threshold, least, **facts))
    rates = rng.uniform(0, 0.3, size=4)
    lost = [set(np.flatnonzero(rng.random(members) < rate).tolist()) for rate in rates]
    try:
        total = one.run(lost)
    except IncompleteRound:
        return False
    np.testing.assert_array_equal(total, one.plain_sum())
    assert len(one.server.answered) >= least
    return True


def test_with_losses_at_every_stage_a_round_is_right_or_discarded():
    outcomes = [random_round(seed) for seed in range(12)]
    assert {True, False} == set(outcomes)


@pytest.mark.exhaustive
def test_a_thousand_rounds_with_losses_are_right_or_discarded():
    outcomes = [random_round(seed) for seed in range(1_000, 2_000)]
    assert {True, False} == set(outcomes)


def test_fewer_answers_than_the_least_discard_the_round():
    one = Round(round_context(6, 5, 2, least=5))
    with pytest.raises(IncompleteRound, match="least_answers=5"):
        one.run([(), (), (0, 1), ()])


def test_too_few_shares_discard_the_round():
    one = Round(round_context(6, 5, 4, least=3))
    with pytest.raises(IncompleteRound, match="expected at least 4 valid shares"):
        one.run([(), (), (), (0, 1, 2)])


def test_the_package_works_without_the_extra_without_flower_and_without_torch():
    code = (
        "import sys; sys.modules['phe'] = sys.modules['gmpy2'] = None\n"
        "import flower_ext.secure.aggregation; print({'torch', 'flwr'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"

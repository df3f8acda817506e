"""Settings of private weighting over Paillier: the sum must fit the modulus."""

import math
import time

import numpy as np
import pytest

from flower_ext.secure.weighting.private_weighting import PrivateWeighting
from tests.support.weighting import weighting_settings


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"run": ""}, "run="),
        ({"users": 0}, "users=0"),
        ({"silos": 1}, "silos=1: expected an integer >= 2"),
        ({"coordinates": 0}, "coordinates=0"),
        ({"max_records_per_user": 0}, "max_records_per_user=0"),
        ({"precision": 0.0}, "precision=0.0"),
        ({"precision": math.nan}, "precision=nan"),
        ({"update_bound": math.inf}, "bound=inf"),
        ({"noise_bound": 0.0}, "bound=0.0"),
        ({"key_bits": 512, "allow_insecure_key_size": False}, "at least 3072"),
        ({"allowed_totals": ()}, r"allowed_totals=\(\)"),
        ({"allowed_totals": (10, 61)}, "max_records_per_user=60"),
        ({"allowed_totals": 3}, "allowed_totals=3: expected integers"),
        ({"allowed_totals": (1.5, 2)}, "allowed_totals=.*: expected integers"),
        ({"allowed_totals": ("1",)}, "allowed_totals=.*: expected integers"),
        ({"silo_record_limits": 5}, "silo_record_limits=5: expected integers"),
        ({"silo_record_limits": "123"}, "silo_record_limits='123': expected integers"),
        ({"key_bits": 256.0}, "key_bits=256.0: expected an integer"),
        ({"silo_record_limits": (30, 30)}, "expected 3 integers"),
        ({"silo_record_limits": (30, 30, 1)}, "at most max_records_per_user=60"),
        ({"update_bound": 1e12}, "coarser step"),
    ],
)
def test_unfit_fields_are_refused_by_name(changes, match):
    with pytest.raises(ValueError, match=match):
        weighting_settings(**changes)


def test_options_and_settings_share_fields_that_the_wire_carries_one_by_one():
    options = {**vars(PrivateWeighting(max_records_per_user=60))}
    del options["common_multiple"]  # computed, not sent
    run = {"run", "users", "silos", "coordinates", "winning_choices", "update_bound", "noise_bound"}
    assert weighting_settings().to_dict().keys() == {*options, *run, "kind"}


def test_the_sum_must_stay_below_half_the_modulus_whatever_the_key():
    """Condition 2 of Theorem 1, at its exact boundary: bounds in steps of one."""
    # step = 2 · precision / (users + 2 · silos) = 1, so integers are encoded as they are
    facts = {"users": 2, "silos": 2, "precision": 3.0, "noise_bound": 1.0, "key_bits": 64}
    facts |= {"max_records_per_user": 1}
    # 2 · largest + 2 · (1 + 1) must be below 2**63 / 2
    largest = 2**60
    assert weighting_settings(**facts, update_bound=float(largest)).sum_bound == 2 * largest + 4
    with pytest.raises(ValueError, match="fewer records per user"):
        weighting_settings(**facts | {"max_records_per_user": 4}, update_bound=float(largest))
    for multiple in range(1, 7):
        sum_bound = math.lcm(*range(1, multiple + 1)) * (2 * 10**17 + 4)
        accepted = sum_bound < 2**62
        try:
            weighting_settings(**facts | {"max_records_per_user": multiple}, update_bound=1e17)
        except ValueError:
            assert not accepted
        else:
            assert accepted


def test_n_max_of_the_paper_fits_3072_bits_and_2200_does_not():
    facts = {"users": 100, "key_bits": 3072, "allow_insecure_key_size": False}
    fitting = weighting_settings(**facts, max_records_per_user=2000, noise_bound=64.0)
    assert fitting.common_multiple.bit_length() == 2878
    assert fitting.packing.slots == 1
    for most in (2100, 2200):
        with pytest.raises(ValueError, match="fewer records per user"):
            weighting_settings(**facts, max_records_per_user=most, noise_bound=64.0)


@pytest.mark.parametrize(
    "changes",
    [
        {"max_records_per_user": 10**7},
        {"max_records_per_user": 10**12},
        {"max_records_per_user": 10**7, "allowed_totals": tuple(range(1, 10**5))},
        {"max_records_per_user": 10**12, "allowed_totals": (1, 10**12)},
    ],
)
def test_numbers_of_records_that_no_key_fits_are_refused_at_once(changes):
    began = time.monotonic()
    with pytest.raises(ValueError, match="fewer records per user"):
        weighting_settings(**changes)
    assert time.monotonic() - began < 1.0


def test_a_small_common_multiple_packs_many_coordinates():
    facts = {"users": 100, "key_bits": 3072, "max_records_per_user": 10**4, "noise_bound": 64.0}
    few = weighting_settings(**facts, allowed_totals=(10, 100, 1000, 10_000), coordinates=1000)
    assert few.common_multiple == 10**4
    assert few.packing.slots > 40
    assert few.ciphertexts == math.ceil(1000 / few.packing.slots)
    bits = weighting_settings(users=100, key_bits=3072, max_records_per_user=120, noise_bound=64.0)
    assert bits.common_multiple.bit_length() == 170
    assert bits.packing.slots == 13


def test_encoding_and_dither_move_one_users_contribution_no_further_than_its_bound():
    """The step is as long as the update, and the remainder takes every fraction."""
    facts = weighting_settings(users=1, silos=2, coordinates=40, precision=0.5, update_bound=1.0)
    rng = np.random.default_rng(0)
    furthest = 0.0
    for _ in range(2000):
        update = rng.normal(size=40)
        update *= rng.uniform() / np.linalg.norm(update)
        weighted = facts.encoding.encode(update) * rng.uniform()
        rest, dither = rng.uniform(0, 1, (2, 40))
        moved = np.floor(rest + weighted + dither) - np.floor(rest + dither)
        furthest = max(furthest, float(np.linalg.norm(moved * facts.step)))
    assert furthest <= facts.sensitivity
    assert weighting_settings(coordinates=1).sensitivity == pytest.approx(1.0)


def test_settings_that_differ_in_any_field_have_different_contexts():
    several = [
        weighting_settings(),
        weighting_settings(run="other"),
        weighting_settings(users=5),
        weighting_settings(precision=1e-9),
        weighting_settings(silo_record_limits=(20, 20, 20)),
    ]
    assert len({p.context for p in several}) == len(several)
    assert weighting_settings().context == weighting_settings().context

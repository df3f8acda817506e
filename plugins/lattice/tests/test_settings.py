import dataclasses
import math

import pytest
from lattice_world import lattice_settings

from flower_ext.errors import InvalidValue
from flower_ext_lattice.messages import LatticeSum, LatticeWeights

MILLION = {"users": 100, "silos": 5, "coordinates": 10**6, "rounds": 1000}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"run": ""}, "run=''"),
        ({"users": 0}, "users=0"),
        ({"silos": 1, "silo_record_limits": (20,)}, "silos=1"),
        ({"coordinates": 0}, "coordinates=0"),
        ({"rounds": 0}, "rounds=0"),
        ({"silo_record_limits": None}, "silo_record_limits=None: expected 3 integers"),
        ({"silo_record_limits": ()}, "silo_record_limits"),
        ({"silo_record_limits": (20, 20)}, "expected 3 integers"),
        ({"silo_record_limits": (20, 20, -1)}, "expected 3 integers >= 0"),
        ({"silo_record_limits": (20, 20, 1.5)}, "expected 3 integers"),
        ({"silo_record_limits": (0, 0, 0)}, "expected a sum from 1"),
        ({"silo_record_limits": (30_000, 30_000, 5_536)}, "to 65535"),
        ({"clipping_norm": 0.0}, "clipping_norm=0.0"),
        ({"clipping_norm": math.nan}, "clipping_norm=nan"),
        ({"noise_stddev": 0.0}, "noise_stddev=0.0"),
        ({"noise_stddev": math.inf}, "noise_stddev=inf"),
        ({"noise_stddev": 1e-6, **MILLION, "silo_record_limits": (400,) * 5}, "more noise"),
        ({"noise_stddev": 30.0}, "where sums wrap"),
    ],
)
def test_settings_out_of_range_are_refused(changes, message):
    with pytest.raises(InvalidValue, match=message):
        lattice_settings(**changes)


def test_limits_are_mandatory():
    facts = {
        field.name: getattr(lattice_settings(), field.name)
        for field in dataclasses.fields(lattice_settings())
    }
    del facts["silo_record_limits"]
    with pytest.raises(TypeError, match="silo_record_limits"):
        type(lattice_settings())(**facts)


def test_every_field_enters_the_context():
    base = lattice_settings()
    changes = {
        "run": "other",
        "users": 5,
        "silos": 4,
        "coordinates": 6,
        "silo_record_limits": (20, 20, 19),
        "clipping_norm": 2.0,
        "noise_stddev": 2.0,
        "rounds": 101,
        "draw_choices": 5,
    }
    contexts = {base.context} | {
        lattice_settings(**{name: value}).context for name, value in changes.items()
    }
    contexts.add(lattice_settings(draw_choices=5, winning_choices=2).context)
    changes["winning_choices"] = 2
    assert set(changes) == {field.name for field in dataclasses.fields(base)}
    assert len(contexts) == 1 + len(changes)


def test_the_sensitivity_counts_encoding_carry_slack_and_errors():
    facts = lattice_settings(**MILLION, silo_record_limits=(400,) * 5, clipping_norm=2.0)
    excess = 2.0 * facts.sensitivity - 2.0
    parts = [2 * 2.0**-20, 1.5 * 1000 * 2.0**-29, facts.error_bound]
    assert excess == pytest.approx(sum(parts), rel=1e-6)
    assert facts.error_bound == pytest.approx(2 * 2000 * 4096 * 21 / 2**56, rel=1e-3)


def test_statistical_distances_are_those_of_the_derivation():
    """For 10^6 coordinates, 1,000 rounds and a share of noise of one clipping norm."""
    facts = lattice_settings(**MILLION, silo_record_limits=(400,) * 5)
    error = math.sqrt(4096 * 2 * (2 / 3) * 10.5) / 2**56
    one = error / (math.sqrt(2 * math.pi) * 2**30)
    assert facts.rerandomising_delta == pytest.approx(10**9 * one)
    assert facts.rerandomising_delta < 2**-49
    assert facts.hint_delta < 2**-29
    assert facts.undrawn_delta < 2**-33
    assert facts.added_delta < 1e-8


def test_distances_grow_with_what_they_add_up_over():
    base = lattice_settings()
    for name in ("rounds", "coordinates"):
        more = lattice_settings(**{name: 4 * getattr(base, name)})
        assert more.rerandomising_delta == pytest.approx(4 * base.rerandomising_delta)
    assert lattice_settings(rounds=400).hint_delta == pytest.approx(2 * base.hint_delta)
    assert lattice_settings(noise_stddev=2.0).added_delta == pytest.approx(base.added_delta / 2)


def test_a_sum_wraps_at_512_norms():
    assert lattice_settings(clipping_norm=2.0).sum_limit == 1024


def test_a_million_coordinates_take_14_megabytes():
    facts = lattice_settings(**MILLION, silo_record_limits=(400,) * 5)
    assert LatticeSum.size(facts) == 20 + 14_028_160
    assert LatticeWeights.size(facts) == 12 + 7_315_232

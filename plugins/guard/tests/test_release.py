"""Whatever an app answers, the update is bounded, noised and shaped as the request."""

import io

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord
from hypothesis import given, settings
from hypothesis import strategies as some
from hypothesis.extra import numpy as arrays

from flower_ext.privacy import FullParticipation, NeighboringRelation, SeededNoise
from flower_ext.privacy.mechanisms.noise import NoiseSource
from flower_ext.privacy.mechanisms.updates import l2_norm
from flower_ext_guard.policy import MessagePolicy, Refused
from flower_ext_guard.release import bounded_update, released, requested_arrays

POLICY = MessagePolicy(release="clipped-noised-update", clipping_norm=2.0, noise_multiplier=0.25)
REQUEST = {
    "weight": np.arange(6, dtype=np.float32).reshape(2, 3),
    "bias": np.float64(1.5) * np.ones(()),
    "half": np.ones(2, np.float16),
    "count": np.array(3),
    "mask": np.array([True, False]),
}


class NoNoise(NoiseSource):
    """A source that adds nothing."""

    is_secure = False

    def _generator(self):
        raise NotImplementedError

    def add_gaussian(self, update, stddev, *, grid=None):
        return dict(update)


def record(values):
    return ArrayRecord({name: Array(np.asarray(value)) for name, value in values.items()})


def update_of(leaving, names=("weight", "bias", "half")):
    return {name: leaving[name].astype(np.float64) - REQUEST[name] for name in names}


@settings(deadline=None)
@given(
    some.lists(
        arrays.arrays(np.float64, (2, 3), elements=some.floats(width=64)), min_size=2, max_size=2
    )
)
def test_any_two_answers_differ_by_at_most_two_clipping_norms(answers):
    request = {"weight": REQUEST["weight"].astype(np.float64)}
    first, second = (bounded_update(request, {"weight": answer}, 2.0) for answer in answers)
    assert l2_norm(first) <= 2.0
    assert l2_norm({"weight": first["weight"] - second["weight"]}) <= 4.0


def test_a_small_update_arrives_and_other_types_are_sent_as_they_came():
    answer = {
        "weight": REQUEST["weight"] + np.float32(0.25),
        "bias": REQUEST["bias"] - 0.5,
        "half": REQUEST["half"],
        "count": np.array(999),
        "mask": np.array([False, True]),
    }
    leaving = released(REQUEST, record(answer), POLICY, NoNoise())
    assert list(leaving) == list(REQUEST)
    for name, array in leaving.items():
        assert array.dtype == REQUEST[name].dtype
        assert array.shape == REQUEST[name].shape
        expected = answer if name in ("weight", "bias", "half") else REQUEST
        np.testing.assert_array_equal(array, expected[name])


def test_an_update_is_clipped_over_all_arrays_together():
    answer = {**REQUEST, "weight": REQUEST["weight"] + 100, "bias": REQUEST["bias"] + 100}
    update = update_of(released(REQUEST, record(answer), POLICY, NoNoise()))
    assert l2_norm(update) == pytest.approx(2.0, rel=1e-6)


def test_only_listed_arrays_are_updated():
    policy = MessagePolicy(
        release="clipped-noised-update", clipping_norm=2.0, noise_multiplier=1.0, arrays=["bias"]
    )
    answer = {name: array + array.dtype.type(1) for name, array in REQUEST.items()}
    leaving = released(REQUEST, record(answer), policy, SeededNoise(1))
    assert leaving["bias"] != REQUEST["bias"]
    for name in REQUEST.keys() - {"bias"}:
        np.testing.assert_array_equal(leaving[name], REQUEST[name])


def claimed(content):
    """Return an answer whose bias, of any bytes, is said to be as requested."""
    return ArrayRecord({**record(REQUEST), "bias": Array("float64", (), "numpy.ndarray", content)})


def archive():
    np.savez(stream := io.BytesIO(), bias=REQUEST["bias"] + 1)
    return stream.getvalue()


def head_of_terabytes():
    head = {"descr": "<f8", "fortran_order": False, "shape": (10**12,)}
    np.lib.format.write_array_header_1_0(stream := io.BytesIO(), head)
    return stream.getvalue()


UNUSABLE = {
    "none": None,
    "another name": record({**REQUEST, "more": np.ones(2)}),
    "a missing name": record({n: a for n, a in REQUEST.items() if n != "mask"}),
    "another shape": record({**REQUEST, "half": np.ones(3, np.float16)}),
    "another type": record({**REQUEST, "half": np.ones(2, np.float32)}),
    "NaN": record({**REQUEST, "bias": np.full((), np.nan)}),
    "infinity": record({**REQUEST, "weight": np.full((2, 3), np.inf, np.float32)}),
    "a pickle": claimed(b"\x80\x04K\x01."),
    "bytes that end early": claimed(b"\x93NUMPY\x01\x00"),
    "an archive of arrays": claimed(archive()),
    "a head without its terabytes": claimed(head_of_terabytes()),
}


@pytest.mark.parametrize("answer", UNUSABLE.values(), ids=UNUSABLE)
def test_an_unusable_answer_gives_the_bits_of_an_unchanged_model(answer):
    silent = released(REQUEST, record(REQUEST), POLICY, SeededNoise(7))
    leaving = released(REQUEST, answer, POLICY, SeededNoise(7))
    for name, array in silent.items():
        np.testing.assert_array_equal(leaving[name], array)
    assert l2_norm(update_of(leaving)) > 0


def test_the_noise_has_the_deviation_that_the_ledger_counts():
    request = {"weight": np.zeros(40_000)}
    leaving = released(request, None, POLICY, SeededNoise(3))["weight"]
    spend = POLICY.spend()
    deviation = spend.noise_multiplier * POLICY.clipping_norm
    # 40,000 numbers estimate a deviation to 0.35 %; five standard errors.
    assert np.std(leaving) == pytest.approx(deviation, rel=0.018)
    assert spend.relation is NeighboringRelation.REPLACE_ONE
    assert spend.sampling == FullParticipation(1)
    assert spend.relative_noise == POLICY.noise_multiplier / 2


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64])
def test_numbers_stay_finite_beside_the_largest_of_their_type(kind):
    request = {"weight": np.full(64, np.finfo(kind).max)}
    leaving = released(request, None, POLICY, SeededNoise(3))["weight"]
    assert np.isfinite(leaving).all()


def test_requests_without_arrays_that_can_be_noised_are_refused():
    for values in ({"count": np.array(3)}, {"empty": np.zeros(0)}, {}):
        with pytest.raises(Refused):
            requested_arrays(record(values), POLICY)
    with pytest.raises(Refused, match="exactly one"):
        requested_arrays(None, POLICY)
    with pytest.raises(Refused, match="NumPy's format"):
        requested_arrays(UNUSABLE["a pickle"], POLICY)

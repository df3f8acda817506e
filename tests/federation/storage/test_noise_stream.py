"""The secret state of correlated noise: where it is, and that no end of a process repeats noise."""

import itertools
import shutil
import stat

import numpy as np
import pytest

from flower_ext.errors import InvalidValue
from flower_ext.federation.storage.folder import Damaged, StateFolder
from flower_ext.federation.storage.noise_stream import FILE, NoiseStream
from flower_ext.privacy import SecureNoise, SeededNoise
from flower_ext.privacy.mechanisms.correlated_noise import StrategyMatrix
from tests.support.grids import grid
from tests.support.noise_witness import NOISES, Trial, faults_of

MATRIX = StrategyMatrix(bands=(0.4, 0.3), weights=(0.1,), decays=(0.8,))
LIKE = {"a": np.zeros((2, 3), np.float32), "b": np.zeros(4, np.float32)}


def secure(place):
    return SecureNoise()


def seeded(place):
    return SeededNoise(1, "server-noise", place)


def numbers(stream, number, source=secure, *, repeats=False):
    """Return the noise of a round."""
    noise = stream.at(number, LIKE, source, repeats=repeats)
    zeros = {name: np.zeros(array.shape) for name, array in LIKE.items()}
    return np.concatenate([a.ravel() for a in noise.add_gaussian(zeros, 1.0).values()])


def folder(path, key=None):
    return StateFolder(path=path, sync=False, key=key)


def test_a_new_process_continues_with_the_same_noise(tmp_path):
    whole = [numbers(NoiseStream(MATRIX, None), 9, seeded, repeats=True) for _ in range(2)]
    assert np.array_equal(*whole)
    # The same numbers, stored and read again between rounds, by a run that may not repeat them.
    for place in range(1, 10):
        stream = NoiseStream(MATRIX, folder(tmp_path))
        last = numbers(stream, place, seeded)
    assert np.array_equal(last, whole[0])


def test_the_state_is_stored_before_noise_leaves_readable_by_its_owner_alone(tmp_path):
    NoiseStream(MATRIX, folder(tmp_path)).at(1, LIKE, secure, repeats=False)
    file = tmp_path / FILE
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700

    def full(name, content):
        raise OSError("no space")

    stream = NoiseStream(MATRIX, folder(tmp_path))
    object.__setattr__(stream._folder, "write", full)
    with pytest.raises(OSError, match="no space"):
        stream.at(2, LIKE, secure, repeats=False)


def test_noise_stored_for_a_round_is_never_used_for_another_attempt(tmp_path):
    first = numbers(NoiseStream(MATRIX, folder(tmp_path)), 1)
    again = NoiseStream(MATRIX, folder(tmp_path))
    assert again.has_unnoted(0)
    assert not again.has_unnoted(1)
    with pytest.raises(InvalidValue, match="of round 1: expected round 0"):
        numbers(again, 1)
    assert not np.isin(numbers(again, 2), first).any()


def test_a_state_that_could_not_be_stored_has_not_moved_the_stream(tmp_path):
    stream = NoiseStream(MATRIX, folder(tmp_path))
    numbers(stream, 1)
    (tmp_path / FILE).unlink()
    (tmp_path / FILE).mkdir()  # nothing can replace it
    for _ in range(2):
        with pytest.raises(OSError, match="cannot be written"):
            numbers(stream, 2)
    (tmp_path / FILE).rmdir()
    numbers(stream, 2)
    assert not NoiseStream(MATRIX, folder(tmp_path)).has_unnoted(2)


def test_no_round_gets_noise_of_a_missing_older_or_newer_state(tmp_path):
    stream = NoiseStream(MATRIX, folder(tmp_path))
    for place in (1, 2, 3):
        stream.at(place, LIKE, secure, repeats=False)
        shutil.copy(tmp_path / FILE, tmp_path / f"{place}")
    for number, copy in ((4, 1), (4, 2), (2, 3), (1, 3), (9, 3)):
        shutil.copy(tmp_path / f"{copy}", tmp_path / FILE)
        with pytest.raises(InvalidValue, match=f"of round {copy}: expected round {number - 1}"):
            NoiseStream(MATRIX, folder(tmp_path)).at(number, LIKE, secure, repeats=False)
    (tmp_path / FILE).unlink()
    with pytest.raises(InvalidValue, match="of round 0: expected round 3"):
        NoiseStream(MATRIX, folder(tmp_path)).at(4, LIKE, secure, repeats=False)


def test_a_key_encrypts_the_state_and_a_changed_one_is_refused(tmp_path):
    key = bytes(range(32))
    first = numbers(NoiseStream(MATRIX, folder(tmp_path, key)), 1)
    content = (tmp_path / FILE).read_bytes()
    assert first[:3].tobytes() not in content
    assert NoiseStream(MATRIX, folder(tmp_path, key)).has_unnoted(0)
    for other in (None, bytes(32)):
        with pytest.raises(Damaged, match="key"):
            NoiseStream(MATRIX, folder(tmp_path, other))
    (tmp_path / FILE).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(Damaged, match="altered"):
        NoiseStream(MATRIX, folder(tmp_path, key))


def test_the_stored_matrix_counts_and_not_the_one_found_today(tmp_path):
    NoiseStream(MATRIX, folder(tmp_path)).at(1, LIKE, secure, repeats=False)
    other = StrategyMatrix(bands=(0.41, 0.3), weights=(0.1,), decays=(0.8,))
    assert NoiseStream(other, folder(tmp_path)).matrix == MATRIX


DAILY = {
    ("buffers", 14, True),
    ("bands", 25, True),
}


@pytest.mark.parametrize(
    ("noise", "write", "after"),
    grid(itertools.product(NOISES, range(1, 68), (False, True)), DAILY.__contains__),
)
def test_a_killed_run_repeats_no_noise_and_understates_nothing(tmp_path, noise, write, after):
    """Killed at a durable write; ``tests.support.noise_witness`` does so at every one."""
    trial = Trial(tmp_path, noise)
    assert trial.play(write=write, after=after)
    assert not trial.play()
    assert faults_of(trial) == []
    assert len(trial.witnessed("released")) >= 6


@pytest.mark.parametrize(
    ("fault", "seen"),
    [
        ("earlier noise is forgotten", "does not go on"),
        ("the last noise is used again", "releases"),
    ],
)
def test_the_witness_sees_noise_that_is_lost_or_repeated(tmp_path, fault, seen):
    trial = Trial(tmp_path, "bands", fault=fault)
    assert trial.play(write=31)
    assert not trial.play()
    assert any(seen in each for each in faults_of(trial))

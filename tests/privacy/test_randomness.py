"""Secure generators have fresh keys; seeded generators repeat."""

import numpy as np
import pytest

from flower_ext.privacy import secure_generator, seeded_generator


def test_every_secure_generator_has_a_fresh_256_bit_key_and_twenty_rounds():
    states = [secure_generator().bit_generator.state["state"] for _ in range(20)]
    assert {state["rounds"] for state in states} == {20}
    keys = {state["keysetup"].tobytes() for state in states}
    assert len(keys) == 20
    assert all(len(key) == 32 for key in keys)
    # No word of the key is constant: all 256 bits come from the operating system.
    words = np.array([state["keysetup"] for state in states])
    assert all(len(set(column)) > 1 for column in words.T)


def test_seeded_generators_repeat_by_seed_and_path_and_differ_otherwise():
    def draw(*path):
        return seeded_generator(*path).random(4).tolist()

    assert draw(1, "cohort", 3) == draw(1, "cohort", 3)
    others = [draw(1, "cohort", 4), draw(2, "cohort", 3), draw(1, "noise", 3), draw(1, "cohort")]
    assert all(other != draw(1, "cohort", 3) for other in others)
    assert draw(1, 23) != draw(12, 3)  # different paths do not collide when joined


def test_negative_seeds_are_refused():
    with pytest.raises(ValueError, match="seed=-1"):
        seeded_generator(-1)

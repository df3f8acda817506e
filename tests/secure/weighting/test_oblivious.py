"""Oblivious transfer: the receiver opens its choice alone, and the sender learns nothing."""

import itertools

import numpy as np
import pytest
from nacl.bindings import (
    crypto_core_ed25519_add,
    crypto_core_ed25519_is_valid_point,
    crypto_core_ed25519_sub,
    crypto_scalarmult_ed25519_base_noclamp,
)
from scipy import stats

from flower_ext.secure.weighting.oblivious import (
    ORDER,
    POINT_BYTES,
    SEAL_BYTES,
    Receiver,
    Sender,
)

KEY, RUN = bytes(range(32)), b"a run"
SIZE = len(b"00:0")
FIELD = 2**255 - 19
D = -121665 * pow(121666, -1, FIELD) % FIELD  # of the curve -x² + y² = 1 + D x² y²


def texts(transfers, num_texts):
    return [[f"{at:02}:{place}".encode() for place in range(num_texts)] for at in range(transfers)]


def points(data):
    return [data[at : at + POINT_BYTES] for at in range(0, len(data), POINT_BYTES)]


# Curve arithmetic in the plainest form, to compare libsodium with it


def root(square):
    """Return a square root modulo the field's prime, or None."""
    x = pow(square, (FIELD + 3) // 8, FIELD)
    if x * x % FIELD != square % FIELD:
        x = x * pow(2, (FIELD - 1) // 4, FIELD) % FIELD
    return x if x * x % FIELD == square % FIELD else None


def decoded(data):
    number = int.from_bytes(data, "little")
    odd, y = number >> 255, number % 2**255
    x = root((y * y - 1) * pow(D * y * y + 1, -1, FIELD))
    return (x if x % 2 == odd else FIELD - x), y


def encoded(point):
    x, y = point
    return (y | (x % 2) << 255).to_bytes(POINT_BYTES, "little")


def added(one, two):
    """Return the sum of two points of the curve, by the law in affine coordinates."""
    (a, b), (c, d) = one, two
    product = D * a * b * c * d % FIELD
    x = (a * d + b * c) * pow(1 + product, -1, FIELD)
    y = (b * d + a * c) * pow(1 - product, -1, FIELD)
    return x % FIELD, y % FIELD


def times(scalar, point):
    """Return a multiple of a point, by doubling and adding."""
    total = (0, 1)
    for bit in bin(scalar)[2:]:
        total = added(total, total)
        if bit == "1":
            total = added(total, point)
    return total


def number(scalar):
    return int.from_bytes(scalar, "little")


BASE = decoded(crypto_scalarmult_ed25519_base_noclamp((1).to_bytes(32, "little")))


def test_the_group_has_the_prime_order_that_scalars_are_drawn_below():
    assert times(int(ORDER), BASE) == (0, 1)
    assert pow(2, int(ORDER) - 1, int(ORDER)) == 1
    assert BASE[1] == 4 * pow(5, -1, FIELD) % FIELD  # RFC 8032


def test_both_sides_compute_the_points_of_the_protocol():
    sender = Sender(RUN)
    receiver = Receiver(sender.public, KEY, run=RUN, transfers=2, num_texts=3)
    offered = decoded(sender.public)
    assert offered == times(number(sender._secret), BASE)
    for answer, scalar, choice in zip(
        points(receiver.answer), receiver._scalars, receiver.choices, strict=True
    ):
        expected = added(times(number(scalar), BASE), times(choice + 1, offered))
        assert answer == encoded(expected)


@pytest.mark.parametrize("num_texts", [2, 3, 7])
def test_the_receiver_gets_the_text_of_its_choice_in_every_transfer(num_texts):
    sender = Sender(RUN)
    receiver = Receiver(sender.public, KEY, run=RUN, transfers=12, num_texts=num_texts)
    sealed = sender.seal(receiver.answer, texts(12, num_texts))
    chosen = receiver.choices
    assert receiver.open(sealed, SIZE) == [
        f"{at:02}:{place}".encode() for at, place in enumerate(chosen)
    ]
    assert len(set(chosen)) > 1
    assert len(sealed) == 12 * num_texts * (SIZE + SEAL_BYTES)


def test_no_other_text_can_be_opened_with_what_the_receiver_has():
    sender = Sender(RUN)
    receiver = Receiver(sender.public, KEY, run=RUN, transfers=4, num_texts=3)
    sealed = sender.seal(receiver.answer, texts(4, 3))
    right = list(receiver.choices)
    for at, turn in itertools.product(range(4), (1, 2)):  # one transfer at another place
        receiver.choices = [*right]
        receiver.choices[at] = (right[at] + turn) % 3
        with pytest.raises(ValueError, match="expected texts that the sender encrypted"):
            receiver.open(sealed, SIZE)
    receiver.choices, step = right, SIZE + SEAL_BYTES
    for at, place in itertools.product(range(4), range(3)):
        chosen, other = (3 * at + right[at]) * step, (3 * ((at + 1) % 4) + place) * step
        moved = sealed[:chosen] + sealed[other : other + step] + sealed[chosen + step :]
        with pytest.raises(ValueError, match="expected texts that the sender encrypted"):
            receiver.open(moved, SIZE)  # the text of another transfer


def test_a_key_belongs_to_one_run_one_answer_and_one_place():
    sender = Sender(RUN)
    receiver = Receiver(sender.public, KEY, run=RUN, transfers=2, num_texts=2)
    sealed = sender.seal(receiver.answer, texts(2, 2))
    other = Receiver(sender.public, KEY, run=b"another run", transfers=2, num_texts=2)
    assert other.answer == receiver.answer
    with pytest.raises(ValueError, match="expected texts that the sender encrypted"):
        other.open(sealed, SIZE)
    moved = crypto_core_ed25519_add(points(receiver.answer)[0], sender.public)
    one, beside = (sender.keys(data, 1, 2)[0] for data in (receiver.answer[:POINT_BYTES], moved))
    # B + A at place 1 has the same point as B at place 0.
    assert len({one[:32], one[32:], beside[:32], beside[32:]}) == 4


def test_parties_with_one_key_are_one_receiver():
    sender = Sender(RUN)
    one, other = (Receiver(sender.public, KEY, run=RUN, transfers=6, num_texts=5) for _ in range(2))
    assert one.answer == other.answer
    assert one.open(sender.seal(other.answer, texts(6, 5)), SIZE) == other.open(
        sender.seal(one.answer, texts(6, 5)), SIZE
    )


def test_a_key_makes_other_choices_and_other_answers_for_every_offer():
    """Two offers answered with one choice and one scalar would reveal the choice."""
    receivers = [
        Receiver(Sender(RUN).public, KEY, run=RUN, transfers=40, num_texts=4) for _ in range(2)
    ]
    one, other = receivers
    assert not set(one._scalars) & set(other._scalars)
    assert one.choices != other.choices


def test_an_answer_does_not_depend_on_the_choice():
    """For any answer and any choice there is a scalar that gives it: B - (c + 1) A is in the group.

    The group is cyclic, so every point of prime order is a multiple of the base point.
    """
    sender = Sender(RUN)
    receiver = Receiver(sender.public, KEY, run=RUN, transfers=3, num_texts=4)
    for answer, scalar, choice in zip(
        points(receiver.answer), receiver._scalars, receiver.choices, strict=True
    ):
        explained = answer
        for guess in range(4):
            explained = crypto_core_ed25519_sub(explained, sender.public)
            assert crypto_core_ed25519_is_valid_point(explained)
            is_right = explained == crypto_scalarmult_ed25519_base_noclamp(scalar)
            assert is_right == (guess == choice)


def test_choices_are_uniform_to_whoever_lacks_the_key():
    receiver = Receiver(Sender(RUN).public, KEY, run=RUN, transfers=5000, num_texts=5)
    assert stats.chisquare(np.bincount(receiver.choices, minlength=5)).pvalue > 1e-6


def small_order():
    """Return the encodings of all eight points whose order divides eight."""
    y = 5
    while True:
        x = root((y * y - 1) * pow(D * y * y + 1, -1, FIELD))
        point = None if x is None else times(int(ORDER), (x, y))
        if point is not None and times(4, point) != (0, 1):
            return [encoded(times(factor, point)) for factor in range(8)]
        y += 1


SMALL = small_order()
VALID = decoded(Sender(RUN).public)
NOT_ON_CURVE = next(
    y for y in range(2, 100) if root((y * y - 1) * pow(D * y * y + 1, -1, FIELD)) is None
)
MALFORMED = {
    **{f"of small order, {at}": point for at, point in enumerate(SMALL)},  # the first: identity
    **{
        f"of order {order} l": encoded(added(VALID, decoded(SMALL[factor])))
        for order, factor in ((2, 4), (4, 2), (8, 1))
    },
    "not on the curve": NOT_ON_CURVE.to_bytes(POINT_BYTES, "little"),
    "the identity with a sign": (1 | 1 << 255).to_bytes(POINT_BYTES, "little"),
    "the identity above the prime": (FIELD + 1).to_bytes(POINT_BYTES, "little"),
    "zero above the prime": FIELD.to_bytes(POINT_BYTES, "little"),
    "only ones": b"\xff" * POINT_BYTES,
    **{f"y = p + {y}": (FIELD + y).to_bytes(POINT_BYTES, "little") for y in range(2, 19)},
}


def test_the_malformed_points_are_what_their_names_say():
    assert len(set(SMALL)) == 8
    assert SMALL[0] == encoded((0, 1))
    for order, factor in ((2, 4), (4, 2), (8, 1)):
        point = decoded(MALFORMED[f"of order {order} l"])
        assert times(int(ORDER) * order, point) == (0, 1)
        assert times(int(ORDER) * order // 2, point) != (0, 1)
        assert times(order, decoded(SMALL[factor])) == (0, 1)
    canonical = [y for y in range(2, 19) if root((y * y - 1) * pow(D * y * y + 1, -1, FIELD))]
    assert canonical  # some of y = p + 2, … are second names of points of the curve


@pytest.mark.parametrize("name", MALFORMED)
def test_bytes_that_are_no_point_of_prime_order_are_refused(name):
    sender, data = Sender(RUN), MALFORMED[name]
    with pytest.raises(ValueError, match="offer: expected points of the prime-order"):
        Receiver(data, KEY, run=RUN, transfers=1, num_texts=2)
    with pytest.raises(ValueError, match="answer: expected points of the prime-order"):
        sender.seal(data, texts(1, 2))
    with pytest.raises(ValueError, match="expected 1 points of 32 bytes"):
        sender.seal(data[1:], texts(1, 2))

import itertools

import gmpy2
import numpy as np
import pytest
from gmpy2 import mpz
from scipy import stats

from flower_ext.secure.weighting.oblivious import (
    ELEMENT_BYTES,
    ORDER,
    PRIME,
    SEAL_BYTES,
    Receiver,
    Sender,
)

KEY, RUN = bytes(range(32)), b"a run"


def texts(transfers, choices):
    return [[f"{at}:{place}".encode() for place in range(choices)] for at in range(transfers)]


def elements(data):
    starts = range(0, len(data), ELEMENT_BYTES)
    return [mpz.from_bytes(data[at : at + ELEMENT_BYTES], "big") for at in starts]


def test_the_group_is_that_of_squares_modulo_a_safe_prime_which_two_generates():
    assert PRIME.bit_length() == 3072
    assert gmpy2.is_prime(PRIME)
    assert gmpy2.is_prime(ORDER)
    assert gmpy2.legendre(2, PRIME) == 1
    assert hex(PRIME).endswith("43db5bfce0fd108e4b82d120a93ad2caffffffffffffffff")  # RFC 3526


@pytest.mark.parametrize("choices", [2, 3, 7])
def test_the_receiver_gets_the_text_of_its_choice_in_every_transfer(choices):
    sender = Sender(RUN)
    receiver = Receiver(sender.public, KEY, run=RUN, transfers=12, choices=choices)
    sealed = sender.seal(receiver.answer, texts(12, choices), workers=2)
    chosen = [int(choice) for choice in receiver._choices]
    assert receiver.open(sealed) == [f"{at}:{place}".encode() for at, place in enumerate(chosen)]
    assert len(set(chosen)) > 1
    assert len(sealed[0][0]) == len(b"0:0") + SEAL_BYTES


def test_no_other_text_can_be_opened_with_what_the_receiver_has():
    sender = Sender(RUN)
    receiver = Receiver(sender.public, KEY, run=RUN, transfers=4, choices=3)
    sealed = sender.seal(receiver.answer, texts(4, 3))
    right = list(receiver._choices)
    for turn in (1, 2):  # each transfer has a key of its own, at every other place
        receiver._choices = [(choice + turn) % 3 for choice in right]
        for at in range(4):
            alone = [list(of_one) for of_one in sealed]
            with pytest.raises(ValueError, match="expected those sealed for this answer"):
                receiver.open(alone[: at + 1])
    receiver._choices = right
    for at, place in itertools.product(range(4), range(3)):
        moved = [[*of_one] for of_one in sealed]
        moved[at][int(right[at])] = sealed[(at + 1) % 4][place]  # the text of another transfer
        with pytest.raises(ValueError, match="expected those sealed for this answer"):
            receiver.open(moved)


def test_a_key_belongs_to_one_run_one_answer_and_one_place():
    sender = Sender(RUN)
    receiver = Receiver(sender.public, KEY, run=RUN, transfers=2, choices=2)
    sealed = sender.seal(receiver.answer, texts(2, 2))
    other = Receiver(sender.public, KEY, run=b"another run", transfers=2, choices=2)
    assert other.answer == receiver.answer
    with pytest.raises(ValueError, match="expected those sealed for this answer"):
        other.open(sealed)
    (offered,) = elements(sender.public)
    moved = int(elements(receiver.answer)[0] * offered % PRIME).to_bytes(ELEMENT_BYTES, "big")
    one, beside = (sender.keys(data, [2])[0] for data in (receiver.answer[:ELEMENT_BYTES], moved))
    # B·A at place 1 has the same power of A as B at place 0.
    assert len({one[:32], one[32:], beside[:32], beside[32:]}) == 4


def test_parties_with_one_key_are_one_receiver():
    sender = Sender(RUN)
    one, other = (Receiver(sender.public, KEY, run=RUN, transfers=6, choices=5) for _ in range(2))
    assert one.answer == other.answer
    assert one.open(sender.seal(other.answer, texts(6, 5))) == other.open(
        sender.seal(one.answer, texts(6, 5))
    )


def test_a_key_makes_other_choices_and_other_answers_for_every_offer():
    """Two offers answered with one choice and one exponent would reveal the choice."""
    receivers = [
        Receiver(Sender(RUN).public, KEY, run=RUN, transfers=40, choices=4) for _ in range(2)
    ]
    one, other = receivers
    assert not set(one._exponents) & set(other._exponents)
    assert list(one._choices) != list(other._choices)


def test_an_answer_does_not_depend_on_the_choice():
    """For any answer and any choice there is an exponent that gives it: B / A^c is in the group."""
    sender = Sender(RUN)
    receiver = Receiver(sender.public, KEY, run=RUN, transfers=3, choices=4)
    (offered,) = elements(sender.public)
    for answer, exponent, choice in zip(
        elements(receiver.answer), receiver._exponents, receiver._choices, strict=True
    ):
        assert answer == gmpy2.powmod(2, exponent, PRIME) * offered**choice % PRIME
        for guess in range(4):
            explained = answer * gmpy2.invert(offered**guess, PRIME) % PRIME
            assert gmpy2.legendre(explained, PRIME) == 1


def test_choices_are_uniform_to_whoever_lacks_the_key():
    receiver = Receiver(Sender(RUN).public, KEY, run=RUN, transfers=5000, choices=5)
    counts = np.bincount([int(choice) for choice in receiver._choices], minlength=5)
    assert stats.chisquare(counts).pvalue > 1e-6


@pytest.mark.parametrize("wrong", [0, 1, PRIME - 1, PRIME, 5, PRIME - 4])
def test_what_is_not_in_the_group_is_refused(wrong):
    sender = Sender(RUN)
    data = int(wrong).to_bytes(ELEMENT_BYTES, "big")
    assert gmpy2.legendre(wrong, PRIME) != 1 or wrong in (1, PRIME - 1)
    with pytest.raises(ValueError, match="offer: expected squares"):
        Receiver(data, KEY, run=RUN, transfers=1, choices=2)
    with pytest.raises(ValueError, match="answer: expected squares"):
        sender.seal(data, texts(1, 2))
    with pytest.raises(ValueError, match="expected 1 group elements of 384 bytes"):
        sender.seal(data[1:], texts(1, 2))

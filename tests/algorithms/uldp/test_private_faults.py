"""Nothing that one party of private weighting sends ends a run or spoils a model unseen."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
from gmpy2 import mpz

from flower_ext.algorithms.uldp import UldpAvg
from flower_ext.federation import FederationNotReady, InProcessGrid
from flower_ext.federation.messages import records
from flower_ext.privacy import Ledger, PoissonSampling
from flower_ext.secure.weighting.paillier_server import PaillierServer
from tests.support.grids import grid as grid_of
from tests.support.private_faults import in_turn
from tests.support.private_silos import (
    EVERY,
    INSTALLED,
    METHOD,
    SMALL,
    Forgetful,
    difference,
    make,
    make_openly,
    name_of,
    start,
)
from tests.support.silos import SILOS, USERS

FEW = PoissonSampling(USERS, 0.4)

DRAWN = {"draw_choices": 5}


def kinds(path):
    return [entry["kind"] for entry in Ledger.read(path) if entry["kind"] != "reserve"]


def flipped(data, rng, _):
    changed = np.frombuffer(data, np.uint8).copy()
    for _ in range(rng.integers(1, 4)):
        changed[rng.integers(len(changed))] ^= 1 << int(rng.integers(8))
    return changed.tobytes()


def highest_number(data, rng, _):
    at = int(rng.integers(max(1, len(data) - 8)))
    return data[:at] + b"\xff" * 8 + data[at + 8 :]


def begun(head, first):
    """Return a mutation that puts ``first`` after the ``head`` bytes that name the message."""
    return lambda data, rng, _: data[:head] + first + data[head + len(first) :]


BYTES = {
    "bits": flipped,
    "too short": lambda data, rng, _: data[: int(rng.integers(len(data)))],
    "too long": lambda data, rng, _: data + rng.bytes(int(rng.integers(1, 9))),
    "2^64 - 1": highest_number,
    "zeros": lambda data, rng, _: bytes(len(data)),
    "ones": lambda data, rng, _: b"\xff" * len(data),
    "of another silo": lambda data, rng, grid: grid.of_another or data,
    "of before": lambda data, rng, grid: grid.of_before or data,
}


def of_curve(head):
    """Return mutations of a point of X25519 or Ed25519; one is the identity of Ed25519."""
    return {
        "one": begun(head, (1).to_bytes(32, "little")),
        "the prime": begun(head, (2**255 - 19).to_bytes(32, "little")),
    }


def modulus(grid):
    return grid.server._key.public.n


def with_number(data, number):
    """Put a number of 128 bytes in place of the first ciphertext of weights or a sum."""
    head = len(data) % 128  # kind and integers; ciphertexts have 128 bytes
    return data[:head] + int(number).to_bytes(128, "big") + data[head + 128 :]


OF_KEY = {
    "n": lambda data, rng, grid: with_number(data, modulus(grid)),
    "n²": lambda data, rng, grid: with_number(data, modulus(grid) ** 2),
    "n² - 1": lambda data, rng, grid: with_number(data, modulus(grid) ** 2 - 1),
    "p": lambda data, rng, grid: with_number(data, grid.server._key.p),
}
"""Mutations of numbers modulo n², of which the last three are no unit, minus one, and no unit."""

AT_THE_END = {
    "bits at the end": lambda data, rng, _: data[:-20] + flipped(data[-20:], rng, _),
    "zeros at the end": lambda data, rng, _: data[:-16] + bytes(16),
}
"""Mutations of the opening of a round, with which the lattice's weights end."""


def mutations_of(protocol, name, receives):
    """Return all mutations of one step's messages to or from a silo."""
    if name == "draw" or (name, receives) == ("begin", False):
        return BYTES | of_curve(8 if receives else 0)
    if name not in ("sum", "weights"):
        return BYTES
    return BYTES | (OF_KEY if protocol is SMALL else AT_THE_END if name == "weights" else {})


class Tampered(InProcessGrid):
    """Changes the array ``name`` of silo 1's messages, or of silo 0's where no other has one.

    ``how`` has one mutation for each message with such an array in turn, None for none. The silo
    sends these messages, or receives them if ``receives``.
    """

    def __init__(self, *args, name, how, receives=False, seed=0, **options):
        super().__init__(*args, **options)
        self.name, self.how, self.receives = name, iter(how), receives
        self.rng = np.random.default_rng(seed)
        self.of_before = self.of_another = None
        self.changed = 0

    def send_and_receive(self, messages, *, timeout=None):
        messages = list(messages)
        if self.receives:
            return super().send_and_receive(self._changed(messages), timeout=timeout)
        return self._changed(list(super().send_and_receive(messages, timeout=timeout)))

    def _holding(self, messages):
        for message in messages:
            node = message.metadata.dst_node_id if self.receives else message.metadata.src_node_id
            if message.has_error():
                continue
            for record, arrays in message.content.array_records.items():
                if self.name in arrays and arrays[self.name].numpy().size:
                    yield node, message, record

    def _changed(self, messages):
        held = {node: (message, record) for node, message, record in self._holding(messages)}
        if not held:
            return messages
        chosen = 1_001 if 1_001 in held else min(held)
        data = {
            node: records.to_arrays(message.content[record])[self.name].tobytes()
            for node, (message, record) in held.items()
        }
        others = [content for node, content in data.items() if node != chosen]
        self.of_another = others[-1] if others else None
        mutation = next(self.how, None)
        if mutation is not None:
            message, record = held[chosen]
            arrays = dict(records.to_arrays(message.content[record]))
            old = arrays[self.name]
            new = np.frombuffer(mutation(data[chosen], self.rng, self), np.uint8)
            if new.size == old.size:
                new = new.reshape(old.shape)
            self.changed += new.tobytes() != old.tobytes()
            content = type(message.content)(dict(message.content))  # others may share the old one
            content[record] = records.to_record({**arrays, self.name: new})
            message.content = content
        self.of_before = data[chosen]
        return messages


@pytest.fixture(autouse=True)
def _server_known(monkeypatch):
    """Tell mutations of the key's numbers which server the run has."""
    made = PaillierServer.__init__

    def noted(self, *args, **options):
        made(self, *args, **options)
        Tampered.server = self

    monkeypatch.setattr(PaillierServer, "__init__", noted)


def case_of(protocol, name, receives):
    return f"{name_of(protocol)}-{'to' if receives else 'from'}-{name}"


SET_UP = [
    pytest.param(protocol, name, receives, id=case_of(protocol, name, receives))
    for protocol in INSTALLED
    for receives in (False, True)
    for name in ("begin", "keys", "count")
]


def outcome_of(strategy, options):
    """Return how a run of one round ends, which is by no error but one."""
    try:
        grid, model = start(strategy, Tampered, rounds=1, **options)
    except FederationNotReady:
        return "refused"
    assert all(np.isfinite(part).all() for part in model.values())
    return "changed" if grid.changed else "the same"


@pytest.mark.parametrize(
    ("protocol", "name", "receives"),
    grid_of(SET_UP, lambda name: name in ("paillier-from-count", "lattice-from-keys")),
)
def test_any_odd_message_of_the_set_up_refuses_it_or_spoils_sums(
    protocol, name, receives, tmp_path
):
    """A silo that lies about counts is outside the model, but it can only end in these two ways."""
    outcomes = set()
    for seed, (kind, mutation) in enumerate(mutations_of(protocol, name, receives).items()):
        path = tmp_path / f"{seed}.jsonl"
        strategy = make(protocol=protocol, evaluate_every=0, ledger=Ledger(path))
        options = {"name": name, "how": [mutation], "receives": receives, "seed": seed}
        outcome = outcome_of(strategy, options)
        if outcome == "refused":
            assert strategy.participations.rounds == 0, kind
            assert not path.exists() or kinds(path) == [], kind
            outcomes.add("refused")
        else:
            outcomes.add((*kinds(path), outcome))
    assert "refused" in outcomes
    if (name, receives) == ("begin", False):
        assert outcomes <= {"refused", ("commit", "the same")}


ROUND = [
    pytest.param(
        protocol,
        name,
        receives,
        {} if name in ("sum", "weights") else DRAWN,
        id=case_of(protocol, name, receives),
    )
    for protocol in INSTALLED
    for name, receives in (
        ("sum", False),
        ("weights", True),
        ("draw", False),
        ("draw", True),
    )
]


@pytest.mark.parametrize(
    ("protocol", "name", "receives", "changes"),
    grid_of(ROUND, ("paillier-from-sum", "lattice-to-weights").__contains__),
)
def test_a_message_of_a_round_of_anything_discards_that_round_alone(
    protocol, name, receives, changes, tmp_path
):
    """The first round and the last are left alone, and count."""
    chosen = mutations_of(protocol, name, receives).values()
    how = [None, *chosen, None]
    sampling = {"sampling": FEW} if changes else {}
    strategy = make(
        protocol=replace(protocol, **changes),
        evaluate_every=0,
        ledger=Ledger(tmp_path / "ledger"),
        plan={"rounds": len(chosen) + 2},
        **sampling,
    )
    options = {"name": name, "how": how, "receives": receives}
    grid, model = start(strategy, Tampered, rounds=len(chosen) + 2, **options)
    done = kinds(tmp_path / "ledger")
    assert len(done) == len(chosen) + 2
    assert done[0] == done[-1] == "commit"
    if protocol is SMALL and name == "sum":
        assert done[1:-1].count("commit") == len(chosen) - grid.changed
    assert strategy.participations.rounds == len(chosen) + 2
    assert all(np.abs(part).max() < 1e3 for part in model.values())


@EVERY
def test_an_old_sum_under_a_new_round_number_discards_the_round(protocol, tmp_path, logged):
    class Replaying(InProcessGrid):
        earlier = None

        def send_and_receive(self, messages, *, timeout=None):
            replies = list(super().send_and_receive(messages, timeout=timeout))
            if len(replies) == SILOS and replies[1].metadata.message_type == f"train.{METHOD}":
                record = replies[1].content["update"]
                answer = records.to_arrays(record)["sum"]
                if replies[1].metadata.group_id == "2":
                    server = strategy.run.summation.server
                    current, before = (
                        server.sum_type.from_bytes(array.tobytes(), server.settings)
                        for array in (answer, self.earlier)
                    )
                    head = {name: n for name, n in vars(current).items() if isinstance(n, int)}
                    renumbered = records.to_bytes_array(replace(before, **head).to_bytes())
                    replies[1].content["update"] = records.to_record({"sum": renumbered})
                self.earlier = answer
            return replies

    strategy = make(protocol=protocol, ledger=Ledger(tmp_path / "ledger"), evaluate_every=0)
    start(strategy, Replaying)
    assert kinds(tmp_path / "ledger") == ["commit", "discard", "commit"]
    assert "round 2 discarded: the " in logged.text  # "sum is out of bounds", or its norm


@EVERY
def test_a_run_whose_first_three_sums_are_spoiled_ends_with_the_reason(protocol, tmp_path):
    ledger = Ledger(tmp_path / "ledger")
    strategy = make(protocol=protocol, plan={"rounds": 9}, ledger=ledger, evaluate_every=0)

    def spoil(data, rng, _):
        """Keep what a message of the lattice begins with, and make a number odd and large."""
        return data[:-60] + rng.bytes(30) + data[-30:]

    with pytest.raises(FederationNotReady, match="the first 3 sums were all spoiled"):
        start(strategy, Tampered, name="sum", how=[spoil] * 9, rounds=9)
    assert kinds(tmp_path / "ledger") == ["discard"] * 3
    assert strategy.participations.rounds == 3


def test_only_a_silo_that_repeats_the_key_of_another_is_named():

    def another(data, rng, grid):
        return grid.of_another

    with pytest.raises(FederationNotReady, match="silos 1 and 2 sent the same public key"):
        start(make(), Tampered, name="begin", how=[another])


def test_a_total_that_has_no_inverse_refuses_the_set_up(monkeypatch):
    added_up = PaillierServer._totals

    def divided(self, counts, modulus):  # no silo knows p: the server itself plays it
        n, size = self._key.public.n, self.settings.count_bytes
        rest = sum(mpz.from_bytes(counts[silo][:size], "big") for silo in (1, 2))
        first = int((self._key.p - rest) % n).to_bytes(size, "big")
        return added_up(self, {**counts, 0: first + counts[0][size:]}, modulus)

    monkeypatch.setattr(PaillierServer, "_totals", divided)
    with pytest.raises(FederationNotReady, match="has a common factor with the Paillier"):
        start(make())


@pytest.mark.parametrize(
    "changes", [{}, pytest.param(DRAWN, marks=pytest.mark.full)], ids=["all", "drawn"]
)
@in_turn("lost", [0, 1])
def test_where_a_silo_loses_its_keys_all_silos_set_up_anew(
    protocol, changes, lost, tmp_path, logged
):
    class Losing(Forgetful):
        def send_and_receive(self, messages, *, timeout=None):
            messages = list(messages)
            if messages and messages[0].metadata.group_id == "2":
                self.contexts[1_000 + lost].state.clear()
            return InProcessGrid.send_and_receive(self, messages, timeout=timeout)

    strategy = make(
        protocol=replace(protocol, **changes),
        ledger=Ledger(tmp_path / "ledger"),
        plan={"rounds": 4},
        **({"sampling": FEW} if changes else {}),
    )
    _, model = start(strategy, Losing, rounds=4)
    done = kinds(tmp_path / "ledger")
    assert done == ["commit", "discard", "commit", "commit"]
    assert f"silos [{lost}] have lost their keys" in logged.text
    assert strategy.participations.rounds == 4
    if not changes:

        @dataclass(frozen=True, kw_only=True)
        class Forgetting(UldpAvg):
            def step(self, model, released, state):
                if released.round == 2:
                    return model, state
                return super().step(model, released, state)

        plain = make_openly(Forgetting, plan={"rounds": 4})
        assert difference(model, start(plain, rounds=4)[1]) <= 4 * SMALL.precision

"""A real in-process grid that injects faults between clients and server, from a seed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from flwr.app import Message
from flwr.clientapp import ClientApp

from flower_ext.federation import InProcessGrid
from flower_ext.federation.messages import records
from tests.faults.malformed import EVALUATE, Mutation, copied, malformed


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Probabilities of faults for each reply to a training message.

    At most one of the first five happens to a reply; the others add further replies. ``flood`` is
    the number of additional malformed replies in every round.
    """

    dropped: float = 0.05
    late: float = 0.16
    malformed: float = 0.08
    raises: float = 0.05
    huge: float = 0.05
    duplicated: float = 0.25
    replayed: float = 0.25
    relabelled: float = 0.25
    stranger: float = 0.1
    flood: int = 0

    @property
    def exclusive(self) -> dict[str, float]:
        """Probabilities of the faults that happen to a reply itself."""
        names = ("dropped", "late", "malformed", "raises", "huge")
        return {name: getattr(self, name) for name in names}


NOTHING = Rates(
    dropped=0, late=0, malformed=0, raises=0, huge=0, duplicated=0, replayed=0, relabelled=0,
    stranger=0,
)  # fmt: skip


@dataclass
class Delivered:
    """The replies of one round that a correct server uses."""

    asked: int = 0
    counted: dict[int, Message] = field(default_factory=dict)
    """The replies to use, by partition."""


class FaultyGrid(InProcessGrid):
    """A grid that drops, delays, damages, duplicates, replays and forges replies.

    Its clients may also raise exceptions.

    Parameters
    ----------
    app, num_clients, run_config
        Arguments of `InProcessGrid`.
    rates : Rates
    mutations : Mapping[str, Mutation]
        Ways to damage a training reply.
    rng : numpy.random.Generator
        The only source of randomness of the grid.
    huge : Callable[[Message, Generator], None], optional
        Function that turns a reply into one of improbable size.
    """

    def __init__(
        self,
        app: ClientApp,
        num_clients: int,
        *,
        rates: Rates,
        mutations: Mapping[str, Mutation],
        rng: np.random.Generator,
        huge: Mutation | None = None,
        run_config: Mapping[str, bool | float | int | str] | None = None,
    ) -> None:
        super().__init__(app, num_clients, run_config)
        self.rates, self.mutations, self.rng, self.huge = rates, mutations, rng, huge
        self.faults: Counter[str] = Counter()
        self.wrong: Counter[str] = Counter()
        """Number of malformed messages by kind."""
        self.delivered = Delivered()
        self.scores: dict[int, Message] = {}
        """The scores of the last evaluation that a correct server uses, by partition."""
        self._late: list[Message] = []
        self._earlier: dict[int, list[Message]] = {}

    def taken(self) -> Delivered:
        """Return the deliveries since the last call."""
        delivered, self.delivered = self.delivered, Delivered()
        return delivered

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Send messages as `InProcessGrid` does, but inject faults into training replies."""
        messages = list(messages)
        kind = messages[0].metadata.message_type.partition(".")[0] if messages else ""
        if kind == "evaluate":
            return self._evaluated(super().send_and_receive(messages, timeout=timeout))
        if kind != "train":
            return super().send_and_receive(messages, timeout=timeout)
        fates = [self._fate() for _ in messages]
        asked = [
            _unreadable(message) if fate == "raises" else message
            for message, fate in zip(messages, fates, strict=True)
        ]
        replies = list(super().send_and_receive(asked, timeout=timeout))
        for message, sent in zip(messages, asked, strict=True):  # the server knows whom it asked
            message.metadata.__dict__.update(sent.metadata.__dict__)
        self.delivered.asked = len(messages)
        out, self._late = self._late, []
        self._count("late", len(out))
        fates = ["raises" if r.has_error() else f for r, f in zip(replies, fates, strict=True)]
        sound = [reply for reply in replies if not reply.has_error()]
        for _ in range(self.rates.flood if sound else 0):
            out.append(self._malformed(self._one_of(sound)))
        for reply, fate in zip(replies, fates, strict=True):
            out += self._around(reply, fate)
        return out

    def _evaluated(self, replies: Iterable[Message]) -> list[Message]:
        """Return scores, some lost, malformed or duplicated, after a flood of malformed ones."""
        replies, self.scores = list(replies), {}
        out = [self._malformed(self._one_of(replies), EVALUATE) for _ in range(self.rates.flood)]
        for reply in replies:
            fate = self._fate()
            if fate in ("dropped", "malformed"):
                self._count(fate, fate == "dropped")
                out += [self._malformed(reply, EVALUATE)] if fate == "malformed" else []
                continue
            self.scores[reply.metadata.src_node_id - 1_000] = reply
            out += [reply] * (1 + self._happens("duplicated"))
        return out

    def _around(self, reply: Message, fate: str) -> list[Message]:
        """Return a reply as it arrives, if it does, with the messages before and after it."""
        node, out = reply.metadata.src_node_id, []
        earlier = self._earlier.setdefault(node, [])
        if earlier and self._happens("replayed"):
            out.append(self._one_of(earlier))
        if earlier and self._happens("relabelled"):
            forged = copied(self._one_of(earlier))
            forged.metadata.__dict__["_group_id"] = reply.metadata.group_id
            out.append(forged)
        if fate == "late":
            self._late.append(reply)
        elif fate == "malformed":
            out.append(self._malformed(reply))
        elif fate in ("raises", "dropped"):
            self._count(fate)
            out += [reply] if fate == "raises" else []
        elif fate == "huge" and self.huge is not None:
            self._count(fate)
            changed = copied(reply)
            self.huge(changed, self.rng)
            out.append(changed)
        else:
            self.delivered.counted[node - 1_000] = reply
            out.append(reply)
            earlier[:] = [*earlier[-4:], reply]
            if self._happens("duplicated"):
                out.append(reply if self.rng.random() < 0.5 else copied(reply))
            if self._happens("stranger"):
                forged = copied(reply)
                forged.metadata.__dict__["_src_node_id"] = int(self.rng.integers(2**40, 2**41))
                out.append(forged)
        return out

    def _malformed(
        self, reply: Message, mutations: Mapping[str, Mutation] | None = None
    ) -> Message:
        what, changed = malformed(reply, self.rng, mutations or self.mutations)
        self._count("malformed")
        self.wrong[what] += 1
        return changed

    def _fate(self) -> str:
        at = self.rng.random()
        for name, rate in self.rates.exclusive.items():
            if at < rate:
                return name
            at -= rate
        return "fine"

    def _happens(self, name: str) -> bool:
        happens = bool(self.rng.random() < getattr(self.rates, name))
        self._count(name, happens)
        return happens

    def _count(self, name: str, number: int = 1) -> None:
        self.faults[name] += number

    def _one_of(self, messages: list[Message]) -> Message:
        return messages[self.rng.integers(len(messages))]


def _unreadable(message: Message) -> Message:
    """Return a request on which a real client raises."""
    changed = copied(message)
    del changed.content[records.ROUND]
    return changed


def times(factor: float) -> Callable[[Message, np.random.Generator], None]:
    """Return an otherwise well-formed reply with its whole update multiplied."""

    def change(message: Message, rng: np.random.Generator) -> None:
        sent: Any = message.content.array_records[records.UPDATE]
        arrays = {n: (a * factor).astype(a.dtype) for n, a in records.to_arrays(sent).items()}
        message.content[records.UPDATE] = records.to_record(arrays)

    return change

"""The dialogue of private weighting between parties of one process, and its processor time."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar
from unittest import mock

from flower_ext.secure import threads
from flower_ext.secure.weighting.agreement import Dialogue, ProtocolStep
from flower_ext.secure.weighting.silo_party import SiloParty

T = TypeVar("T")


@contextmanager
def big_integer_threads(count: int) -> Iterator[None]:
    """Let big-integer work take ``count`` threads, whatever the number of cores."""
    with mock.patch.object(threads, "cores", return_value=count):
        yield


def timed(work: Callable[..., T], *arguments: Any) -> tuple[T, float]:
    """Return the result of ``work`` and its processor seconds, of all threads."""
    started = time.process_time()
    result = work(*arguments)
    return result, time.process_time() - started


def converse(dialogue: Dialogue[T], ask: Callable[[ProtocolStep], Mapping[int, bytes]]) -> T:
    """Take all steps of a dialogue, and return its result."""
    try:
        step = next(dialogue)
        while True:
            step = dialogue.send(ask(step))
    except StopIteration as end:
        result: T = end.value
        return result


def answers(
    silos: Sequence[SiloParty], counts: Sequence[Sequence[int]], step: ProtocolStep
) -> dict[int, bytes]:
    """Return the answers of silos with these counts."""
    return {
        at: silos[at].answer(step.name, question, counts[at])
        for at, question in step.questions.items()
    }


def set_up(server: Any, silos: Sequence[SiloParty], counts: Any) -> None:
    """Set up a server and silos with these counts, of shape (silos, users)."""
    converse(server.set_up(), partial(answers, silos, counts.tolist()))


def open_round(server: Any, number: int) -> bytes:
    """Begin a round in which nobody is drawn, and return its weights."""
    weights: bytes = converse(server.begin_round(number, None), lambda step: {})
    return weights


def weigh(silo: Any, number: int, weights: bytes, updates: Any, noise: Any) -> bytes:
    """Return a silo's masked sum of a round."""
    opened = silo.open_sum(number, weights)
    opened.add(updates)
    masked: bytes = opened.finish(noise)
    return masked

"""Secret state from which the server continues the correlated noise of its rounds.

The state of training round t holds the noise of that round and what the next one needs. It is on
disk before the server asks any client of round t. A resumed run therefore remembers the noise of
every model that has left the server, and never draws that noise again:

======================================  =======================================================
the process ends                        the resumed run
======================================  =======================================================
before the state of round t is stored   draws its noise anew: the earlier numbers reached nobody
after that                              counts round t, also if no client was asked, and continues
                                        with round t + 1
======================================  =======================================================

Noise serves one attempt of one round at most, so a discarded round has used its noise, too. If the
state is of an earlier round than the checkpoint, or of more than one round later, the run does not
continue: the state or the checkpoints are an older copy, and the run would use noise twice. Under a
seed (``repeats``) nothing is stored, because the seed gives all numbers again.
"""

from __future__ import annotations

from collections.abc import Callable

from flower_ext.errors import InvalidValue
from flower_ext.federation.records import Arrays
from flower_ext.federation.state.folder import SECRETS, StateFolder
from flower_ext.federation.state.sealed import Packed, pack, unpack
from flower_ext.privacy import NoiseSource
from flower_ext.privacy.mechanisms.correlated_noise import Past, PreparedNoise, StrategyMatrix

FILE = f"{SECRETS}/noise"
_LATEST, _EARLIER, _BUFFER = "latest", "earlier.", "buffer."


class NoiseStream:
    """The noise of a run's rounds.

    Parameters
    ----------
    matrix : StrategyMatrix
        Matrix of a new run; a resumed run keeps the matrix with which it began.
    folder : StateFolder, optional
        Folder of the state; None to keep it in memory, or if a seed gives it again.

    Raises
    ------
    Damaged
        The stored state was altered, or is encrypted with another key.
    """

    def __init__(self, matrix: StrategyMatrix, folder: StateFolder | None) -> None:
        self.matrix, self._folder = matrix, folder
        self._past: Past | None = None
        self._number = 0
        if folder is not None and (content := folder.read(FILE)) is not None:
            self._restore(unpack(content))

    def has_unnoted(self, rounds: int) -> bool:
        """Return True if a process ended between storing a round's noise and noting the round.

        As a rule, no client was asked for that round then. But the note may also have been lost,
        with an older copy of the checkpoints, and a model with that noise may have left the server.
        The round therefore counts, with its cohort, and its noise stays unused.

        Parameters
        ----------
        rounds : int
            Number of training rounds that the run has noted.
        """
        return self._folder is not None and self._number == rounds + 1

    def at(
        self, number: int, like: Arrays, source: Callable[[int], NoiseSource], *, repeats: bool
    ) -> NoiseSource:
        """Return the noise of training round ``number``, after its state is stored durably.

        Parameters
        ----------
        like : Mapping[str, ndarray]
            Names and shapes of the noise's arrays.
        source : Callable[[int], NoiseSource]
            Returns the source of a round's fresh numbers.
        repeats : bool
            True if ``source`` gives the same numbers again when it is called again.

        Raises
        ------
        InvalidValue
            The state is of another round.
        OSError
            The state cannot be stored, so the server must not ask.
        """
        if repeats and self._number >= number:
            self._number, self._past = 0, None  # all numbers are drawn again
        while repeats and self._number < number - 1:
            self._advance(like, source)
        if self._number != number - 1:
            raise InvalidValue(
                f"the noise of the run is at round {self._number}, expected {number - 1}: "
                f"{FILE} in the run directory is missing, or one of {FILE} and the checkpoints is "
                "an older copy; begin a new run, because a round released again with different "
                "noise would reveal its updates"
            )
        self._advance(like, source)
        assert self._past is not None
        return PreparedNoise(self._past.latest, is_secure=source(number).is_secure)

    def _advance(self, like: Arrays, source: Callable[[int], NoiseSource]) -> None:
        past = self._drawn(like, source)
        self._store(self._number + 1, past)  # if this fails, the stream has not moved
        self._past, self._number = past, self._number + 1

    def _drawn(self, like: Arrays, source: Callable[[int], NoiseSource]) -> Past:
        """Return the noise of the next round."""
        return self.matrix.next(source(self._number + 1).gaussian(like, 1.0), self._past)

    def _store(self, number: int, past: Past) -> None:
        if self._folder is None:
            return
        groups = {
            _LATEST: past.latest,
            **{f"{_EARLIER}{n}": vector for n, vector in enumerate(past.earlier)},
            **{f"{_BUFFER}{n}": vector for n, vector in enumerate(past.buffers)},
        }
        self._folder.write(FILE, pack({"round": number, "matrix": vars(self.matrix)}, groups))

    def _restore(self, kept: Packed) -> None:
        def vectors(prefix: str) -> tuple[Arrays, ...]:
            return tuple(group for name, group in kept.arrays.items() if name.startswith(prefix))

        self._number = kept.values["round"]
        self.matrix = StrategyMatrix(**kept.values["matrix"])
        self._past = Past(
            latest=kept.arrays[_LATEST], earlier=vectors(_EARLIER), buffers=vectors(_BUFFER)
        )

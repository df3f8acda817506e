"""Secret state from which the server continues the correlated noise of its rounds.

With correlated noise, the noise of a round depends on the noise of earlier rounds. The state of
training round t holds the noise of round t, and all earlier noise that round t + 1 needs. The
server writes it to disk before it asks any client of round t. A resumed run therefore knows the
noise of every model that has left the server, and never draws that noise again:

======================================  =======================================================
the process ends                        the resumed run
======================================  =======================================================
before the state of round t is stored   draws new noise for round t: nobody saw the lost noise
after the state of round t is stored    counts round t, even if no client was asked, and continues
                                        with round t + 1
======================================  =======================================================

Noise is never used for a second round, or for a second attempt of the same round. The noise of a
discarded round is therefore lost. A run does not continue if its state is older than its
checkpoint, or more than one round newer: somebody then restored an old copy of one of the two, and
the run would use noise twice. Under a seed (``repeats``) no state is stored, because the seed gives
the same numbers again.
"""

from collections.abc import Callable

from flower_ext.errors import InvalidValue
from flower_ext.federation.messages.records import Arrays
from flower_ext.federation.storage.folder import (
    SECRETS,
    StateFolder,
    Stored,
    deserialised,
    serialised,
)
from flower_ext.privacy import NoiseSource
from flower_ext.privacy.mechanisms.correlated_noise import Past, PreparedNoise, StrategyMatrix

FILE = f"{SECRETS}/noise"
_LATEST, _EARLIER, _BUFFER = "latest", "earlier.", "buffer."
FreshNoise = Callable[[int], NoiseSource]
"""Returns the source of the fresh noise of a training round."""


class NoiseStream:
    """The noise of a run's rounds; the state is in ``folder``, or in memory if ``folder`` is None.

    ``matrix`` is the strategy matrix of a new run. A resumed run takes the matrix from the
    stored state.
    """

    def __init__(self, matrix: StrategyMatrix, folder: StateFolder | None) -> None:
        self.matrix, self._folder = matrix, folder
        self._past: Past | None = None
        self._training_round = 0
        if folder is not None and (content := folder.read(FILE)) is not None:
            self._restore(deserialised(content))

    def _restore(self, kept: Stored) -> None:
        self._training_round = kept.values["round"]
        self.matrix = StrategyMatrix(**kept.values["matrix"])
        earlier, buffers = (
            tuple(group for name, group in kept.arrays.items() if name.startswith(prefix))
            for prefix in (_EARLIER, _BUFFER)
        )
        self._past = Past(latest=kept.arrays[_LATEST], earlier=earlier, buffers=buffers)

    def has_unnoted(self, rounds: int) -> bool:
        """Return True if noise is stored for the round after the ``rounds`` that the run recorded.

        Usually, the process ended after it stored the noise, and before it asked a client. But
        somebody may also have restored an older ``begun.jsonl`` after a model with this noise left
        the server. The caller must therefore count the round for its cohort, and let no other round
        use its noise.
        """
        return self._folder is not None and self._training_round == rounds + 1

    def at(
        self, training_round: int, like: Arrays, source: FreshNoise, *, repeats: bool
    ) -> NoiseSource:
        """Write the state of a training round to disk, then return the round's noise.

        ``repeats`` means that the ``source`` of a repeated round gives the same numbers again.
        After an error, the server must not ask any client.
        """
        if repeats and self._training_round >= training_round:
            self._training_round, self._past = 0, None  # all numbers are drawn again
        while repeats and self._training_round < training_round - 1:
            self._advance(like, source)
        if self._training_round != training_round - 1:
            raise InvalidValue(
                f"the stored noise is the noise of round {self._training_round}: expected round "
                f"{training_round - 1}. {FILE} in the run directory is missing, or {FILE} or the "
                "checkpoints are an old copy. Begin a new run: a second release of the same round "
                "with other noise would reveal its updates"
            )
        self._advance(like, source)
        assert self._past is not None
        return PreparedNoise(self._past.latest, is_secure=source(training_round).is_secure)

    def _advance(self, like: Arrays, source: FreshNoise) -> None:
        """Draw the next round's noise, and store it and all noise that later rounds still need."""
        training_round, past = self._training_round + 1, self._drawn(like, source)
        if self._folder is not None:  # if writing fails, the stream has not moved
            groups = {
                _LATEST: past.latest,
                **{f"{_EARLIER}{n}": vector for n, vector in enumerate(past.earlier)},
                **{f"{_BUFFER}{n}": vector for n, vector in enumerate(past.buffers)},
            }
            values = {"round": training_round, "matrix": vars(self.matrix)}
            self._folder.write(FILE, serialised(values, groups))
        self._past, self._training_round = past, training_round

    def _drawn(self, like: Arrays, source: FreshNoise) -> Past:
        return self.matrix.next(source(self._training_round + 1).gaussian(like, 1.0), self._past)

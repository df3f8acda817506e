"""Callbacks: code of the user's own that follows a run while it goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from logging import getLogger

from flower_ext.runs.directory import RunDirectory

log = getLogger("flwr")


class Callback:
    """Follow a run on the server: override any of the three methods, which do nothing here.

    A callback sees what the run directory holds already, and nothing else. No update, no single
    upload and no un-noised sum ever reaches it, so it cannot change what is released. But the
    directory is for the server's user alone. Scores that clients report at evaluation are not
    noised, and no guarantee covers them; amplification by sampling rests on nobody knowing how
    large a cohort was. A callback that sends rows elsewhere shows both to whoever reads there.

    An exception in a callback is logged, the first time, and never ends the run. The run waits for
    each call to return.
    """

    def begin(self, run: RunDirectory) -> None:
        """Take note that a run begins, or goes on (``run.resumed``), before its first round.

        Parameters
        ----------
        run : RunDirectory
            Read its ``config``, ``path`` and ``id``. Do not write to it.
        """

    def round(self, run: RunDirectory, server_round: int, row: Mapping[str, float]) -> None:
        """Take note of one round's metrics, which are in ``metrics.jsonl``.

        A round may come twice. Within one start, the second row adds to the first. After an
        interruption, it replaces the first, because the round is done again.
        """

    def end(self, run: RunDirectory) -> None:
        """Take note that a run has ended, for whatever reason, after its report was written.

        Read ``run.facts["status"]``, ``run.guarantees()``, and the files in ``run.path``.
        """


class Callbacks:
    """Call several callbacks in their order, and keep their errors away from the run."""

    def __init__(self, callbacks: Iterable[Callback] = ()) -> None:
        self._callbacks = [*callbacks]
        self._failed: set[int] = set()

    def begin(self, run: RunDirectory) -> None:
        """Tell all that the run begins."""
        self._tell(lambda callback: callback.begin(run))

    def round(self, run: RunDirectory, server_round: int, row: Mapping[str, float]) -> None:
        """Tell all of a round; each gets a copy of the row."""
        self._tell(lambda callback: callback.round(run, server_round, dict(row)))

    def end(self, run: RunDirectory) -> None:
        """Tell all that the run has ended."""
        self._tell(lambda callback: callback.end(run))

    def _tell(self, call: Callable[[Callback], None]) -> None:
        for number, callback in enumerate(self._callbacks):
            try:
                call(callback)
            except Exception as error:
                if number not in self._failed:
                    log.warning(
                        "callback %s failed, and the run goes on without it where it fails: %s: %s",
                        type(callback).__name__,
                        type(error).__name__,
                        error,
                    )
                    log.debug("where the callback failed", exc_info=error)
                self._failed.add(number)

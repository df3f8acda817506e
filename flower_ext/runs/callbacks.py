"""Callbacks: user code that follows a run in progress."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from logging import getLogger

from flower_ext.runs.directory import RunDirectory

log = getLogger("flwr")


class Callback:
    """Follow a run on the server: override any of the three methods, which do nothing here.

    A callback sees what the run directory already holds, and nothing else. No update, no single
    upload and no un-noised sum ever reaches it, so it cannot change what is released.

    Beware: only the server's operator should read the directory. Scores that clients report at
    evaluation are not noised, and no guarantee covers them. Amplification by sampling assumes that
    nobody knows the size of a cohort. A callback that sends rows elsewhere reveals scores and
    cohort sizes to its readers.

    The first exception of a callback is logged; no exception ends the run. The run waits for each
    call to return.
    """

    def begin(self, run: RunDirectory) -> None:
        """Take note that a run begins, or is resumed (``run.resumed``), before its first round.

        Parameters
        ----------
        run : RunDirectory
            Read its ``config``, ``path`` and ``id``. Do not change its files.
        """

    def round(self, run: RunDirectory, server_round: int, row: Mapping[str, float]) -> None:
        """Take note of one round's metrics, which are in ``metrics.jsonl``.

        A round may be reported twice. Within one start, the second row adds to the first. After an
        interruption it replaces the first, because the round was repeated.
        """

    def end(self, run: RunDirectory) -> None:
        """Take note that a run has ended, for whatever reason, after its report was written.

        Read ``run.status``, ``run.guarantees()``, and the files in ``run.path``.
        """


class Callbacks:
    """Call several callbacks in order; their errors do not end the run."""

    def __init__(self, callbacks: Iterable[Callback] = ()) -> None:
        self._callbacks = [*callbacks]
        self._failed: set[int] = set()

    def tell(self, call: Callable[[Callback], None]) -> None:
        """Call each callback, as in ``tell(lambda callback: callback.begin(run))``."""
        for number, callback in enumerate(self._callbacks):
            try:
                call(callback)
            except Exception as error:
                if number not in self._failed:
                    log.warning(
                        "callback %s failed; the run continues, and its later errors are not "
                        "logged: %s: %s",
                        type(callback).__name__,
                        type(error).__name__,
                        error,
                    )
                    log.debug("traceback of the failed callback", exc_info=error)
                self._failed.add(number)

"""Callbacks: user code that follows a run in progress."""

from collections.abc import Callable, Iterable, Mapping
from logging import getLogger

from flower_ext.runs.directory import RunDirectory

log = getLogger("flwr")


class Callback:
    """Follow a run on the server: override any of the three methods, which do nothing here.

    A callback sees only data that the run directory already holds. It never gets an update, a
    single upload or a sum without noise, and it cannot change what is released.

    Beware: only the server's operator should read the directory. Scores that clients report at
    evaluation have no noise, and no guarantee covers them. Amplification by sampling assumes that
    nobody knows the size of a cohort. A callback that sends rows of metrics to other people reveals
    scores and cohort sizes to them.

    The server logs the first exception of a callback, and no exception ends the run. The run waits
    for each call to return.
    """

    def begin(self, run: RunDirectory) -> None:
        """Handle the start of a run, new or resumed (``run.resumed``), before any round.

        Read ``run.config``, ``run.path`` and ``run.id``; do not change the run's files.
        """

    def round(self, run: RunDirectory, server_round: int, row: Mapping[str, float]) -> None:
        """Handle a row of one round's metrics, which is already in ``metrics.jsonl``.

        A run may report two rows for a round. The second row adds metrics to the first, unless the
        run was resumed between them: then the round was repeated, and the second row replaces the
        first.
        """

    def end(self, run: RunDirectory) -> None:
        """Handle the end of a run, whatever the reason, after its report was written.

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
                        "callback %s failed; the run continues, and later errors of this callback "
                        "are not logged: %s: %s",
                        type(callback).__name__,
                        type(error).__name__,
                        error,
                    )
                    log.debug("traceback of the failed callback", exc_info=error)
                self._failed.add(number)

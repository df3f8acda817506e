"""Check an app in this process.

Call `check_app` in a fork, because an app may change or end its process.
"""

import gc
import os
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress

import torch
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

from flower_ext.federation.engines.run_app import load_app
from flower_ext_check import stand_in
from flower_ext_check.app_folder import AppFolder
from flower_ext_check.held_run import TRAIN
from flower_ext_check.instruments import Instruments
from flower_ext_check.judging import judge
from flower_ext_check.probes import Probes, RunName
from flower_ext_check.request import CheckRequest
from flower_ext_check.verdict import Verdict

_LONG = 5
"""If the first run takes more seconds than this, the user learns how long the check may take."""
_DATA_WORDS = ("flwr_datasets", "datasets", "Connection", "Timeout", "HTTPError", "FileNotFound")


class NotChecked(Exception):
    """The app could not be checked; the message says why and holds no data of the app."""


def check_app(request: CheckRequest) -> Verdict:
    """Check an app in this process; raise `NotChecked` if the app fails.

    Whatever the app prints goes to a file that only the user may read.
    """
    screen = os.dup(2)
    log = os.open(request.log, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
    sys.stdout = sys.stderr = os.fdopen(log, "w", buffering=1)
    os.dup2(log, 1)
    os.dup2(log, 2)
    work = request.log.with_name("work")
    work.mkdir()
    os.chdir(work)
    sys.dont_write_bytecode = True
    return _run_and_judge(request, tell=lambda text: os.write(screen, f"{text}\n".encode()))


def _run_and_judge(request: CheckRequest, *, tell: Callable[[str], object]) -> Verdict:
    """Run an app and return the verdict; raise `NotChecked` if the app fails.

    ``tell`` shows the user how long the check may take.
    """
    torch.set_num_threads(1)  # so that two equal runs compute equal numbers
    app, instruments = request.app, Instruments()
    instruments.install()
    if request.random_data:
        stand_in.install(request.columns)
    server, client = _loaded(app)
    instruments.limit_rounds(request.rounds)
    if any("opacus" in (app.path / path).read_text(encoding="utf-8") for path in app.modules):
        instruments.count_engines()
    import_slow_modules()
    gc.freeze()  # each run is a fork, whose garbage collector need not walk through all modules
    probes = Probes(app=app, server=server, client=client, request=request, instruments=instruments)
    start = time.monotonic()
    real = probes.run(RunName.REAL)
    if (taken := time.monotonic() - start) > _LONG:
        tell(f"The app's first run took {taken:.0f} s; up to 9 follow, most of them faster")
    if real is None:
        raise NotChecked(
            f"the app's first run crashed, or did not end in {request.seconds:g} s; if it needs "
            "longer, set --timeout"
        )
    if real.error or not real.successful_replies(TRAIN):
        reason = real.error or (real.client_errors or ["no client sent a training reply"])[0]
        raise NotChecked(f"the app failed: {reason}{_advice(reason)}")
    probes.run_all()
    return judge(probes)


def _loaded(app: AppFolder) -> tuple[ServerApp, ClientApp]:
    """Return the app's two sides; if the app does not load, name the line that failed."""
    try:
        return load_app(app.path)
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        # The name of a missing module or attribute comes from source, other texts from data.
        what = f" ({error})" if isinstance(error, ImportError | AttributeError) else ""
        advice = _advice(f"{type(error).__name__}{what}")
        raise NotChecked(f"the app does not load: {app.described(error)}{what}{advice}") from None


def import_slow_modules() -> None:
    """Import what apps import late: accounting, optimizers of torch, and Hugging Face's libraries.

    Each run is a fork of this process. Without this function each fork would import the modules
    anew, which takes longer than the run itself.
    """
    import dp_accounting  # noqa: F401
    import torch._dynamo  # noqa: F401

    if "flower_ext_pretrained.hugging_face" in sys.modules:
        with suppress(ImportError):  # the app's own error names the extra to install
            import peft  # noqa: F401
            import transformers  # noqa: F401


def _advice(reason: str) -> str:
    """Return the option of ``flower-ext check`` that may help; "" if none is known."""
    if any(word in reason for word in _DATA_WORDS):
        return "; if its data cannot be loaded here, add --data random"
    if "FederationNotReady" in reason:
        return "; if the app expects a different number of clients, give this number as --clients"
    return ""

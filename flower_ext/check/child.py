"""The process of a check: ``python -m flower_ext.check.child``.

It reads a request as JSON from its standard input and writes the answer as JSON to its standard
output. Whatever the app prints goes to a file that only the user may read.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

from flower_ext.check import stand_in
from flower_ext.check.app_folder import AppFolder
from flower_ext.check.held_run import TRAIN
from flower_ext.check.instruments import Instruments
from flower_ext.check.observe import Observed
from flower_ext.check.probes import REAL, ProbeRequest, Probes
from flower_ext.check.repair import repaired
from flower_ext.check.verdict import DELTA, Verdict, verdict
from flower_ext.federation.engines.run_app import load_app

_DATA_WORDS = ("flwr_datasets", "datasets", "Connection", "Timeout", "HTTPError", "FileNotFound")


class NotChecked(Exception):
    """The app could not be checked; the message says why and holds no data of the app."""


def main() -> None:
    """Check an app."""
    answer, screen = os.dup(sys.stdout.fileno()), os.dup(sys.stderr.fileno())
    request = ProbeRequest(**json.load(sys.stdin))
    log = os.open(request.log, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, sys.stdout.fileno())
    os.dup2(log, sys.stderr.fileno())
    try:
        result = checked(request, tell=lambda text: os.write(screen, f"{text}\n".encode()))
    except NotChecked as error:
        result = {"error": str(error)}
    with os.fdopen(answer, "w", encoding="utf-8") as pipe:
        json.dump(result, pipe)
    sys.stdout.flush()
    os._exit(0)  # threads of the app may never end


def checked(
    request: ProbeRequest, tell: Callable[[str], object] = lambda text: None
) -> dict[str, Any]:
    """Run an app and return the verdict.

    Raises
    ------
    NotChecked
        The app does not load, or no client trains.
    """
    torch.set_num_threads(1)  # so that two equal runs compute equal numbers
    app, instruments = AppFolder(Path(request.app)), Instruments()
    instruments.install()
    if request.random_data:
        columns = {name: (kind, tuple(shape)) for name, (kind, shape) in request.columns.items()}
        stand_in.install(columns)
    server, client = _loaded(app)
    instruments.limit_rounds(request.rounds)
    if any("opacus" in (app.path / path).read_text(encoding="utf-8") for path in app.modules):
        instruments.count_engines()
    import_slow_modules()
    with Path(request.log).open("rb") as log:
        probes = Probes(
            app=app,
            server=server,
            client=client,
            request=request,
            instruments=instruments,
            log=lambda: log.read().decode(errors="replace"),
            tell=tell,
        )
        real = probes.run(REAL, 1)
        if real is None:
            raise NotChecked(
                f"the app's first run did not end in {request.seconds:g} s, or crashed"
            )
        _refuse_failed(real)
        probes.run_all()
    opinion = verdict(probes)
    return {**opinion.to_dict(), "diff": _change(probes, opinion)}


def _loaded(app: AppFolder) -> tuple[ServerApp, ClientApp]:
    """Return the app's two sides; if the app does not load, name the line that failed."""
    try:
        return load_app(app.path)
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        raise NotChecked(f"the app does not load: {_described(error, app)}") from None


def import_slow_modules() -> None:
    """Import what apps import late: accounting, optimizers of torch, and Hugging Face's libraries.

    Each run is a fork of this process. Without this function each fork would import the modules
    anew, which takes longer than the run itself.
    """
    import dp_accounting  # noqa: F401
    import torch._dynamo  # noqa: F401

    if (hugging_face := sys.modules.get("flower_ext.training.models.hugging_face")) is not None:
        with suppress(Exception):  # the run says what is missing
            hugging_face.libraries("")


def _change(probes: Probes, opinion: Verdict) -> str:
    """Return a diff of the app's source that makes an ε provable.

    The text is "" if every ε that the app claims is provable and no finding refutes, or if the
    check finds no place to change.
    """
    if not (opinion.unproven or any(finding.refutes for finding in opinion.findings)):
        return ""
    claim = max(opinion.claims, key=lambda claim: claim["delta"], default=None)
    noise = probes.traits.noise
    return repaired(
        probes.app,
        epsilon=8.0 if claim is None else claim["epsilon"],
        delta=DELTA if claim is None or not claim["delta"] else claim["delta"],
        clipping_norm=1.0 if noise is None else noise.clipping_norm,
        clients=probes.request.clients,
    )


def _refuse_failed(real: Observed) -> None:
    """Refuse an app whose first run ended with an error, or in which no client trained."""
    if real.ended or not real.answers(TRAIN):
        reason = real.ended or (real.client_errors or ["no client sent a training reply"])[0]
        raise NotChecked(f"the app failed: {reason}{_advice(reason)}")


def _described(error: BaseException, app: AppFolder) -> str:
    """Return the type of an error and the app's line that raised it, without data of the app."""
    frames = traceback.extract_tb(error.__traceback__)
    inside = [f for f in frames if Path(f.filename).is_relative_to(app.path)]
    where = f" at {app.place(inside[-1].filename, inside[-1].lineno or 0)}" if inside else ""
    # The name of a missing module or attribute comes from source, not from data.
    what = f" ({error})" if isinstance(error, ImportError | AttributeError) else ""
    return f"{type(error).__name__}{where}{what}{_advice(f'{type(error).__name__}{what}')}"


def _advice(reason: str) -> str:
    """Return the option of ``flower-ext check`` that may help; "" if none is known."""
    if any(word in reason for word in _DATA_WORDS):
        return "; if its data cannot be loaded here, add --data random"
    if "FederationNotReady" in reason:
        return "; if the app expects another number of clients, give it as --clients"
    return ""


if __name__ == "__main__":
    main()

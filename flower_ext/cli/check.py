"""``flower-ext check``: a second opinion on the privacy of any Flower app."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Literal

import typer

from flower_ext.cli.preparing import checked_settings
from flower_ext.cli.screen import say
from flower_ext.errors import FlowerExtError
from flower_ext.privacy.guarantee import epsilon_text
from flower_ext.runs.settings import clients_setting, num_nodes

UNPROVEN = 3
"""Exit status if the app claims an ε that is not provable."""


class AppFailed(FlowerExtError):
    """The app could not be checked."""


def check(
    app: Annotated[Path, typer.Argument(metavar="APP", help="Folder or FAB of a Flower app.")],
    rounds: Annotated[int, typer.Option(min=1, help="Rounds to run.")] = 3,
    clients: Annotated[
        int | None, typer.Option(min=2, help="Clients to run; by default as the app says, or 10.")
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="Override a setting.")
    ] = None,
    data: Annotated[
        Literal["own", "random"],
        typer.Option(help="random: replace flwr_datasets by random rows."),
    ] = "own",
    column: Annotated[
        list[str] | None,
        typer.Option(help="A column of random rows, such as img=image:32x32x3 or label=int:10."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for CI.")] = False,
    log: Annotated[
        Path | None, typer.Option(help="Keep what the app prints in this file; it may hold data.")
    ] = None,
    timeout: Annotated[float, typer.Option(min=1, help="Longest seconds of one run.")] = 300,
) -> None:
    """Run a Flower app for a few rounds, watch its messages, and say which privacy is provable.

    The app's code runs with your rights. Exit status 3: the app claims an ε that is not provable.

    Example: flower-ext check my-app --data random
    """
    from flower_ext.check.app_folder import unpacked  # these import Flower, which takes seconds
    from flower_ext.check.stand_in import parsed_column

    columns = dict(parsed_column(text) for text in column or [])
    with TemporaryDirectory(prefix="flower-ext-check-") as scratch:
        folder = unpacked(app, Path(scratch).resolve())
        defaults, changes = checked_settings(folder.path, settings or [])
        config = {**defaults, **changes}
        if (setting := clients_setting(config)) is not None and clients is not None:
            config[setting] = clients
        if "clients-per-node" in config:
            config["clients-per-node"] = 1
        request = {
            "app": str(folder.path),
            "log": str(Path(scratch, "log")),
            "config": config,
            "clients": (num_nodes(config) if setting else None) or clients or 10,
            "rounds": rounds,
            "seconds": timeout,
            "random_data": data == "random",
            "columns": columns,
        }
        result = _result(request, Path(scratch))
        if log is not None:
            shutil.copyfile(Path(scratch, "log"), log)
            log.chmod(0o600)
    if "error" in result:
        raise AppFailed(result["error"] + ("" if log else "; --log FILE keeps what it printed"))
    if as_json:
        print(json.dumps(result, indent=1, ensure_ascii=False))
    else:
        _show(result)
    raise typer.Exit(UNPROVEN if result["unproven"] else 0)


def _result(request: dict[str, Any], scratch: Path) -> dict[str, Any]:
    work = scratch / "work"
    work.mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "flower_ext.check.child"],
        input=json.dumps(request),
        stdout=subprocess.PIPE,
        text=True,
        check=False,
        cwd=work,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "FLWR_TELEMETRY_ENABLED": "0",
            "PYTHONDONTWRITEBYTECODE": "1",
        },
    )
    if done.returncode != 0 or not done.stdout:
        raise AppFailed("the app ended the process in which the check ran it")
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def _show(result: dict[str, Any]) -> None:
    say(f"Ran {result['rounds']} of {result['planned_rounds']} rounds, {result['clients']} clients")
    say(f"Strategy: {' > '.join(result['strategies']) or 'none'}")
    say(f"Mods: {', '.join(result['mods']) or 'none'}")
    say(f"Protection: {result['protection']}")
    say("\nWhat leaves the clients")
    for message in result["messages"]:
        say(f"  {message}")
    say("\nProvable")
    units: dict[str, list[str]] = {}
    for entry in result["provable"]:
        text = entry["text"]
        if entry["epsilon"] is not None:
            text = f"ε = {epsilon_text(entry['epsilon'])} at δ = {entry['delta']:.3g}, {text}"
        units.setdefault(text, []).append(entry["unit"])
    for text, names in units.items():
        say(f"  {', '.join(names)}: {text}")
    if (second := result["measured"]) is not None:
        agrees = "agrees with" if second["agrees"] else "CONTRADICTS"
        say(f"  Measured: {second['text']}; it {agrees} the app's {second['stated']:.3g}")
    if result["unmeasured"]:
        say(f"  Not measured: {result['unmeasured']}")
    if (conditional := result["conditional"]) and any(f["refutes"] for f in result["findings"]):
        say(
            f"  With all findings below mended, this noise gives a client ε = "
            f"{conditional['one release']:.3g} for one release and {conditional['all rounds']:.3g} "
            f"for {result['planned_rounds']} rounds, at δ = {conditional['delta']:.3g}"
        )
    say("\nClaimed")
    for claim in result["claims"]:
        state = "provable" if claim["provable"] else "NOT PROVABLE"
        delta = f" at δ = {claim['delta']:.3g}" if claim["delta"] else ""
        say(f"  {claim['source']}: ε = {claim['epsilon']:.4g}{delta}: {state}")
    if not result["claims"]:
        say("  no ε")
    refuting = [finding for finding in result["findings"] if finding["refutes"]]
    if refuting:
        say("\nFindings")
    for finding in refuting:
        say(f"  [{finding['code']}] {finding['text']}")
    if refuting:
        say("\nChange first")
    for number, finding in enumerate(refuting[:3], 1):
        place = f"{finding['place']}: " if finding["place"] else ""
        say(f"  {number}. {place}{finding['remedy']} [{finding['code']}]")
    if result["diff"]:
        say("\nA change that makes ε provable (read it: it replaces strategy and mods)")
        say(result["diff"])
    if others := [finding for finding in result["findings"] if not finding["refutes"]]:
        say("\nNot covered by any ε")
        for finding in others:
            say(f"  [{finding['code']}] {finding['text']}")

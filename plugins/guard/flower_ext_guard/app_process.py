"""Run an app in a process of its own, with a deadline and a limit on the size of its answer."""

import json
import os
import selectors
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO

import psutil

import flower_ext
from flower_ext.errors import InvalidValue
from flower_ext_guard.child import CONFINEMENT
from flower_ext_guard.confinement import SCRATCH, UNSHARE
from flower_ext_guard.policy import NAMESPACES, NOT_ISOLATED, GuardPolicy

_CHILD = ("-m", "flower_ext_guard.child")
_SYSTEM = ("/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache", "/etc/localtime")
_PIECE = 1 << 20


def answer_of(request: bytes, policy: GuardPolicy, log: IO[bytes]) -> bytes | None:
    """Run an app on a request and return its answer; None if it failed in any way.

    ``log`` gets what the app prints, up to ``answer_limit`` bytes of it.
    """
    with (
        TemporaryDirectory(ignore_cleanup_errors=True) as home,
        os.fdopen(os.memfd_create("request"), "r+b") as stream,
    ):
        stream.write(request)
        stream.flush()
        stream.seek(0)
        process = subprocess.Popen(
            command(policy),
            stdin=stream,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=_environment(policy, home),
            cwd="/",
            start_new_session=True,
        )
        try:
            answer = _read(process, policy.answer_limit, policy.timeout, log)
            if answer is None:
                return None
            # The app closed the pipe; it may still run.
            return answer if process.wait(timeout=1.0) == 0 else None
        except subprocess.TimeoutExpired:
            return None
        finally:
            _end(process)


def command(policy: GuardPolicy) -> list[str]:
    """Return the command of an app's process."""
    if isinstance(policy.isolation, list):
        return [*policy.isolation, "python", *_CHILD]
    return [*(UNSHARE if policy.isolation == NAMESPACES else ()), sys.executable, *_CHILD]


def check_hidden(policy: GuardPolicy, name: str, file: Path) -> None:
    """Refuse a file of the guard if apps may read it; ``name`` describes it in the message."""
    for folder in _visible(policy):
        if file.resolve().is_relative_to(Path(folder).resolve()):
            raise InvalidValue(
                f"apps may read {folder!r}, which holds the guard's {name} {file}: move this "
                "file to another folder"
            )


def check_isolation(policy: GuardPolicy) -> None:
    """Refuse to start if isolated apps could read the guard's files, or if isolation fails here."""
    if missing := [path for path in policy.readable if not Path(path).exists()]:
        raise InvalidValue(
            f"`readable` names {missing[0]!r}, which does not exist: expected existing files or "
            "folders"
        )
    check_hidden(policy, "policy", policy.path)
    check_hidden(policy, "ledger", policy.ledger)
    if policy.sum is not None:
        check_hidden(policy, "identity key", Path(policy.sum.identity_key))
    if policy.isolation == NOT_ISOLATED:
        return
    probe = [*command(policy)[: -len(_CHILD)], "-c", _PROBE]
    environment = _environment(policy, SCRATCH)
    done = subprocess.run(
        probe, env=environment, cwd="/", capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise InvalidValue(
            f"isolation={policy.isolation!r} does not work here ({reason}): permit unprivileged "
            "user namespaces on this machine, or set isolation to the command of a container, or "
            'to "none"; with "none", apps can use the network and the files of this process'
        )


_PROBE = f"""
import json, os, socket
from flower_ext_guard.confinement import confine
if (confinement := os.environ.pop({CONFINEMENT!r}, None)) is not None:
    confine(*json.loads(confinement), answer_fd=os.dup(1))
names = [name for _, name in socket.if_nameindex()] if confinement is None else []
if set(names) > {{"lo"}}:
    raise SystemExit("the command gives the app network interfaces: " + ", ".join(names))
"""


def _environment(policy: GuardPolicy, home: str) -> dict[str, str]:
    if policy.isolation != NOT_ISOLATED:
        home = SCRATCH
    environment = {
        "PATH": os.environ.get("PATH", os.defpath),
        "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
        "PYTHONDONTWRITEBYTECODE": "1",
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "USER": "app",
        **dict.fromkeys(("HOME", "FLWR_HOME", "TMPDIR"), home),
        **policy.environment,
    }
    if policy.isolation == NAMESPACES:
        confinement = [_visible(policy), policy.scratch_limit]
        environment[CONFINEMENT] = json.dumps(confinement)
    return environment


def _visible(policy: GuardPolicy) -> list[str]:
    """Return the paths of this machine that isolated apps may read, without a container's image."""
    if policy.isolation != NAMESPACES:
        return policy.readable
    interpreter = Path(sys.executable).resolve().parents[1]
    # The first entry of sys.path is the folder of the command, or the current directory.
    folders = [Path(path) for path in sys.path[1:] if path and Path(path) != Path.cwd()]
    packages = [path for folder in folders for path in packages_in(folder)]
    ours = (Path(__file__).parent, Path(flower_ext.__file__).parent)
    python = (sys.prefix, sys.base_prefix, interpreter, *ours, *packages)
    return [*_SYSTEM, *map(str, python), *policy.readable]


def packages_in(folder: Path) -> list[Path]:
    """Return the paths that let an app import the packages in a folder."""
    if not any((folder / name).exists() for name in ("pyproject.toml", "setup.py", ".git")):
        return [folder]
    # The folder is a checkout with private files, such as .git/config: list its modules alone.
    modules = folder.glob("*.py")
    return [*modules, *(path.parent for path in folder.glob("*/__init__.py"))]


def _read(
    process: subprocess.Popen[bytes], limit: int, timeout: float, log: IO[bytes]
) -> bytes | None:
    """Return the standard output of a process, and copy its standard error to ``log``.

    Return None if the output exceeds ``limit`` bytes, or takes longer than ``timeout`` seconds.
    """
    assert process.stdout is not None
    assert process.stderr is not None
    deadline, answer, printed = time.monotonic() + timeout, bytearray(), 0
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        selector.register(process.stderr, selectors.EVENT_READ)
        while process.stdout in {key.fileobj for key in selector.get_map().values()}:
            if (left := deadline - time.monotonic()) <= 0:
                return None
            for key, _ in selector.select(left):
                piece = os.read(key.fd, _PIECE)
                if not piece:
                    selector.unregister(key.fileobj)
                elif key.fileobj is process.stdout:
                    answer += piece
                    if len(answer) > limit:
                        return None
                else:
                    log.write(piece[: max(0, limit - printed)])
                    printed += len(piece)
    return bytes(answer)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the process and all that it started, and close its pipes."""
    try:
        family = psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        family = []
    # The first process of a namespace takes all others of the namespace along.
    for member in family:
        with suppress(psutil.NoSuchProcess):
            member.kill()
    process.kill()
    process.wait()
    for stream in (process.stdout, process.stderr):
        if stream is not None:
            stream.close()

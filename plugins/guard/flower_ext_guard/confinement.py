"""Confine the process of an app with Linux namespaces: no network, and no files but those listed.

The process starts under ``unshare``, in namespaces of its own with all capabilities there. It then
makes a new root folder in memory and binds the listed folders into it, read-only. At last it gives
up three rights:

* every capability;
* sockets other than Unix sockets: some of them reach the host of a virtual machine, although the
  network namespace is empty;
* the system calls for the kernel's keys: to find a key, the kernel may start a program outside all
  namespaces, and this program may send a request to a name server.
"""

import ctypes
import os
import platform
import signal
import struct
from collections.abc import Sequence
from pathlib import Path

UNSHARE = (
    *("setpriv", "--pdeathsig", "KILL", "unshare", "--user", "--map-root-user", "--net"),
    *("--mount", "--ipc", "--uts", "--pid", "--fork", "--kill-child", "--"),
)
"""Beginning of a command that runs the rest of it in new namespaces.

The kernel kills the command when the process that started it ends.
"""

SCRATCH = "/tmp"
"""The folder, in memory, for an app's own files."""

_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")

_MS_RDONLY, _MS_NOSUID, _MS_NODEV = 1, 2, 4
_MS_BIND, _MS_REC, _MS_PRIVATE = 0x1000, 0x4000, 1 << 18
_MNT_DETACH, _AT_FDCWD, _AT_RECURSIVE, _RDONLY_NOSUID = 2, -100, 0x8000, 1 | 2
_MOUNT_SETATTR = 442  # one number on all architectures
_PDEATHSIG, _DUMPABLE, _SECCOMP, _CAPBSET_DROP, _NO_NEW_PRIVS = 1, 4, 22, 24, 38
_SECCOMP_FILTER, _LAST_CAPABILITY, _CAPABILITIES_3 = 2, 63, 0x20080522
_AF_UNIX, _EPERM = 1, 1
_ARCHITECTURES = {"x86_64": (0xC000003E, 41), "aarch64": (0xC00000B7, 198)}
"""By machine: number of the architecture for seccomp, and number of the system call ``socket``."""
_IO_URING_SETUP, _X32 = 425, 0x40000000
_KEYS = {"x86_64": 248, "aarch64": 217}
"""By machine: number of ``add_key``; ``request_key`` and ``keyctl`` have the next two numbers."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.prctl.argtypes = [ctypes.c_int, *[ctypes.c_ulong] * 4]


def confine(readable: Sequence[str], scratch_bytes: int, *, answer_fd: int) -> None:
    """Confine this process, which `UNSHARE` started, and everything that it will start.

    The paths in ``readable`` stay visible, read-only. The function returns in a new process. The
    calling process, which the app cannot reach, closes the descriptor ``answer_fd`` and waits for
    the new process.
    """
    Path("/proc/self/oom_score_adj").write_text("1000")  # the first to go if memory runs out
    # Otherwise the app could make a user namespace, in which it would have all capabilities again.
    Path("/proc/sys/user/max_user_namespaces").write_text("0")
    _mount(None, "/", None, _MS_REC | _MS_PRIVATE, None)
    root = Path(SCRATCH)
    sources = {path: os.open(path, os.O_PATH) for path in (*_roots(readable), *_DEVICES)}
    _mount("tmpfs", str(root), "tmpfs", _MS_NOSUID | _MS_NODEV, f"size={scratch_bytes},mode=755")
    for path, source in sources.items():
        inside = root / path.lstrip("/")
        # The new root may hide the path, but not the open file.
        origin = f"/proc/self/fd/{source}"
        if Path(origin).is_dir():
            inside.mkdir(parents=True, exist_ok=True)
        else:
            inside.parent.mkdir(parents=True, exist_ok=True)
            inside.touch()
        _mount(origin, str(inside), None, _MS_BIND | _MS_REC, None)
        _make_read_only(str(inside))
        os.close(source)
    for name in ("proc", "old", "dev/shm", SCRATCH.lstrip("/")):
        (root / name).mkdir(parents=True, exist_ok=True)
    # Where the guard runs as root, the app could otherwise write the kernel's settings, such as the
    # program that gets core files, although it has no capability.
    _mount("proc", str(root / "proc"), "proc", _MS_RDONLY | _MS_NOSUID | _MS_NODEV, None)
    _call("pivot_root", os.fsencode(root), os.fsencode(root / "old"))
    os.chdir("/")
    _call("umount2", b"/old", _MNT_DETACH)
    Path("/old").rmdir()
    _give_up_rights()
    if process := os.fork():
        _wait_for(process, answer_fd)
    _call("prctl", _PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)


def _roots(readable: Sequence[str]) -> list[str]:
    """Return the paths that exist, without paths inside another folder of the list."""
    paths: list[str] = []
    for path in sorted({*map(os.path.abspath, filter(os.path.exists, readable))}):  # keeps links
        if not any(path.startswith(f"{parent}/") for parent in paths):
            paths.append(path)
    return paths


def _wait_for(process: int, answer_fd: int) -> None:
    """Wait until the app's process ends, and then end this process with status 0 or 1.

    This process is the first of its namespace, so the kernel ends all processes of the namespace
    with it.
    """
    _call("prctl", _DUMPABLE, 0, 0, 0, 0)  # keeps the app from changing this process
    os.close(answer_fd)
    while True:
        ended, status = os.wait()  # also orphans of the app
        if ended == process:
            os._exit(0 if status == 0 else 1)


def _give_up_rights() -> None:
    for capability in range(_LAST_CAPABILITY + 1):
        _libc.prctl(_CAPBSET_DROP, capability, 0, 0, 0)  # fails for numbers without a capability
    _call("prctl", _NO_NEW_PRIVS, 1, 0, 0, 0)
    _call("capset", struct.pack("Ii", _CAPABILITIES_3, 0), bytes(24))
    architecture, socket = _ARCHITECTURES[platform.machine()]
    keys = _KEYS[platform.machine()]
    load, equal, at_least, end = 0x20, 0x15, 0x35, 0x06
    allow, refuse, kill = 0x7FFF0000, 0x00050000 | _EPERM, 0x80000000
    # Offsets count the instructions to skip; every refusal jumps to the same line near the end.
    program = [
        (load, 0, 0, 4),  # architecture
        (equal, 1, 0, architecture),
        (end, 0, 0, kill),
        (load, 0, 0, 0),  # number of the system call
        (at_least, 7, 0, _X32),
        (equal, 6, 0, _IO_URING_SETUP),
        (equal, 5, 0, keys),
        (equal, 4, 0, keys + 1),
        (equal, 3, 0, keys + 2),
        (equal, 0, 3, socket),
        (load, 0, 0, 16),  # family of the socket
        (equal, 1, 0, _AF_UNIX),
        (end, 0, 0, refuse),
        (end, 0, 0, allow),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in program))
    described = ctypes.create_string_buffer(
        struct.pack("HxxxxxxP", len(program), ctypes.addressof(code))
    )
    _call("prctl", _SECCOMP, _SECCOMP_FILTER, ctypes.addressof(described), 0, 0)


def _mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None) -> None:
    words = [None if word is None else word.encode() for word in (source, target, kind, data)]
    _call("mount", *words[:3], ctypes.c_ulong(flags), words[3])


def _make_read_only(path: str) -> None:
    attributes = struct.pack("QQQQ", _RDONLY_NOSUID, 0, 0, 0)
    size, number = ctypes.c_size_t(len(attributes)), ctypes.c_long(_MOUNT_SETATTR)
    _call("syscall", number, _AT_FDCWD, path.encode(), _AT_RECURSIVE, attributes, size)


def _call(name: str, *arguments: object) -> None:
    if getattr(_libc, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")

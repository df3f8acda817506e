"""The guard's own time for each message, beside the app's: a million numbers in one array.

    python -m benchmarks guard

The Runtime API is Flower's, on loopback. Apps run in namespaces, as at a site. The benchmark prints
wall time and, for the guard, also processor time, which a busy machine does not lengthen.
"""

import statistics
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO
from unittest import mock

import numpy as np

from benchmarks.command_line import command_parser
from flower_ext_guard import app_process, service
from flower_ext_guard.flower_runtime import Runtime
from flower_ext_guard.policy import GuardPolicy, read_policy
from plugins.guard.tests.guarding import write_policy
from plugins.guard.tests.supernode import LoopbackSuperNode


def main() -> None:
    """Print seconds a message: of the app's process, and of everything else that the guard does."""
    parser = command_parser(__doc__)
    parser.add_argument("--numbers", type=int, default=1_000_000)
    parser.add_argument("--messages", type=int, default=10)
    options = parser.parse_args()
    app_seconds: list[float] = []
    answer_of = app_process.answer_of

    def timed(request: bytes, policy: GuardPolicy, log: IO[bytes]) -> bytes | None:
        started = time.perf_counter()
        answer = answer_of(request, policy, log)
        app_seconds.append(time.perf_counter() - started)
        return answer

    arrays = {"vector": np.zeros(options.numbers, np.float32)}
    with (
        mock.patch.object(service, "answer_of", timed),
        TemporaryDirectory() as folder,
        LoopbackSuperNode() as node,
    ):
        larger_limit = "answer-limit = 1_000_000_000"
        path = write_policy(Path(folder, "guard.toml"), epsilon=1e6)
        path.write_text(path.read_text().replace("answer-limit = 4_000_000", larger_limit))
        runtime = Runtime(node.address, root_certificates=None, secret=b"secret")
        guard = service.Guard(read_policy(path), runtime, tell=lambda line: None)
        guard_seconds, processor = [], []
        for _ in range(options.messages + 1):
            node.send(arrays)
            started, spent = time.perf_counter(), time.thread_time()
            guard.serve_one()
            guard_seconds.append(time.perf_counter() - started - app_seconds[-1])
            processor.append(time.thread_time() - spent)
            assert node.replies()[0].has_content()
    for name, seconds in (
        ("app", app_seconds),
        ("guard", guard_seconds),
        ("guard's processor", processor),
    ):
        middle, most = statistics.median(seconds[1:]), max(seconds[1:])
        print(f"{name:18} median {middle:.3f} s, largest {most:.3f} s of {options.messages}")


if __name__ == "__main__":
    main()

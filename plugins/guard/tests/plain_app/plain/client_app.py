"""A client that trains honestly, or sends its secret out in a way that the server names."""

import ctypes
import errno
import os
import platform
import socket
import sys
import time
from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()
SECRET = 31337
MARK = f"secret-{SECRET}"


@app.train()
def train(message, context):
    vector = message.content["arrays"]["vector"].numpy()
    config = message.content["config"]
    content = RecordDict(
        {
            "arrays": ArrayRecord({"vector": Array((vector + 0.1).astype(np.float32))}),
            "metrics": MetricRecord({"num-examples": 10, "train_loss": 0.5}),
        }
    )
    for way in str(config["way"]).split():
        if way in WAYS:
            WAYS[way](content, context, config)
    return Message(content, reply_to=message)


@app.evaluate()
def evaluate(message, context):
    metrics = MetricRecord({"num-examples": 10, "eval_loss": 0.25})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)


def in_metrics(content, context, config):
    content["metrics"]["train_loss"] = float(SECRET)
    content["metrics"]["num-examples"] = SECRET
    content["metrics"][MARK] = 1


def in_array_names(content, context, config):
    content["arrays"][MARK] = content["arrays"]["vector"]


def in_record_names(content, context, config):
    content[MARK] = content.pop("arrays")


def in_another_record(content, context, config):
    content["more"] = ConfigRecord({"mark": MARK})
    content["arrays-2"] = ArrayRecord({"vector": Array(np.full(4, SECRET, np.float32))})


def in_an_error(content, context, config):
    raise ValueError(MARK)


def in_the_context(content, context, config):
    context.state["kept"] = ConfigRecord({"mark": MARK})
    context.node_config[MARK] = 1
    context.run_config[MARK] = 1


def in_shapes(content, context, config):
    content["arrays"]["vector"] = Array(np.zeros((4, 7), np.float32))


def in_types(content, context, config):
    content["arrays"]["vector"] = Array(np.full(4, SECRET, np.int64))


def in_log_lines(content, context, config):
    print(MARK)
    print(MARK, file=sys.stderr)


def in_a_huge_norm(content, context, config):
    content["arrays"]["vector"] = Array(np.full(4, 1e30, np.float32))


def in_nan(content, context, config):
    content["arrays"]["vector"] = Array(np.array([np.nan, np.inf, 0, 1], np.float32))


def through_a_crash(content, context, config):
    os._exit(7)


def by_waiting(content, context, config):
    time.sleep(600)


def through_a_socket(content, context, config):
    with socket.create_connection(("127.0.0.1", int(config["port"])), timeout=5) as link:
        link.sendall(MARK.encode())


def through_a_unix_socket(content, context, config):
    with socket.socket(socket.AF_UNIX) as link:
        link.connect(str(config["unix"]))
        link.sendall(MARK.encode())


def through_a_shared_file(content, context, config):
    """Leave a mark in every folder that another process might read."""
    for folder in (str(config["folder"]), "/tmp", "/var/tmp", "/dev/shm"):
        try:
            Path(folder, MARK).write_text(MARK)
        except OSError:
            continue


def in_megabytes(content, context, config):
    content["arrays"]["vector"] = Array(np.zeros(10_000_000, np.float32))


def in_garbage(content, context, config):
    """Write to every open descriptor, and end without an answer."""
    for descriptor in range(3, 64):
        try:
            os.write(descriptor, MARK.encode() * 100)
        except OSError:
            continue
    os._exit(0)


def by_a_process_that_stays(content, context, config):
    if os.fork() == 0:
        os.setsid()
        time.sleep(600)


def by_killing_the_guard(content, context, config):
    """Kill the processes above this one."""
    for process in (1, os.getppid()):
        try:
            os.kill(process, 9)
        except OSError:
            continue


def by_reading_secrets(content, context, config):
    secret = Path(str(config["hidden"])).read_bytes()
    content["arrays"]["vector"] = Array(np.full(4, 1e3 * len(secret), np.float32))


def by_writing_a_kernel_setting(content, context, config):
    path = Path("/proc/sys/kernel/core_pattern")
    path.write_text(path.read_text())


def by_asking_for_a_key(content, context, config):
    system_call(KEYRING, b"user", MARK.encode(), b"", 0)


def by_inner_namespaces(content, context, config):
    new_user_namespace = 0x10000000
    system_call(UNSHARE, new_user_namespace)


UNSHARE, KEYRING = (272, 249) if platform.machine() == "x86_64" else (97, 218)


def system_call(number, *arguments):
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(number, *arguments) < 0 and ctypes.get_errno() != errno.ENOKEY:
        raise OSError(ctypes.get_errno(), "the kernel refuses")


WAYS = {
    name.replace("_", "-"): function
    for name, function in list(globals().items())
    if name.startswith(("in_", "by_", "through_"))
}

"""Flower's private names: messages that were not sent, and clients that Ray simulates."""

import json
import subprocess
import sys

import pytest
from flwr.app import Message, RecordDict

from flower_ext.algorithms import DPFedAvg
from flower_ext.federation import InProcessGrid
from flower_ext.federation._flower_private import _RAY_CLIENT, is_simulated, replies
from flower_ext.federation.storage.folder import StateFolder
from flower_ext.federation.storage.memory import ClientVault
from tests.support.client_memory import context
from tests.support.other_ray import use_ray
from tests.support.worlds import task


class Lossy(InProcessGrid):
    """A grid of Flower's own kind, which fails to send some messages."""

    __module__ = "flwr.superlink.grid"

    def __init__(self, unsent) -> None:
        super().__init__(DPFedAvg.client_app(task()), num_clients=3)
        self.unsent = unsent
        self.looks = 0

    def push_messages(self, messages):
        ids = list(super().push_messages(messages))
        return [self.unsent, self.unsent, ids[2]]

    def pull_messages(self, reply_to_message_ids=None, *, message_ids=None):
        self.looks += 1
        return super().pull_messages(reply_to_message_ids, message_ids=message_ids)


@pytest.mark.parametrize("unsent", [None, ""], ids=["before 1.43", "since 1.43"])
def test_messages_that_were_not_sent_are_not_waited_for(unsent):
    grid = Lossy(unsent)
    nodes = sorted(grid.get_node_ids())
    requests = [
        Message(RecordDict(), dst_node_id=node, message_type="query.identity") for node in nodes
    ]
    (reply,) = replies(grid, requests, timeout=None)  # waiting for more would not end
    assert reply.metadata.src_node_id == nodes[2]
    assert grid.looks == 1


@pytest.mark.parametrize(
    ("actor_id", "function", "simulated"),
    [
        (None, None, False),
        ("1", "my_task.Loader.run", False),
        ("1", _RAY_CLIENT, True),
    ],
    ids=["driver", "actor of a task", "actor of Flower"],
)
def test_a_task_that_uses_ray_makes_no_simulation(
    monkeypatch, tmp_path, actor_id, function, simulated
):
    use_ray(monkeypatch, actor_id, function)
    node = context({"state-folder": str(tmp_path / "named by the server")})
    assert is_simulated(node) is simulated
    assert (StateFolder.of(node) is not None) is simulated
    assert ClientVault(node, "one").outlives_process is simulated
    assert ClientVault(context(), "one").outlives_process is simulated


ON_RAY = """
import json, ray
from flwr.simulation.ray_transport.ray_actor import ClientAppActor
from tests.support.client_memory import context

def answer(message, context):
    from flower_ext.federation._flower_private import is_simulated
    return is_simulated(context)

@ray.remote
class Loader:
    def run(self, context):
        return answer(None, context)

ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
node = context()
answers = [ClientAppActor.remote().run.remote(lambda: answer, None, "2", node)]
answers.append(Loader.remote().run.remote(node))
print(json.dumps([answer(None, node), *[ray.get(answers[0])[1], ray.get(answers[1])]]))
"""


@pytest.mark.full
@pytest.mark.engine
def test_on_ray_only_flowers_actors_simulate_clients():
    done = subprocess.run([sys.executable, "-c", ON_RAY], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    driver, client, loader = json.loads(done.stdout.splitlines()[-1])
    assert (driver, client, loader) == (False, True, False)
    assert "only available when the process is a worker" not in done.stderr

"""Silos on SuperNodes draw each round's users once, whatever the server asks and however they end.

The server of this test is hostile: before the training of round 2 it asks every silo again for the
users of round 1, under another model. Silo 1 was killed after it had drawn them and before it
answered, so that only its `state-folder` knows of it.
"""

import json
import shutil
import time

import pytest

from flower_ext.data.linkage import write_key
from tests.apps.test_consortium import CONSORTIUM, tables
from tests.faults.processes import WatchedRun, kill_node, return_node
from tests.support.deployment import Deployment

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1800)]

__all__ = ["tables"]
SILOS, KILLED = 3, 1
HOSTILE = '''

def _hostile(grid, folder):
    """Let a grid send the training messages of round 1 again before those of round 2."""
    import json
    import time

    push, asked = grid.push_messages, []

    def wait_for(condition):
        while not condition():
            time.sleep(0.2)

    def again(message):
        content = message.content.copy()
        model = {n: a + 1 for n, a in content["arrays"].to_torch_state_dict().items()}
        content["arrays"] = type(content["arrays"])(model)
        return grid.create_message(content, "train.uldp_avg", message.metadata.dst_node_id, "2")

    def hostile(messages):
        messages = list(messages)
        if messages[0].metadata.message_type.startswith("train"):
            if not asked:
                asked.extend(messages)
            else:
                replies, waiting = [], {*push([again(message) for message in asked])}
                def complete():
                    for reply in grid.pull_messages([*waiting]):
                        waiting.discard(reply.metadata.reply_to_message_id)
                        replies.append(reply)
                    return not waiting
                wait_for(complete)
                reasons = [r.error.reason if r.has_error() else "answered" for r in replies]
                (folder / "again.json").write_text(json.dumps(reasons))
        elif asked:
            wait_for((folder / "returned").exists)
        return push(messages)

    grid.push_messages = hostile


@app.main()
def hostile_main(grid, context):
    from pathlib import Path

    _hostile(grid, Path(context.run_config["data-folder"]))
    main(grid, context)
'''


def hostile_app(folder):
    shutil.copytree(CONSORTIUM.folder, folder)
    server = folder / "consortium_app" / "server_app.py"
    plain = server.read_text().replace("@app.main()\n", "")
    server.write_text(plain + HOSTILE)
    return folder


def newest_draw(folder):
    """Return the newest round that the silo with this state folder drew; 0 for none."""
    return max(
        (int.from_bytes(f.read_bytes()) for f in folder.glob("secrets/*.permanent")), default=0
    )


def test_a_silo_that_was_killed_after_its_draw_never_draws_that_round_again(tables, tmp_path):
    write_key(key := tmp_path / "study.key")
    asked = tmp_path / "server"
    asked.mkdir()
    settings = {
        **{name.replace("_", "-"): value for name, value in tables.items()},
        "num-silos": SILOS,
        "rounds": 2,
        "round-timeout": 200,
        "features": "age 0:100",
        "outcome": "sick",
        "evaluate-every": 0,
        "user-sampling-rate": 0.5,
        "draws": "silos",
        "colluding-share": 0.0,
        "local-epochs": 30,  # time to kill a silo that has drawn and not answered
        "data-folder": asked,
    }
    node = {
        "data-folder": tables["data_folder"],
        "draw-key": str(key),
        "state-folder": str(tmp_path / "state-{node}"),
    }
    app = hostile_app(tmp_path / "hostile")
    with Deployment(tmp_path / "flower", SILOS, node) as deployment:
        watched = WatchedRun(deployment, app, tmp_path / "run", settings)
        watched.wait_for_round(1)
        drawn = tmp_path / f"state-{KILLED}"
        while newest_draw(drawn) < 1:
            time.sleep(0.005)
        kill_node(deployment, KILLED)
        return_node(deployment, KILLED)
        (asked / "returned").touch()
        run = watched.finish(1500)
        assert watched.error is None, deployment.logs()
    reasons = json.loads((asked / "again.json").read_text())
    assert len(reasons) == SILOS
    assert all("silo drew those of round 1 before" in reason for reason in reasons), reasons
    assert run.status == "completed"
    assert [row.get("discarded", 0) for row in run.metrics()] == [1, 0]
    assert [newest_draw(tmp_path / f"state-{silo}") for silo in range(SILOS)] == [2] * SILOS
    spent = {one.view: one.epsilon for one in run.guarantees() if one.basis == "provable"}
    assert spent["sum-only"] == spent["released-models"]

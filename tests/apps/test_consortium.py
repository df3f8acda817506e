"""The consortium's app: one account over statistics and training, and tables of its silos' own."""

import csv
import json
import shutil
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from flower_ext.cli.main import app as cli
from flower_ext.federation import run_in_process
from flower_ext.privacy import Ledger
from flower_ext.privacy.study_composition import total_spent
from flower_ext.runs import RunDirectory
from flower_ext.runs.app_settings import SettingsFile
from flower_ext_consortium.linkage import write_key
from flower_ext_consortium.statistics.results import STANDARDISE, TABLE
from tests.faults.processes import WatchedRun, kill_node, return_node
from tests.support.apps import CONSORTIUM
from tests.support.client_memory import secret_in
from tests.support.deployment import CONNECTION, Deployment

PEOPLE = 300


def run(path, **changes):
    server, client = CONSORTIUM.parts()
    config = CONSORTIUM.small_config(run_directory=str(path), **changes)
    run_in_process(server, client, num_clients=config["num-silos"], run_config=config)
    return RunDirectory.open(path)


def released(directory):
    """Return the rows of the table of statistics by name."""
    with (directory.path / TABLE).open(encoding="utf-8", newline="") as stream:
        return {row["name"]: row for row in csv.DictReader(stream)}


@pytest.fixture
def tables(tmp_path):
    """Write silos as hospitals export them: with words, empty fields, and columns in any order."""
    rng = np.random.default_rng(1)
    folder = tmp_path / "data"
    folder.mkdir()
    columns = [("user", "age", "sick", "note"), ("age", "user", "note", "sick")]
    ages = rng.uniform(20, 80, PEOPLE)
    for silo in range(5):
        names = columns[silo % 2]
        with (folder / f"silo-{silo}.csv").open("w", encoding="utf-8", newline="") as stream:
            writer = csv.DictWriter(stream, names)
            writer.writeheader()
            for user in rng.integers(PEOPLE, size=200).tolist():
                age = "" if rng.random() < 0.05 else f"{ages[user]:.1f}"
                sick = int(ages[user] + rng.normal(0, 5) > 50)
                writer.writerow({"user": user, "age": age, "sick": sick, "note": "well, thanks"})
    return {"dataset": "files", "data_folder": str(folder), "num_users": PEOPLE}


def test_statistics_and_training_share_one_account_and_one_epsilon(tables, tmp_path):
    account = {"budget_ledger": str(tmp_path / "study.jsonl"), "population_delta": 1e-5}
    account |= {"population_epsilon": 8.0, **tables}
    first = run(
        tmp_path / "first",
        method="statistics",
        statistics="variance age 0:100",
        epsilon=4.0,
        **account,
    )
    rows = released(first)
    mean = float(rows["mean of age"]["estimate"])
    assert mean == pytest.approx(50, abs=6)
    file = SettingsFile.read(first.path / STANDARDISE)
    column, centre, deviation = file.shared["standardise"].split()
    assert (column, float(centre)) == ("age", pytest.approx(mean, rel=1e-4))
    assert 5 < float(deviation) < 40
    second = run(
        tmp_path / "second",
        rounds=4,
        epsilon=6.0,
        features="age 0:100",
        outcome="sick",
        standardise=file.shared["standardise"],
        evaluate_every=4,
        **account,
    )
    assert second.metrics()[-1]["accuracy_mean"] > 0.7
    total = total_spent(Ledger.read(tmp_path / "study.jsonl"), 1e-5)
    assert 6.0 < total < 8.0  # less than the sum, because Gaussians compose
    third = run(tmp_path / "third", method="statistics", statistics="count", epsilon=7.9, **account)
    assert third.status == "budget-exhausted"
    assert not (third.path / TABLE).exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"features": "age 0-100"}, "COLUMN LOWER:UPPER"),
        ({"features": ""}, "COLUMN LOWER:UPPER"),
        ({"standardise": "weight 1 2"}, "COLUMN CENTRE DEVIATION"),
        ({"standardise": "age 1 0"}, "DEVIATION above 0"),
        ({"num_users": 0}, "num-users=0"),
        ({"method": "statistics", "statistics": "mode age"}, "expected one of count, mean"),
    ],
)
def test_a_mistake_in_a_setting_ends_the_run_before_it_begins(tables, tmp_path, changes, message):
    settings = {**tables, "features": "age 0:100", "outcome": "sick", **changes}
    with pytest.raises(Exception, match=message):
        run(tmp_path / "run", **settings)


def test_a_column_that_no_silo_has_is_named_to_the_researcher(tables, tmp_path):
    with pytest.raises(Exception, match="no column weight"):
        run(tmp_path / "run", method="statistics", statistics="mean weight 0:200", **tables)
    assert not Ledger.read(tmp_path / "run" / "ledger.jsonl")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"features": "weight 0:200"}, "column weight is missing"),
        ({"features": "age 0:100", "data_folder": ""}, "data-folder=''"),
        ({"features": "age 0:100", "user_column": "id"}, "no column 'id'"),
    ],
)
def test_a_silo_without_its_file_or_column_ends_the_run_without_spend(
    tables, tmp_path, caplog, changes, message
):
    """The site's operator and the researcher read the reason, which depends on no record."""
    with pytest.raises(Exception, match=message):
        run(tmp_path / "run", **{"outcome": "sick", "rounds": 1, **tables, **changes})
    logged = [r.getMessage() for r in caplog.records if "takes no part" in r.getMessage()]
    assert any(message in line for line in logged)
    assert not Ledger.read(tmp_path / "run" / "ledger.jsonl")


@pytest.mark.report
def test_the_command_prints_the_statistics_and_where_their_page_is(
    forked_runs, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    words = ["stats", str(CONSORTIUM.folder), "mean age 20:90", "--epsilon", "1", "--in-process"]
    done = CliRunner().invoke(cli, words, env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    assert "mean of age" in done.output
    assert "statistics.html" in done.output
    refused = CliRunner().invoke(cli, [*words[:2], "mode age", *words[3:]])
    assert refused.exit_code == 2
    assert "expected one of count, mean" in " ".join(refused.output.replace("│", " ").split())


def test_silos_draw_the_users_of_a_training_by_the_key_of_link(tables, tmp_path):
    key = tmp_path / "study.key"
    write_key(key)
    settings = {"features": "age 0:100", "outcome": "sick", "rounds": 3, "evaluate_every": 0}
    settings |= {"user_sampling_rate": 0.2, "draws": "silos", "draw_key": str(key)}
    refused = {**tables, **settings, "draw_key": str(tmp_path / "none.key"), "colluding_share": 0.0}
    with pytest.raises(Exception, match="flower-ext link key"):
        run(tmp_path / "refused", **refused)
    with pytest.raises(Exception, match="colluding=0"):
        run(tmp_path / "colluding", **{**refused, "colluding_share": 0.2})
    made = run(tmp_path / "made", **{**refused, "draw_key": str(key)})
    assert "users" not in made.metrics()[-1]
    spent = {one.view: one.epsilon for one in made.guarantees() if one.basis == "provable"}
    assert spent["sum-only"] == spent["released-models"] == pytest.approx(1.0, abs=0.02)


def test_the_choice_of_test_people_depends_on_each_person_alone(tables):
    """Without one person, no record of another person changes its part."""
    table_of = CONSORTIUM.module("tables").table_of
    task = CONSORTIUM.module("task")
    config = CONSORTIUM.config(**tables, features="age 0:100", outcome="sick")
    settings = CONSORTIUM.module("settings").Settings.of(config)
    rows = {silo: task._tests(table_of(settings, silo), settings) for silo in range(5)}
    users = {silo: table_of(settings, silo).users for silo in range(5)}
    testing = set().union(*(users[s][rows[s]].tolist() for s in users))
    assert 0.1 < len(testing) / PEOPLE < 0.3
    assert all((np.isin(users[s], list(testing)) == rows[s]).all() for s in users)
    path = Path(tables["data_folder"]) / "silo-0.csv"
    header, *lines = path.read_text().splitlines()
    gone = lines[0].partition(",")[0]
    path.write_text("\n".join([header, *(row for row in lines if row.partition(",")[0] != gone)]))
    left = task._tests(table_of(settings, 0), settings)
    assert (left == rows[0][users[0] != int(gone)]).all()


STUDY = """
title = "A study"
app = {app}

[settings]
dataset = "files"
data-folder = "data"
num-silos = {silos}
num-users = 300
colluding-share = 0
features = "age 0:100"
outcome = "sick"
population-epsilon = 40
population-delta = 1e-5

[[stage]]
name = "statistics"
settings = {{ method = "statistics", statistics = "variance age 0:100", epsilon = 10 }}

[[stage]]
name = "training"
uses = ["statistics/standardise.toml"]
settings = {{ epsilon = 10, rounds = 6, evaluate-every = 0 }}

[[stage]]
name = "scores"
uses = ["training/model.toml"]
settings = {{ method = "scores", statistics = "mean correct 0:1", epsilon = 10 }}
"""


@pytest.mark.report
def test_a_study_goes_from_statistics_to_scores_and_keeps_what_is_complete(
    forked_runs, tables, tmp_path
):
    file = tmp_path / "small.toml"
    file.write_text(STUDY.format(app=json.dumps(str(CONSORTIUM.folder)), silos=5))
    words = ["study", str(file), "--runs", str(tmp_path)]
    done = CliRunner().invoke(cli, words, env={"COLUMNS": "300"})
    assert done.exit_code == 0, done.output
    stages = [tmp_path / "small" / name for name in ("statistics", "training", "scores")]
    assert float(released(RunDirectory.open(stages[2]))["mean of correct"]["estimate"]) > 0.7
    spent = total_spent(Ledger.read(tmp_path / "small" / "account.jsonl"), 1e-5)
    assert 15 < spent < 30
    ids = [RunDirectory.open(stage).id for stage in stages]
    again = CliRunner().invoke(cli, words, env={"COLUMNS": "300"})
    assert again.output.count("complete, kept") == 3
    assert [RunDirectory.open(stage).id for stage in stages] == ids
    file.write_text(file.read_text().replace("rounds = 6", "rounds = 7"))
    refused = CliRunner().invoke(cli, words, env={"COLUMNS": "300"})
    assert refused.exit_code == 2
    assert "rounds = 6, now 7" in " ".join(refused.output.replace("│", " ").split())


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_supernodes_take_part_in_a_study_with_separate_files(tables, tmp_path):
    """Three hospitals on a SuperLink with TLS; each SuperNode names its own data folder.

    A SuperNode starts a process for each of a round's four messages, so two rounds must do.
    """
    file = tmp_path / "small.toml"
    text = STUDY.format(app=json.dumps(str(CONSORTIUM.folder)), silos=3)
    text = text.replace("rounds = 6", "rounds = 2, server-learning-rate = 12")
    file.write_text(text.replace('data-folder = "data"\n', ""))
    config = {"data-folder": tables["data_folder"]}
    with Deployment(tmp_path / "three", nodes=3, node_config=config) as deployment:
        done = subprocess.run(
            ["flower-ext", "study", file, CONNECTION, "--runs", tmp_path],
            env=deployment.env,
            capture_output=True,
            text=True,
            timeout=1700,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = released(RunDirectory.open(tmp_path / "small" / "statistics"))
    assert float(rows["mean of age"]["estimate"]) == pytest.approx(50, abs=10)
    scores = released(RunDirectory.open(tmp_path / "small" / "scores"))
    assert float(scores["mean of correct"]["estimate"]) > 0.6


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
    """Copy the app into a folder, with a server that repeats the messages of round 1."""
    shutil.copytree(CONSORTIUM.folder, folder)
    server = folder / "consortium_app" / "server_app.py"
    plain = server.read_text().replace("@app.main()\n", "")
    server.write_text(plain + HOSTILE)
    return folder


def newest_draw(folder):
    """Return the newest round that the silo with this state folder drew; 0 for none."""
    return max(
        (int.from_bytes(secret_in(f)) for f in folder.glob("secrets/*.permanent")), default=0
    )


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_silo_killed_after_its_draw_never_draws_that_round_again(tables, tmp_path):
    """Before round 2, a hostile server asks again for the users of round 1, under another model.

    Only its state folder knows that silo 1 drew them: it was killed before it answered.
    """
    write_key(key := tmp_path / "study.key")
    server_marker = tmp_path / "server"
    server_marker.mkdir()
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
        "data-folder": server_marker,
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
        (server_marker / "returned").touch()
        run = watched.finish(1500)
        assert watched.error is None, deployment.logs()
    reasons = json.loads((server_marker / "again.json").read_text())
    assert len(reasons) == SILOS
    assert all("has drawn users up to round 1:" in reason for reason in reasons), reasons
    assert run.status == "completed"
    assert [row.get("discarded", 0) for row in run.metrics()] == [1, 0]
    assert [newest_draw(tmp_path / f"state-{silo}") for silo in range(SILOS)] == [2] * SILOS
    spent = {one.view: one.epsilon for one in run.guarantees() if one.basis == "provable"}
    assert spent["sum-only"] == spent["released-models"]

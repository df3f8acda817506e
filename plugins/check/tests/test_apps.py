"""Verdicts on small apps as people publish them, each found by hand."""

import json
import re
from pathlib import Path

import pytest
from check_apps import CLEAN, FAULTS, PUBLIC, write_app, write_secaggplus_app
from checking import codes, result_of

from flower_ext.runs.page import to_markdown

ALWAYS = {"nan", "zero", "absence"}
"""Faults of Flower's private strategies that no parameter repairs."""

EXPECTED = {
    "quickstart": {"no-mechanism", "metrics", "evaluation"},
    "server_side_fixed": ALWAYS,
    "server_side_unaccounted": ALWAYS | {"weights"},
    "client_side_fixed": ALWAYS,
    "client_side_without_mod": {"mod-missing", "unclipped", "movement", "nan", "absence"},
    "adaptive_server_side": ALWAYS | {"adaptive-clipping"},
    "adaptive_client_side": ALWAYS | {"adaptive-clipping"},
    "flip": {"sensitivity", "nan", "zero"},
    "central_with_counts": ALWAYS | {"metrics"},
    "opacus_in_the_client": {"no-mechanism", "engine-restarts"},
    "example_weights": ALWAYS | {"weights"},
}
SILENT = {"quickstart", "server_side_unaccounted", "client_side_fixed"}
"""Apps that claim no ε."""


def test_flips_settings_cost_two_hundred_million_an_upload(tmp_path):
    result = result_of(write_app(tmp_path / "flip", **PUBLIC["flip"]), tmp_path / "scratch")
    assert result["conditional"]["one release"] == pytest.approx(2.13e8, rel=0.01)
    assert EXPECTED["flip"] <= codes(result)
    assert result["unproven"]
    # The message is all that a diff needs: it takes the place of the mod and the strategy.
    assert "-app = ClientApp(mods=[LocalDpMod(1.0, 1e-4, 10.0, 1e-5)])" in result["diff"]
    report = to_markdown("check", "flower_ext_check", **result)
    assert "LocalDpMod: ε = 10 at δ = 1e-05: NOT PROVABLE" in report
    assert all(f"{finding['code']}: " in report for finding in result["findings"])


def test_a_sound_app_is_proved_and_its_claim_confirmed(tmp_path):
    result = result_of(write_app(tmp_path / "clean", **CLEAN), tmp_path / "scratch")
    assert codes(result) == set()
    assert not result["unproven"]
    client = [entry["epsilon"] for entry in result["provable"] if entry["unit"] == "client"]
    assert 7.9 < min(client) <= 8.0
    assert [entry["epsilon"] for entry in result["provable"] if entry["unit"] == "user"] == [None]
    second = result["measured"]
    assert second["agrees"]
    assert second["low"] < min(client) < second["high"]
    assert second["high"] < 2 * second["low"]


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name in PUBLIC if name != "flip"])
def test_a_public_app_gets_the_verdict_that_reading_it_gives(name, tmp_path):
    result = result_of(write_app(tmp_path / name, **PUBLIC[name]), tmp_path / "scratch")
    assert EXPECTED[name] <= codes(result)
    assert result["unproven"] == (name not in SILENT)
    assert all(entry["epsilon"] is None for entry in result["provable"])


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name == "raw_update_added" else pytest.mark.full)
        for name in FAULTS
    ],
)
def test_a_planted_fault_is_found_by_its_name(name, tmp_path):
    code, fault = FAULTS[name]
    result = result_of(write_app(tmp_path / name, **{**CLEAN, **fault}), tmp_path / "scratch")
    assert result["unproven"]
    assert not code or code in codes(result)
    places = [finding["place"] for finding in result["findings"] if finding["code"] == code]
    assert all(re.fullmatch(r"somebodys/(server|client)_app.py:\d+", place) for place in places)


@pytest.mark.full
@pytest.mark.parametrize("name", ["flip", "server_side_fixed", "quickstart"])
def test_the_diff_makes_the_app_provable(name, tmp_path):
    app = write_app(tmp_path / name, **PUBLIC[name])
    _apply(result_of(app, tmp_path / "before")["diff"], app)
    after = result_of(app, tmp_path / "after")
    assert codes(after) == set()
    assert any(entry["epsilon"] for entry in after["provable"])


def _apply(diff: str, folder: Path) -> None:
    """Apply a unified diff as ``patch -p1`` does, to files that are as the diff expects."""
    for part in diff.split("--- a/")[1:]:
        head, _, body = part.partition("\n")
        lines, new, position = (folder / head).read_text().splitlines(), [], 0
        for line in body.splitlines()[1:]:
            if line.startswith("@@"):
                start = int(line.split()[1][1:].split(",")[0]) - 1
                new += lines[position:start]
                position = start
            elif line.startswith("+"):
                new.append(line[1:])
            else:
                assert lines[position] == line[1:]
                new += [] if line.startswith("-") else [line[1:]]
                position += 1
        (folder / head).write_text("\n".join([*new, *lines[position:]]) + "\n")


def test_no_data_of_the_app_are_in_the_answer(tmp_path):
    secret = 987654321
    app = write_app(
        tmp_path / "leaking",
        train_code=f"""
            content["metrics"] = MetricRecord({{"num-examples": 1, f"user {{{secret}}}": {secret}}})
            print("record", {secret})
            if context.node_config["partition-id"] == 1:
                raise ValueError({secret})
        """,
    )
    result = result_of(app, tmp_path / "scratch")
    assert "metrics" in codes(result)
    assert str(secret) not in json.dumps({**result, "diff": ""})


def test_an_app_that_raises_is_named_with_its_line_only(tmp_path):
    app = write_app(tmp_path / "raising", train_code='raise KeyError("a private value")')
    error = result_of(app, tmp_path / "scratch")["error"]
    assert "KeyError at somebodys/client_app.py:" in error
    assert "private value" not in error


def test_a_round_of_flowers_secure_sum_is_observed_and_its_sum_exact(tmp_path):
    app = write_secaggplus_app(tmp_path / "secagg")
    result = result_of(app, tmp_path / "scratch", clients=4, rounds=1)
    codes_shown = {finding["code"] for finding in result["findings"]}
    assert {"secure-sum", "no-mechanism", "metrics"} <= codes_shown
    assert any(text.startswith("train: 16 replies (0 errors)") for text in result["messages"])
    assert result["rounds"] == 1
    assert all(entry["epsilon"] is None for entry in result["provable"])


def test_an_app_without_a_strategy_is_watched_and_proves_nothing(tmp_path):
    app = write_app(
        tmp_path / "loop",
        server_code="""
            class Looping:
                def start(self, grid, initial_arrays, num_rounds):
                    from flwr.app import Message, RecordDict
                    for _ in range(num_rounds):
                        content = RecordDict({"arrays": initial_arrays})
                        nodes = grid.get_node_ids()
                        list(grid.send_and_receive(
                            [Message(content, dst_node_id=n, message_type="train") for n in nodes]
                        ))
        """,
        strategy="strategy = Looping()",
    )
    result = result_of(app, tmp_path / "scratch")
    assert "unknown-loop" in codes(result)
    assert result["rounds"] == 2
    assert all(entry["epsilon"] is None for entry in result["provable"])

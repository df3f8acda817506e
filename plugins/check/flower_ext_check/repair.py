"""Write a change of an app's source that gives the app a provable ε.

The change replaces the app's strategy by this package's strategy with a privacy plan, and the
app's privacy mods by this package's mod. It suits apps that call ``strategy.start`` and whose
clients send one ArrayRecord.
"""

import ast
import difflib
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path

from flower_ext_check.app_folder import AppFolder, calls
from flower_ext_check.recognise import ADAPTIVE_MOD, FIXED_MOD, LOCAL_MOD, OUR_MOD, SECURE_SUM_MODS

_REPLACED = {FIXED_MOD, ADAPTIVE_MOD, LOCAL_MOD, OUR_MOD, *SECURE_SUM_MODS}
_CLIENT_IMPORT = "from flower_ext.federation import client_level_dp_mod\n"
_SERVER_IMPORTS = (
    "from flower_ext.algorithms import DPFedAvg\n"
    "from flower_ext.federation import FederatedStrategy\n"
    "from flower_ext.privacy import FullParticipation, ReleasePlan\n"
)


Edit = tuple[tuple[int, int], tuple[int, int], str]
"""A new text for the range of the source between two positions, which are (line, column).

Lines count from 1, and columns count UTF-8 bytes from 0, as in a syntax tree.
"""


def suggest_diff(
    app: AppFolder, *, epsilon: float, delta: float, clipping_norm: float, clients: int
) -> str:
    """Return a unified diff; it is empty if the function finds no place to change in the app."""
    server, client = app.component("serverapp"), app.component("clientapp")
    if server is None or client is None:
        return ""
    plan = (
        f"ReleasePlan.for_target(epsilon={epsilon:g}, delta={delta:g}, "
        f"clipping_norm={clipping_norm:g}, rounds={{rounds}}, "
        f"sampling=FullParticipation(population={clients}))"
    )
    on_server, on_client = [*_server_edits(app, server, plan)], [*_client_edits(app, client)]
    if not (on_server and on_client):
        return ""
    return _diff(app, server, on_server) + _diff(app, client, on_client)


def _server_edits(app: AppFolder, path: Path, plan: str) -> Iterator[Edit]:
    tree, source = app.modules[path], (app.path / path).read_text(encoding="utf-8")
    for call in calls(tree, "start"):
        if not isinstance(call.func, ast.Attribute) or not isinstance(call.func.value, ast.Name):
            continue
        name = call.func.value.id
        assignments = [
            node
            for node in ast.walk(tree)
            if isinstance(node, ast.Assign)
            and [getattr(target, "id", None) for target in node.targets] == [name]
        ]
        if not assignments:
            continue
        rounds = next((k.value for k in call.keywords if k.arg == "num_rounds"), None)
        text = "3" if rounds is None else ast.get_source_segment(source, rounds) or "3"
        last = max(assignments, key=lambda node: node.lineno)
        # Later assignments may wrap the first strategy, so only the last assignment stays.
        yield _import_edit(tree, _SERVER_IMPORTS, source)
        for node in assignments:
            indent = " " * node.col_offset
            kept = f"{name} = FederatedStrategy(DPFedAvg(), plan)"
            if node is last:
                yield _edit(node, f"plan = {plan.format(rounds=text)}\n{indent}{kept}")
            else:
                yield (node.lineno, 0), ((node.end_lineno or node.lineno) + 1, 0), ""
        return


def _client_edits(app: AppFolder, path: Path) -> Iterator[Edit]:
    tree, source = app.modules[path], (app.path / path).read_text(encoding="utf-8")
    apps = list(calls(tree, "ClientApp"))
    if not apps or any(apps[0].args) or any(k.arg == "client_fn" for k in apps[0].keywords):
        return
    yield _import_edit(tree, _CLIENT_IMPORT, source)
    mods = ["client_level_dp_mod()", *_mods(apps[0], source)]
    yield _edit(apps[0], f"ClientApp(mods=[{', '.join(mods)}])")
    for call in calls(tree, "train"):
        if any(keyword.arg == "mods" for keyword in call.keywords):
            keywords = ", ".join(
                f"{keyword.arg}=[{', '.join(_mods(call, source))}]"
                if keyword.arg == "mods"
                else str(ast.get_source_segment(source, keyword))
                for keyword in call.keywords
            )
            arguments = [str(ast.get_source_segment(source, part)) for part in call.args]
            function = ast.get_source_segment(source, call.func)
            yield _edit(call, f"{function}({', '.join([*arguments, keywords])})")


def _mods(call: ast.Call, source: str) -> list[str]:
    """Return the source of each mod in a call, except the mods that the change replaces."""
    lists = [k.value for k in call.keywords if k.arg == "mods" and isinstance(k.value, ast.List)]
    mods = [mod for listed in lists for mod in listed.elts]
    texts = [str(ast.get_source_segment(source, mod)) for mod in mods]
    return [text for text in texts if not any(name in text for name in _REPLACED)]


def _edit(node: ast.expr | ast.stmt, text: str) -> Edit:
    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    return (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset), text


def _import_edit(tree: ast.Module, text: str, source: str) -> Edit:
    new = [line for line in text.splitlines(keepends=True) if line not in source]
    imports = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    line = max((node.end_lineno or 0 for node in imports), default=0) + 1
    return (line, 0), (line, 0), "".join(new)


def _diff(app: AppFolder, path: Path, edits: list[Edit]) -> str:
    new = (app.path / path).read_bytes()
    old = new.decode().splitlines(keepends=True)
    starts = [0, *accumulate(len(line.encode()) for line in old)]
    for (first, left), (last, right), text in sorted(edits, reverse=True):
        new = new[: starts[first - 1] + left] + text.encode() + new[starts[last - 1] + right :]
    lines = new.decode().splitlines(keepends=True)
    return "".join(difflib.unified_diff(old, lines, f"a/{path.as_posix()}", f"b/{path.as_posix()}"))

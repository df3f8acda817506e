"""Run a check in a fork of the test's process, which has imported everything already."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from check_apps import CLIENTS

from flower_ext.files import read_toml
from flower_ext_check.app_folder import unpack
from flower_ext_check.checked import NotChecked, check_app, import_slow_modules
from flower_ext_check.forks import in_fork
from flower_ext_check.request import CheckRequest


def result_of(
    app: Path,
    scratch: Path,
    *,
    clients: int = CLIENTS,
    rounds: int = 2,
    settings: Mapping[str, Any] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Return the verdict of a check as JSON, or ``{"error": …}`` if the app cannot be checked."""
    scratch.mkdir(parents=True, exist_ok=True)
    folder = unpack(app, scratch.resolve())
    defaults = read_toml(folder.path / "pyproject.toml")["tool"]["flwr"]["app"].get("config", {})
    request = CheckRequest(
        app=folder,
        log=scratch / "log",
        config={**defaults, **(settings or {})},
        clients=clients,
        rounds=rounds,
        seconds=120,
        **{"random_data": False, "columns": {}, **options},
    )

    def answer() -> dict[str, Any]:
        packages = {path.parent.name for path in folder.path.glob("*/__init__.py")}
        for module in [*sys.modules]:  # earlier tests may have imported the same app unchanged
            if module.partition(".")[0] in packages:
                del sys.modules[module]
        try:
            return check_app(request).to_dict()
        except NotChecked as error:
            return {"error": str(error)}

    import_slow_modules()
    result = in_fork(answer, seconds=300)
    assert result is not None, request.log.read_text()[-3000:]
    return result


def codes(result: Mapping[str, Any]) -> set[str]:
    """Return the codes of the findings that refute."""
    return {finding["code"] for finding in result["findings"] if finding["refutes"]}

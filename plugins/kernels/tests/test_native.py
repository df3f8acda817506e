"""Machine code is compiled once, stored whole, and works without Numba and Python."""

import shutil
import stat
import sys

import pytest

from flower_ext_kernels import native, network
from tests.support.imported_anew import run_anew


@pytest.fixture
def compilations(monkeypatch):
    """Count compilations instead of compiling, which takes half a minute."""
    calls = []

    def compiled():
        calls.append(1)
        return b"object file"

    monkeypatch.setattr(native, "_compile", compiled)
    return calls


def test_it_is_compiled_once_and_stored(compilations, tmp_path):
    folders = [tmp_path / "new" / "folder", tmp_path]
    assert native.compile_and_store(folders) == native.compile_and_store(folders) == folders[0]
    assert native._read_stored(folders) == b"object file"
    assert len(compilations) == 1
    assert [path.suffix for path in folders[0].iterdir()] == [".o"]


def test_no_training_waits_for_it(compilations, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(native, "_folders", lambda: [tmp_path])
    monkeypatch.setattr(network, "_library", network._library.__wrapped__)
    monkeypatch.setattr(network.log, "propagate", True)
    with caplog.at_level("INFO", "flwr"):
        assert network._library() is None
    assert compilations == []
    assert "python -m flower_ext_kernels" in caplog.text


@pytest.mark.parametrize("damage", ["torn", "altered", "empty"])
def test_a_damaged_file_is_compiled_again(damage, compilations, tmp_path):
    native.compile_and_store([tmp_path])
    (stored,) = tmp_path.iterdir()
    content = stored.read_bytes()
    stored.write_bytes({"torn": content[:-1], "altered": content[:-1] + b"?", "empty": b""}[damage])
    with pytest.raises(native.NotCompiled, match="python -m flower_ext_kernels"):
        native._read_stored([tmp_path])
    native.compile_and_store([tmp_path])
    assert len(compilations) == 2
    assert stored.read_bytes() == content


def test_another_version_is_other_code(compilations, tmp_path, monkeypatch):
    native.compile_and_store([tmp_path])
    monkeypatch.setattr(native, "version", lambda package: "another")
    native.compile_and_store([tmp_path])
    assert len(compilations) == 2


def test_a_change_to_any_module_is_other_code(tmp_path, monkeypatch):
    """Modules that do not exist yet count, too."""
    modules = [tmp_path / path.name for path in native._HERE.glob("*.py")]
    for module in modules:
        shutil.copy(native._HERE / module.name, module)
    file_names = [native._file_name()]
    monkeypatch.setattr(native, "_HERE", tmp_path)
    assert native._file_name() == file_names[0]
    for module in [*modules, tmp_path / "new.py"]:
        with module.open("a") as file:
            file.write("# another line\n")
        file_names.append(native._file_name())
    assert len({*file_names}) == len(modules) + 2


def test_where_nothing_can_be_written_the_next_folder_is_taken(compilations, tmp_path):
    closed = tmp_path / "file"
    closed.write_text("")
    assert native.compile_and_store([closed, tmp_path / "open"]) == tmp_path / "open"
    with pytest.raises(native.NotCompiled, match="can be written"):
        native.compile_and_store([closed])


def test_without_a_home_folder_machine_code_is_stored_beside_the_package(monkeypatch):
    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(native.Path, "home", homeless)
    assert [folder.name for folder in native._folders()] == ["__pycache__"]


@pytest.mark.parametrize(
    ("script", "message"), [("echo no numba >&2; exit 1", "no numba"), (None, "No such file")]
)
def test_a_compiler_that_fails_is_an_error_with_its_reason(script, message, tmp_path, monkeypatch):
    program = tmp_path / "python"
    if script is not None:
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(stat.S_IRWXU)
    monkeypatch.setattr(sys, "executable", str(program))
    with pytest.raises(native.NotCompiled, match=message):
        native.compile_and_store([tmp_path / "nowhere"])


def test_code_that_needs_numba_is_refused():
    module = native.llvm.parse_assembly("declare void @NRT_Free(ptr)\ndeclare float @expf(float)")
    with pytest.raises(RuntimeError, match=r"\['NRT_Free'\]"):
        native._check_runs_without_numba(module)


def test_training_never_imports_numba():
    script = (
        "import sys; from flower_ext_kernels import network; "
        "assert network._library() is not None; print([m for m in sys.modules if m == 'numba'])"
    )
    done = run_anew(script, "flower_ext_kernels", "numba")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"

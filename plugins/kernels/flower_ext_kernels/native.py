"""Machine code of `sgd`: compiled once per machine, stored in a file, and run without Numba.

``python -m flower_ext_kernels`` compiles the code in a separate process, and stores it in a file.
No training waits for the code: without the file, models train as without the plug-in. LLVM's
linker, which llvmlite provides, loads the file. Compared with ``numba.cfunc(cache=True)`` (one run
on two shared cores), the code is as fast, and its results are equal to the last bit. A process that
trains loads it in 0.04 s and 49 MB instead of 0.5 to 0.9 s and 119 MB.
"""

import ctypes
import hashlib
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm
import numpy as np

import flower_ext
from flower_ext.errors import FlowerExtError
from flower_ext.files import read_cached, write_cached
from flower_ext_kernels.layer_table import SIGNATURES

_HERE = Path(__file__).parent
# Not imported: PyTorch, which that module needs, takes longer to load than this whole process.
_DROPOUT = Path(flower_ext.__file__).parent / "training/models/dropout.py"
_TIMEOUT = 600.0
"""Seconds that compiling may take, on a machine that is busy with other work."""
# The code allocates nothing, so functions that count references may be empty.
_NO_REFERENCE_COUNTING = """
define void @NRT_incref(ptr %p) alwaysinline { ret void }
define void @NRT_decref(ptr %p) alwaysinline { ret void }
"""


class Library:
    """The functions of `sgd` as machine code, which take arrays.

    While a function runs, other threads continue.

    Raises
    ------
    NotCompiled
        There is no stored code for this machine.
    """

    def __init__(self) -> None:
        self._engine = _load(_read_stored(_folders()))
        self.train = self._wrap("train")
        self.are_classes = self._wrap("are_classes")

    def _wrap(self, name: str) -> Callable[..., None]:
        """Return a compiled function that takes arrays.

        Its first two arguments in C are the addresses of a result and of an error.
        """
        address = self._engine.get_function_address(name)
        numbers = [ctypes.c_int64] * len(SIGNATURES[name])
        call = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, *numbers)(address)
        # Nothing reads the result or the error, so both may have the same address.
        ignored = ctypes.byref(ctypes.c_int64())

        def run(*arguments: int | np.ndarray) -> None:
            addresses = (a.ctypes.data if isinstance(a, np.ndarray) else a for a in arguments)
            call(ignored, ignored, *addresses)

        return run


def _load(code: bytes) -> Any:
    """Load an object file and resolve everything that it calls in this process."""
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), _target_machine())
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    return engine


class NotCompiled(FlowerExtError, RuntimeError):
    """The machine code was not compiled on this machine yet, or cannot be compiled or stored."""


def _read_stored(folders: Sequence[Path]) -> bytes:
    """Return the object file from the first of ``folders`` that has it complete."""
    name = _file_name()
    for folder in folders:
        if (code := read_cached(folder / name)) is not None:
            return code
    raise NotCompiled("run `python -m flower_ext_kernels` once per machine")


def compile_and_store(folders: Sequence[Path] | None = None) -> Path:
    """Compile the code unless a folder has it already, and return the folder that has it.

    Parameters
    ----------
    folders : Sequence[Path], optional
        Folders in which to look for the code. New code is stored in the first folder that can be
        written. By default these are the folders of `Library`.

    Raises
    ------
    NotCompiled
        The compiler fails, or no folder can be written.
    """
    folders, name = _folders() if folders is None else folders, _file_name()
    for folder in folders:
        if read_cached(folder / name) is not None:
            return folder
    code = _compile()
    for folder in folders:
        with suppress(OSError):
            write_cached(folder / name, code)
            return folder
    raise NotCompiled(
        f"none of the folders {[*map(str, folders)]} can be written: make one of them writable"
    )


def _file_name() -> str:
    return f"network-{_key()}.o"


def _key() -> str:
    """Return a digest of everything that the code depends on."""
    dependencies = [version("numba"), version("llvmlite"), llvm.get_host_cpu_name(), _features()]
    # Every module counts, even one that does not become machine code. A list of those that do could
    # miss a new one, and then its changes would leave outdated code in use.
    modules = [*sorted(_HERE.glob("*.py")), _DROPOUT]
    sources = [module.read_bytes() for module in modules]
    return hashlib.sha256(repr((dependencies, sources)).encode()).hexdigest()[:16]


def _folders() -> list[Path]:
    """Return the folders for the code: beside the package, and the user's cache."""
    folders = [_HERE / "__pycache__"]
    with suppress(RuntimeError):  # the user has no home
        cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        folders.append(Path(cache) / "flower_ext")
    return folders


def _compile() -> bytes:
    """Run `main` in a separate process, and return the object file that it writes."""
    roots = str(_HERE.parent), str(Path(flower_ext.__file__).parents[1])
    path = os.pathsep.join([*roots, os.environ.get("PYTHONPATH", "")])
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", __name__],
            # Numba must not optimize, because it would optimize a function again for each caller.
            env={**os.environ, "PYTHONPATH": path.rstrip(os.pathsep), "NUMBA_OPT": "0"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_TIMEOUT,
            check=True,
        )
    except subprocess.CalledProcessError as error:
        raise NotCompiled(error.stderr.decode(errors="replace").strip()[-300:]) from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotCompiled(f"the compiler did not finish: {error}") from error
    return done.stdout


def _features() -> str:
    """Return the processor's features, with 512-bit registers even where LLVM avoids them."""
    return f"{llvm.get_host_cpu_features().flatten()},-prefer-256-bit"


def _target_machine() -> Any:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    target = llvm.Target.from_default_triple()
    name, features = llvm.get_host_cpu_name(), _features()
    return target.create_target_machine(cpu=name, features=features, opt=3, jit=True)


def main() -> None:
    """Compile `sgd`, and write the object file to the standard output."""
    import numba

    settings: Any = numba.config
    settings.CPU_NAME, settings.CPU_FEATURES = llvm.get_host_cpu_name(), _features()
    from flower_ext_kernels import sgd

    linked = llvm.parse_assembly(_NO_REFERENCE_COUNTING)
    for name, arguments in SIGNATURES.items():
        compile_function = numba.cfunc(f"void({', '.join(arguments)})", error_model="numpy")
        compiled: Any = compile_function(getattr(sgd, name))
        module = llvm.parse_assembly(compiled.inspect_llvm())
        # Export the function itself, because its wrapper would report errors to Python.
        module.get_function(compiled.native_name).linkage = "internal"
        module.get_function(compiled.native_name.removeprefix("cfunc.")).name = name
        linked.triple, linked.data_layout = module.triple, module.data_layout
        linked.link_in(module)
    machine = _target_machine()
    builder = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=3))
    builder.getModulePassManager().run(linked, builder)
    _check_runs_without_numba(linked)
    code = machine.emit_object(linked)
    _load(code)  # a crash must happen in this process, not in one that trains
    sys.stdout.buffer.write(code)


def _check_runs_without_numba(module: Any) -> None:
    """Refuse code that calls functions that only Numba has."""
    needed = [f.name for f in module.functions if f.is_declaration and "." not in f.name]
    process = ctypes.CDLL(None)
    if missing := [name for name in needed if not hasattr(process, name)]:
        raise RuntimeError(f"the machine code needs {missing}, which only Numba has")


if __name__ == "__main__":
    main()

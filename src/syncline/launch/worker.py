"""What every worker runs in: it ends with its supervisor, and leaves its traceback where the supervisor finds it.

    python worker.py script.py args…      as `python script.py args…`
    python worker.py -m module args…      as `python -m module args…`
    python worker.py --exec command…      any command; it only ends with its supervisor

A new process starts it by its path, and it imports the standard library alone: a script that needs no torch waits for
none. The prefork process calls `main()` in a process that it has forked, where torch is imported already.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import importlib.abc
import importlib.machinery
import importlib.util
import io
import json
import os
import signal
import socket
import sys
import time
import traceback
import zipfile
from collections.abc import Iterator, Sequence
from types import CodeType, ModuleType

PR_SET_PDEATHSIG = 1
OUTPUT = 1.0
"""Seconds that mpiexec is given to pass on what was printed: MPICH's drops what it still holds when a rank aborts."""
RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
LOST_PEER = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "remote process exited")
"""What engines say in a plain RuntimeError when it was somebody else who failed."""


def main() -> None:
    """Run what the command line names, as Python itself would."""
    end_with_the_supervisor()
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE", "")
    arguments = sys.argv[1:]
    if arguments[0] == "--exec":
        _become(arguments[1:])
    end_with_mpiexec()
    ours = sys.modules["__main__"]  # held until the end: this code is in it
    try:
        module, code = load(arguments)
        sys.modules["__main__"] = module
        exec(code, module.__dict__)  # noqa: S102 - the user's own script is what we are here to run
    except SystemExit as end:
        if end.code not in (None, 0):
            _remember(end)
        raise
    except KeyboardInterrupt as error:
        _remember(error)
        sys.exit(130)
    except BaseException as error:
        _remember(error)
        report(error, error_file)
        sys.exit(1)
    del ours


def _remember(error: BaseException) -> None:
    """Let exit handlers know that an error ends the process, as Python does for one that nobody caught.

    One that ends well waits at its exit for the ranks that still need it. One that fails must not.
    """
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__


def end_with_the_supervisor() -> None:
    """Ask the kernel to end this process when its supervisor ends, however that comes about."""
    supervisor = os.environ.pop("SYNCLINE_SUPERVISOR", "")
    if supervisor and sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != int(supervisor):  # it ended before we asked
            os._exit(1)


def end_with_mpiexec() -> None:
    """Ask the same for the process manager that has started this rank, where a supervisor watches mpiexec.

    Only that one hears of mpiexec's end; a rank that computes does not hear of its.
    """
    if os.environ.pop("SYNCLINE_MPIEXEC", "") and sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == 1:
            os._exit(1)


def _become(command: Sequence[str]) -> None:
    try:
        os.execvp(command[0], list(command))
    except OSError as error:
        print(f"syncline: cannot run {command[0]!r}: {error.strerror}", file=sys.stderr)
        sys.exit(127 if isinstance(error, FileNotFoundError) else 126)


def load(arguments: Sequence[str]) -> tuple[ModuleType, CodeType]:
    """The module `__main__` and its code, with sys.argv and sys.path as Python would have set them.

    runpy puts the old `__main__` back when the code is done; threads and exit handlers would find the wrong one.
    """
    first = arguments[0]
    if first == "-m":
        _first_on_path(os.getcwd())
        sys.argv[:] = [first, *arguments[2:]]
        spec = _find_module(arguments[1])
        sys.argv[0] = spec.origin or arguments[1]
        return _load_spec(spec)
    sys.argv[:] = arguments
    if os.path.isdir(first) or zipfile.is_zipfile(first):
        _first_on_path(os.path.abspath(first))
        found = importlib.machinery.PathFinder.find_spec("__main__", [os.path.abspath(first)])
        if found is None:
            raise ImportError(f"{first!r} has no __main__.py")
        return _load_spec(found)
    _first_on_path(os.path.dirname(os.path.realpath(first)))
    path = os.path.abspath(first)
    with io.open_code(path) as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    module = ModuleType("__main__")
    module.__file__ = path
    module.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
    module.__dict__["__cached__"] = None
    return module, code


def _find_module(name: str) -> importlib.machinery.ModuleSpec:
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{name}.__main__")
    if spec is None:
        raise ImportError(f"No module named {name!r} that can be run", name=name)
    return spec


def _load_spec(spec: importlib.machinery.ModuleSpec) -> tuple[ModuleType, CodeType]:
    code = spec.loader.get_code(spec.name) if isinstance(spec.loader, importlib.abc.InspectLoader) else None
    if code is None:
        raise ImportError(f"{spec.name!r} has no Python code to run", name=spec.name)
    module = ModuleType("__main__")
    module.__spec__, module.__loader__, module.__package__ = spec, spec.loader, spec.parent
    module.__file__ = spec.origin
    module.__dict__["__cached__"] = spec.cached
    return module, code


def _first_on_path(folder: str) -> None:
    if not getattr(sys.flags, "safe_path", False):  # otherwise Python has put no folder first
        sys.path[0] = folder


def report(error: BaseException, error_file: str) -> None:
    """Leave the traceback for the supervisor, which shows it once; without one, show it here."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    text = "".join(traceback.format_exception(type(error), error, trace))
    # torch.distributed puts a hook there that only adds the rank, which the supervisor tells too.
    shown = sys.excepthook is not sys.__excepthook__ and not sys.excepthook.__module__.startswith("torch.")
    if shown:  # the script shows its errors in its own way
        sys.excepthook(type(error), error, trace)
    written = bool(error_file) and _write(error_file, error, text, shown)
    with _first_to_tell(text) as first:
        if not (written or shown):
            _show(text, first)
        _abort_mpi()


def _show(text: str, first: bool) -> None:
    """Print a traceback, or one line where another rank of this host prints the same one."""
    rank = _rank()
    if rank is None:
        told = text
    elif first:
        told = f"rank {rank} failed:\n{text}"
    else:
        told = f"rank {rank} failed with the same error: {text.rstrip().splitlines()[-1]}\n"
    print(told, end="", file=sys.stderr, flush=True)


@contextlib.contextmanager
def _first_to_tell(text: str) -> Iterator[bool]:
    """Whether no other process of the same parent prints this now: mpiexec's ranks often fail with the same error.

    An address in the kernel's abstract namespace decides. It is released when its process ends, whatever ends it.
    """
    name = f"\0syncline {os.getppid()} {hashlib.sha256(text.encode()).hexdigest()}"
    with socket.socket(socket.AF_UNIX) as claim:
        first = True
        if sys.platform == "linux":
            try:
                claim.bind(name)
            except OSError as error:
                first = error.errno != errno.EADDRINUSE
        yield first


def _write(error_file: str, error: BaseException, text: str, shown: bool) -> bool:
    summary = "".join(traceback.format_exception_only(type(error), error)).strip().splitlines()
    content = {
        "message": text,  # elastic reads these two
        "timestamp": int(time.time()),
        "time": time.time(),
        "summary": summary[-1] if summary else type(error).__name__,
        "consequence": is_consequence(error),
        "shown": shown,
    }
    # All ranks of a supervised mpiexec have one file. The first of them is told of; the others may be its victims.
    shared = "RANK" not in os.environ and os.environ.get("SYNCLINE_TRANSPORT") == "mpi"
    part = f"{error_file}.part{os.getpid()}"
    try:
        with open(part, "w") as file:
            json.dump({**content, "rank": int(_rank() or 0)} if shared else content, file)
        if shared:
            with contextlib.suppress(FileExistsError):
                os.link(part, error_file)
            os.unlink(part)
        else:
            os.replace(part, error_file)
    except OSError:
        return False
    return True


def _rank() -> str | None:
    return next((os.environ[name] for name in RANKS if name in os.environ), None)


def is_consequence(error: BaseException) -> bool:
    """Whether an error says that somebody else is gone.

    >>> is_consequence(ConnectionResetError()), is_consequence(ValueError("no such shape"))
    (True, False)
    """
    if isinstance(error, ConnectionError):
        return True
    if any(kind.__name__ in ("DistNetworkError", "DistBackendError") for kind in type(error).__mro__):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in LOST_PEER)


def _abort_mpi() -> None:
    """MPI waits at exit for ranks that wait for this one: an error has to end them all."""
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
        time.sleep(OUTPUT)
        mpi.COMM_WORLD.Abort(1)


if __name__ == "__main__":
    main()

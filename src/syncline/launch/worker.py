"""The program that runs in every rank: it runs the user's script, and reports its traceback to the supervisor.

    python worker.py script.py args…      as `python script.py args…`
    python worker.py -m module args…      as `python -m module args…`
    python worker.py --exec command…      any command; it ends with its supervisor

A new process runs this file by its path, and it imports only the standard library, because a script may not need torch.
The prefork process calls `main()` in a forked process, which has imported torch already.
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
MPIEXEC_OUTPUT_S = 1.0
"""Seconds that mpiexec has to forward the output: MPICH drops what it has buffered when a rank aborts."""
RANK_VARIABLES = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
LOST_PEER_MESSAGES = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "remote process exited")
"""Messages of a plain RuntimeError that backends raise when another process has failed."""


def main() -> None:
    """Run the script or module of the command line, as Python itself would."""
    end_with_supervisor()
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE", "")
    arguments = sys.argv[1:]
    if arguments[0] == "--exec":
        _become(arguments[1:])
    end_with_mpiexec()
    ours = sys.modules["__main__"]  # kept until the end: this code belongs to it
    try:
        module, code = load(arguments)
        sys.modules["__main__"] = module
        exec(code, module.__dict__)  # noqa: S102 - the user's own script is what we are here to run
    except SystemExit as end:
        if end.code not in (None, 0):
            _set_last_error(end)
        raise
    except KeyboardInterrupt as error:
        _set_last_error(error)
        sys.exit(130)
    except BaseException as error:
        _set_last_error(error)
        if _came_too_late(error):
            print(f"syncline: {error}", file=sys.stderr, flush=True)
            sys.exit(0)
        report(error, error_file)
        sys.exit(1)
    del ours


def _set_last_error(error: BaseException) -> None:
    """Record the error for exit handlers, as Python does for an uncaught exception.

    At exit, a rank waits for the ranks that still need it; a rank that has failed must not wait.
    """
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__


def _came_too_late(error: BaseException) -> bool:
    """Whether an elastic job has ended before this worker could join it: no failure."""
    return type(error).__name__ == "JobEndedError"


def end_with_supervisor() -> None:
    """Ask the kernel to end this process when its supervisor ends for any reason."""
    supervisor = os.environ.pop("SYNCLINE_SUPERVISOR", "")
    if supervisor and sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != int(supervisor):  # it ended before this call
            os._exit(1)


def end_with_mpiexec() -> None:
    """The same for the process manager of mpiexec that has started this rank, if a supervisor watches mpiexec.

    Only the process manager notices the end of mpiexec; a rank that computes does not.
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
    """Load the module `__main__` and its code, and set sys.argv and sys.path as Python would.

    runpy is not used: it restores the old `__main__` at the end, and threads and exit handlers would see the wrong one.
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
    if not getattr(sys.flags, "safe_path", False):  # with safe_path, Python adds no folder
        sys.path[0] = folder


def report(error: BaseException, error_file: str) -> None:
    """Write the traceback for the supervisor, which prints it once; without a supervisor, print it here."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    text = "".join(traceback.format_exception(type(error), error, trace))
    # torch.distributed sets a hook that only adds the rank, which the supervisor prints too.
    shown = sys.excepthook is not sys.__excepthook__ and not sys.excepthook.__module__.startswith("torch.")
    if shown:  # the script prints its errors itself
        sys.excepthook(type(error), error, trace)
    written = bool(error_file) and _write(error_file, error, text, shown)
    with _claim_message(text) as first:
        if not (written or shown):
            _show(text, first)
        _abort_mpi()


def _show(text: str, first: bool) -> None:
    """Print a traceback, or one line if another rank of this host prints the same traceback."""
    rank = _rank()
    if rank is None:
        message = text
    elif first:
        message = f"rank {rank} failed:\n{text}"
    else:
        message = f"rank {rank} failed with the same error: {text.rstrip().splitlines()[-1]}\n"
    print(message, end="", file=sys.stderr, flush=True)


@contextlib.contextmanager
def _claim_message(text: str) -> Iterator[bool]:
    """Whether this process is the first child of its parent that prints this: ranks often fail with the same error.

    An address in the kernel's abstract namespace decides. The kernel releases it when the process ends.
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
        "message": text,  # torch elastic reads these two
        "timestamp": int(time.time()),
        "time": time.time(),
        "summary": summary[-1] if summary else type(error).__name__,
        "consequence": is_consequence(error),
        "shown": shown,
    }
    # All ranks of a supervised mpiexec share one file. Only the first is reported; the others may be consequences.
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
    return next((os.environ[name] for name in RANK_VARIABLES if name in os.environ), None)


def is_consequence(error: BaseException) -> bool:
    """Whether an error says that another process is gone.

    >>> is_consequence(ConnectionResetError()), is_consequence(ValueError("no such shape"))
    (True, False)
    """
    if isinstance(error, ConnectionError):
        return True
    if any(kind.__name__ in ("DistNetworkError", "DistBackendError") for kind in type(error).__mro__):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in LOST_PEER_MESSAGES)


def _abort_mpi() -> None:
    """End all ranks of MPI: at exit, MPI would wait for ranks that wait for this one."""
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
        time.sleep(MPIEXEC_OUTPUT_S)
        mpi.COMM_WORLD.Abort(1)


if __name__ == "__main__":
    main()

"""Starts a worker's program exactly as Python itself would, and keeps a record of the exception that ended it.

Run as `python -m headway.launch worker AGENT_PID KIND STREAMS TARGET ARGS...`.
"""

import builtins
import contextlib
import faulthandler
import importlib.machinery
import importlib.util
import io
import os
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from types import CodeType, TracebackType

from headway.common import env
from headway.errors import LaunchError
from headway.runtime import heartbeat
from headway.runtime.ending import leave

_PR_SET_PDEATHSIG, _SIGKILL = 1, 9


def main(arguments: Sequence[str]) -> None:
    """Run what the arguments name: AGENT_PID KIND STREAMS TARGET ARGS..."""
    agent_pid, kind, streams, target, *args = arguments
    die_with(int(agent_pid))
    if streams == "merge":
        os.dup2(1, 2)
    if kind == "program":
        os.execvp(target, [target, *args])
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A line is one write, also where PYTHONUNBUFFERED asks for pieces: ranks must not cut into each other's lines.
        sys.stdout.reconfigure(line_buffering=True, write_through=False)
    record = env.get("TORCHELASTIC_ERROR_FILE")
    _record_faults(record)
    heartbeat.start()
    sys.argv = [target, *args]
    leave(_carry_out(kind, target, record))


def _carry_out(kind: str, target: str, record: str | None) -> int:
    """Run the program; return the exit code that Python would end with."""
    try:
        code = _prepare_module(target) if kind == "module" else _prepare_script(target)
        exec(code, sys.modules["__main__"].__dict__)
    except KeyboardInterrupt:
        return 130  # the agent says that the run was interrupted, once
    except SystemExit as leaving:
        if leaving.code is None or isinstance(leaving.code, int):
            return (leaving.code or 0) & 0xFF
        print(leaving.code, file=sys.stderr)
        return 1
    except Exception as error:
        _report(error.with_traceback(_without_ours(error.__traceback__)), record)
        return 1
    return 0


def die_with(parent_pid: int, number: int = _SIGKILL) -> None:
    """Let the kernel send this process a signal when its parent dies, however that happens."""
    if sys.platform != "linux":
        return
    import ctypes

    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent_pid:
        sys.exit("headway: the launcher died while this process started")


def _record_faults(record: str | None) -> None:
    """Write the Python stack of a crash (SIGSEGV, SIGABRT ...) beside the record."""
    if record and not faulthandler.is_enabled():
        faulthandler.enable(open(f"{record}.fault", "w"))  # noqa: SIM115  (faulthandler holds it open)


def _without_ours(trace: TracebackType | None) -> TracebackType | None:
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return trace


def _report(error: Exception, record: str | None) -> None:
    from headway.common import callsite, scope
    from headway.launch.agent.records import write_record

    # An Accelerator has said there what else to tell, such as by what memory was used.
    note = scope.own(callsite.Hook).says(error)
    is_kept = bool(record) and write_record(Path(str(record)), error, note)
    # The agent prints the first failure's trace for all ranks; a hook of the user's still has its say, but unheard.
    with contextlib.redirect_stderr(io.StringIO()) if is_kept else contextlib.nullcontext():
        sys.excepthook(type(error), error, error.__traceback__)


def _new_main(**attributes: object) -> None:
    """Put an empty `__main__` in the place of this module."""
    module = types.ModuleType("__main__")
    module.__dict__.update({"__builtins__": builtins, "__package__": None, "__cached__": None, **attributes})
    sys.modules["__main__"] = module


def _prepare_script(target: str) -> CodeType:
    """Set up `python TARGET`: a file, or a folder or archive that holds a `__main__.py`."""
    path = os.path.join(os.getcwd(), target)
    if os.path.isfile(path) and not path.endswith((".zip", ".pyz", ".egg")):
        _set_first_path(os.path.dirname(os.path.realpath(path)))
        _new_main(__file__=path, __loader__=importlib.machinery.SourceFileLoader("__main__", path), __spec__=None)
        with io.open_code(path) as file:
            return compile(file.read(), path, "exec", dont_inherit=True)
    sys.path.insert(0, path)
    spec = importlib.machinery.PathFinder.find_spec("__main__", [path])
    if spec is None or spec.loader is None:
        raise LaunchError(f"{target} is not a Python file, nor a folder or archive with a __main__.py")
    return _from_spec(spec, target)


def _prepare_module(target: str) -> CodeType:
    """Set up `python -m TARGET`."""
    _set_first_path(os.getcwd())
    spec = _find(target)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = _find(f"{target}.__main__")
        if spec is None:
            raise LaunchError(f"-m {target}: this package has no __main__.py; name the module in it that is to run")
    if spec is None or spec.loader is None:
        raise LaunchError(f"-m {target}: there is no module of this name that can be run")
    return _from_spec(spec, spec.origin or target)


def _find(name: str) -> importlib.machinery.ModuleSpec | None:
    """The module's spec; its package is imported for it, and what that raises is the user's to see."""
    try:
        return importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            return None
        raise


def _from_spec(spec: importlib.machinery.ModuleSpec, origin: str) -> CodeType:
    sys.argv[0] = origin
    get_code = getattr(spec.loader, "get_code", None)
    code = get_code(spec.name) if get_code is not None else None
    if not isinstance(code, CodeType):
        raise LaunchError(f"{spec.name} has no Python code to run")
    _new_main(
        __file__=spec.origin, __loader__=spec.loader, __spec__=spec, __package__=spec.parent, __cached__=spec.cached
    )
    return code


def _set_first_path(folder: str) -> None:
    # `python -P` and PYTHONSAFEPATH put no folder first.
    if not getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, folder)

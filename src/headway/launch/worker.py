"""Start a worker's program exactly as Python would, and record the exception that ends it.

This module is run as `python -m headway.launch worker AGENT_PID KIND STREAMS TARGET ARGS...`. KIND is "script",
"module" or "program". STREAMS is "merge" if stderr goes to the same file or screen as stdout, otherwise "apart".
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
from headway.core.runtime import heartbeat
from headway.core.runtime.ending import end_process
from headway.errors import LaunchError

_PR_SET_PDEATHSIG, _SIGKILL = 1, 9


def main(arguments: Sequence[str]) -> None:
    """Run the program that the arguments describe, and end this process with its exit code. Does not return.

    A program that is neither script nor module replaces this process.

    Args:
        arguments: Process ID of the agent, kind of program, treatment of stderr, path or name of the program, and the
            program's arguments. The kind is "script", "module" or "program". "merge" merges stderr into stdout, and
            "apart" keeps both.
    """
    agent_pid, kind, streams, target, *args = arguments
    end_with_parent(int(agent_pid))
    if streams == "merge":
        os.dup2(1, 2)
    if kind == "program":
        os.execvp(target, [target, *args])
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Write whole lines, even if PYTHONUNBUFFERED requests smaller pieces, so that lines of different ranks do not mix.
        sys.stdout.reconfigure(line_buffering=True, write_through=False)
    record = env.get("TORCHELASTIC_ERROR_FILE")
    _record_faults(record)
    heartbeat.start_heartbeat()
    sys.argv = [target, *args]
    end_process(_run_program(kind, target, record))


def _run_program(kind: str, target: str, record: str | None) -> int:
    """Run the program and return the exit code with which Python would end.

    Args:
        kind: "script" or "module".
        target: Path of the script, or name of the module.
        record: File into which an exception of the program is written. None to write none.
    """
    try:
        code = _prepare_module(target) if kind == "module" else _prepare_script(target)
        exec(code, sys.modules["__main__"].__dict__)
    except KeyboardInterrupt:
        return 130  # the agent reports the interrupt once for all ranks
    except SystemExit as leaving:
        if leaving.code is None or isinstance(leaving.code, int):
            return (leaving.code or 0) & 0xFF
        print(leaving.code, file=sys.stderr)
        return 1
    except Exception as error:
        _report_error(error.with_traceback(_remove_own_frames(error.__traceback__)), record)
        return 1
    return 0


def end_with_parent(parent_pid: int, number: int = _SIGKILL) -> None:
    """Ask the kernel to send this process a signal when its parent dies for any reason (Linux only).

    If the parent has already died, this process exits.

    Args:
        parent_pid: Process ID of the expected parent.
        number: Signal to send. Default: SIGKILL.
    """
    if sys.platform != "linux":
        return
    import ctypes

    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent_pid:
        sys.exit("headway: the launcher died while this process started")


def _record_faults(record: str | None) -> None:
    """Enable faulthandler, so that a crash (SIGSEGV, SIGABRT ...) writes its Python stack to a `.fault` file.

    The file is next to the exception record. Do nothing if there is no such record, or if faulthandler is already
    enabled.
    """
    if record and not faulthandler.is_enabled():
        faulthandler.enable(open(f"{record}.fault", "w"))  # noqa: SIM115  (faulthandler holds it open)


def _remove_own_frames(trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback without the launcher's frames at its beginning. None if no frame is left."""
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return trace


def _report_error(error: Exception, record: str | None) -> None:
    """Record an exception for the agent, and call `sys.excepthook`, whose output is dropped after a record.

    Args:
        error: Exception of the user's program.
        record: File for the record. None to write none.
    """
    from headway.common import scope, tracebacks
    from headway.launch.agent.records import write_record

    # An Accelerator might have registered a note for this error, such as a list of the largest users of memory.
    note = scope.get_or_create(tracebacks.ExceptionHook).format_notes(error)
    is_kept = bool(record) and write_record(Path(str(record)), error, note)
    # The agent prints the first failure's trace for all ranks. A user's excepthook still runs, but its output is dropped.
    with contextlib.redirect_stderr(io.StringIO()) if is_kept else contextlib.nullcontext():
        sys.excepthook(type(error), error, error.__traceback__)


def _replace_main(**attributes: object) -> None:
    """Replace the `__main__` module with an empty module that has the given attributes.

    Args:
        attributes: Attributes of the new module by name, such as `__file__`.
    """
    module = types.ModuleType("__main__")
    module.__dict__.update({"__builtins__": builtins, "__package__": None, "__cached__": None, **attributes})
    sys.modules["__main__"] = module


def _prepare_script(target: str) -> CodeType:
    """Prepare `__main__`, `sys.path` and `sys.argv` as `python TARGET` does, and return the code to execute.

    TARGET is a file, or a folder or archive that contains a `__main__.py`.

    Raises:
        LaunchError: If TARGET is none of these, or contains no Python code.
    """
    path = os.path.join(os.getcwd(), target)
    if os.path.isfile(path) and not path.endswith((".zip", ".pyz", ".egg")):
        _set_first_path(os.path.dirname(os.path.realpath(path)))
        _replace_main(__file__=path, __loader__=importlib.machinery.SourceFileLoader("__main__", path), __spec__=None)
        with io.open_code(path) as file:
            return compile(file.read(), path, "exec", dont_inherit=True)
    sys.path.insert(0, path)
    spec = importlib.machinery.PathFinder.find_spec("__main__", [path])
    if spec is None or spec.loader is None:
        raise LaunchError(f"{target} is not a Python file, nor a folder or archive with a __main__.py")
    return _load_from_spec(spec, target)


def _prepare_module(target: str) -> CodeType:
    """Prepare `__main__`, `sys.path` and `sys.argv` as `python -m TARGET` does, and return the code to execute.

    Raises:
        LaunchError: If the module does not exist, is a package without a `__main__.py`, or contains no Python code.
    """
    _set_first_path(os.getcwd())
    spec = _find_spec(target)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = _find_spec(f"{target}.__main__")
        if spec is None:
            raise LaunchError(
                f"-m {target}: this package has no __main__.py; give the module in it that you want to run"
            )
    if spec is None or spec.loader is None:
        raise LaunchError(f"-m {target}: there is no module of this name that can be run")
    return _load_from_spec(spec, spec.origin or target)


def _find_spec(name: str) -> importlib.machinery.ModuleSpec | None:
    """Return the spec of a module, or None if the module does not exist.

    This imports the packages that contain the module. Errors of such an import propagate to the user.
    """
    try:
        return importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            return None
        raise


def _load_from_spec(spec: importlib.machinery.ModuleSpec, origin: str) -> CodeType:
    """Return the code of a module, and prepare `__main__` and `sys.argv[0]` for running it.

    Args:
        spec: Spec of the module.
        origin: Path of the module's file.

    Raises:
        LaunchError: If the module has no Python code.
    """
    sys.argv[0] = origin
    get_code = getattr(spec.loader, "get_code", None)
    code = get_code(spec.name) if get_code is not None else None
    if not isinstance(code, CodeType):
        raise LaunchError(f"{spec.name} has no Python code to run")
    _replace_main(
        __file__=spec.origin, __loader__=spec.loader, __spec__=spec, __package__=spec.parent, __cached__=spec.cached
    )
    return code


def _set_first_path(folder: str) -> None:
    # With `python -P` or PYTHONSAFEPATH, Python puts no folder first.
    if not getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, folder)

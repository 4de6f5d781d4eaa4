"""`RunningScript`: runs the user's script for `headway verify`, limits its time and reads its records."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from headway.common import env
from headway.errors import HeadwayError
from headway.verify.records import RunRecord, read_record
from headway.verify.request import RunRequest

_STACK_GRACE = 5.0
"""Seconds after the time limit during which a script that has created no Accelerator may write its stack."""
_LAST_LINES = 30
"""Number of last lines of a run's output that are kept."""
_MOST_LINKS = 5000
"""Largest number of entries of the current folder that are linked into a run's working directory."""
_COPIED_BYTES = 1 << 20
"""Largest size in bytes of a file that is copied instead of linked. A script that writes it then changes the copy."""
_OUTPUT_FOLDERS = frozenset(
    "runs run output outputs out checkpoints checkpoint ckpt ckpts results logs wandb mlruns lightning_logs".split()  # noqa: SIM905
)
"""Names of folders in which scripts usually write their output."""
_NOT_INHERITED = ("HEADWAY_RUN", "HEADWAY_CONTROL", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
"""Environment variables of a surrounding launch. A run that inherited them would join that launch."""

_SERVER_ENDED = (
    "the process that starts the runs has ended: its memory ran out, or another program ended it. Its output is above. "
    "Free memory and run headway verify again"
)


class VerifyError(HeadwayError):
    """Raised if a script cannot be verified.

    Either it cannot be started, or its single-process run fails, creates no Accelerator, or makes no update.
    """


@dataclass(frozen=True)
class ScriptCommand:
    """Command with which `headway launch` would start the user's script on a number of processes.

    Attributes:
        argv: Command line that starts all processes, if they are not forked from a server.
        variables: Environment variables to set.
        program: Kind of the program ("script" or "module"), its name and its arguments.
        num_processes: Number of processes.
    """

    argv: tuple[str, ...]
    variables: dict[str, str]
    program: tuple[str, ...]
    num_processes: int

    def add_arguments(self, args: tuple[str, ...]) -> "ScriptCommand":
        """Return the command with arguments appended to those of the script."""
        if not args:
            return self
        argv = list(self.argv)
        # With several processes, the last argument is the launch agent's plan as JSON, which contains the script's
        # arguments.
        if self.argv[1:4] == ("-m", "headway.launch", "agent"):
            plan = json.loads(argv[-1])
            plan["program"]["args"] += args
            argv[-1] = json.dumps(plan)
        else:
            argv += args
        return replace(self, argv=tuple(argv), program=(*self.program, *args))


def make_environment(command: ScriptCommand, request: RunRequest, num_threads: int) -> dict[str, str]:
    """Return the environment variables of a run.

    Args:
        command: Command that starts the run.
        request: Options of the run.
        num_threads: Number of CPU threads per process.
    """
    inherited = {name: value for name, value in env.copy_variables().items() if name not in _NOT_INHERITED}
    return {
        **inherited,
        **command.variables,
        "PWD": str(get_working_folder(request)),
        env.VERIFY: request.format_json(),
        "OMP_NUM_THREADS": str(num_threads),
        "WANDB_MODE": "disabled",
        "PYTHONUNBUFFERED": "1",
        "HEADWAY_LOG_LEVEL": inherited.get("HEADWAY_LOG_LEVEL", "warning"),
    }


def get_working_folder(request: RunRequest) -> Path:
    """Return the working directory of a run, which is inside the scratch folder."""
    return Path(request.output, "cwd")


def mirror_working_folder(request: RunRequest) -> None:
    """Fill a run's working directory with the current folder's entries, so that relative paths work.

    Small files are copied. Folders and larger files are linked, and `EscapeWatch` reports writes through the links.
    Folders with names that are common for output, such as "runs", are not linked. The run creates new folders instead,
    so that it does not find checkpoints of earlier runs. Do nothing if the working directory already exists, as that of
    a resumed run does.
    """
    folder = get_working_folder(request)
    if folder.exists():
        return
    folder.mkdir(parents=True)
    here = Path.cwd()
    for entry in sorted(here.iterdir())[:_MOST_LINKS]:
        if not (entry.is_dir() and entry.name.lower() in _OUTPUT_FOLDERS):
            if entry.is_file() and not entry.is_symlink() and entry.stat().st_size <= _COPIED_BYTES:
                shutil.copy2(entry, folder / entry.name)
            else:
                (folder / entry.name).symlink_to(entry)


class ForkServer:
    """Client of a server process that forks runs (`server.py`). A forked run starts in 0.1 s instead of 3 s."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "headway.verify.server"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**env.copy_variables(), "OMP_NUM_THREADS": "1", "HEADWAY_LOG_LEVEL": "warning"},
            text=True,
            start_new_session=True,  # Ctrl-C in a terminal reaches only the main process, which ends the servers
        )
        self._lock = threading.Lock()
        self._num_runs = 0
        # Futures of the exit codes of the runs that have not ended, by ID.
        self._exit_codes: dict[int, Future[int]] = {}
        self._is_ready = threading.Event()
        self._has_ended = False
        threading.Thread(target=self._read_answers, daemon=True).start()

    def _read_answers(self) -> None:
        """Set the futures of runs that have ended, until the server ends. Runs in a thread."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            answer = json.loads(line)
            if "is_ready" in answer:
                self._is_ready.set()
                continue
            self._exit_codes.pop(answer["id"]).set_result(answer["code"])
        with self._lock:
            self._has_ended = True
        self._is_ready.set()
        for each in list(self._exit_codes.values()):
            with contextlib.suppress(InvalidStateError):
                each.set_exception(VerifyError(_SERVER_ENDED))

    def start(self, order: dict[str, Any]) -> tuple[int, "Future[int]"]:
        """Start a run as soon as the server has imported torch. Return the run's ID and a future of its exit code.

        Args:
            order: Fields of a `headway.verify.server.StartOrder`, except the ID.

        Raises:
            VerifyError: If the server has ended.
        """
        self._is_ready.wait()
        with self._lock:
            if self._has_ended:
                raise VerifyError(_SERVER_ENDED)
            self._num_runs += 1
            run_id = self._num_runs
            exit_code: Future[int] = Future()
            self._exit_codes[run_id] = exit_code
            self._send_order({**order, "id": run_id})
        return run_id, exit_code

    def end(self, run_id: int) -> None:
        """End a run by its ID. Do nothing if it has already ended."""
        with self._lock:
            if run_id in self._exit_codes:
                self._send_order({"id": run_id, "end": True})

    def _send_order(self, order: dict[str, Any]) -> None:
        """Write an order to the server's stdin. The caller must hold the lock.

        An error is suppressed if the server has ended, because `_read_answers` then fails all futures.

        Args:
            order: `headway.verify.server.StartOrder` or `EndOrder`.
        """
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()

    def close(self) -> None:
        """End the server and all of its runs."""
        assert self._process.stdin is not None
        if not self._is_ready.is_set():
            self._process.kill()  # it has no runs, and would notice the end of its input only after torch's import
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class RunningScript:
    """Run of the user's script, which starts when the object is created.

    Args:
        command: Command that starts the run.
        request: Options of the run.
        time_limit: Number of seconds after which the run is ended.
        server: Server that forks the processes of the run, or None to start new processes.
    """

    def __init__(
        self, command: ScriptCommand, request: RunRequest, time_limit: float, server: ForkServer | None
    ) -> None:
        self._command = command
        self._request = request
        self._server = server
        folder = Path(request.folder)
        folder.mkdir(parents=True, exist_ok=True)
        self._output_file = folder / "output.txt"
        variables = make_environment(command, request, 1)
        mirror_working_folder(request)
        working_folder = str(get_working_folder(request))
        self._time_limit = time_limit
        if server is not None:
            self._run_id, self._exit_code = server.start(
                {
                    "variables": variables,
                    "program": list(command.program),
                    "num_processes": command.num_processes,
                    "output": str(self._output_file),
                    "folder": working_folder,
                }
            )
            self._start_time = time.monotonic()  # only now, because the server may have had to import torch first
            return
        self._start_time = time.monotonic()
        with self._output_file.open("wb") as output:
            self._process = subprocess.Popen(
                command.argv,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=variables,
                cwd=working_folder,
                start_new_session=True,
            )

    def wait(self) -> RunRecord:
        """Wait until the run ends, end it if the time limit has passed, and return its records.

        A run whose updates are to be recorded is ended earlier if it creates no Accelerator within `request.patience`
        plus `_STACK_GRACE` seconds.

        Raises:
            VerifyError: If the server that forks the run has ended.
        """
        request = self._request
        code = self._wait_for(request.patience + _STACK_GRACE) if request.is_recorded else None
        has_accelerator = Path(request.folder, "facts0.json").exists()
        if code is None and (has_accelerator or not request.is_recorded):
            code = self._wait_for(self._time_limit)
        self.end()
        seconds = time.monotonic() - self._start_time
        return read_record(self._request, self._command.num_processes, code, self._read_output(), seconds)

    def _wait_for(self, seconds: float) -> int | None:
        """Wait until the run ends, and return its exit code. Return None if the time limit is reached first.

        Args:
            seconds: Limit of the wait, in seconds since the start of the run.
        """
        remaining = max(0.1, self._start_time + seconds - time.monotonic())
        with contextlib.suppress(subprocess.TimeoutExpired, TimeoutError):
            return self._exit_code.result(remaining) if self._server is not None else self._process.wait(remaining)
        return None

    def end(self) -> None:
        """End the processes of the run that are still running."""
        if self._server is not None:
            self._server.end(self._run_id)
            return
        if self._process.poll() is None:
            self._send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(5)
        self._send_signal(signal.SIGKILL)
        self._process.wait()

    def _send_signal(self, number: int) -> None:
        """Send a signal to all processes of the script. Do nothing if they have ended."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)

    def _read_output(self) -> str:
        """Return the last lines that the run has printed; "" if it has printed nothing."""
        if not self._output_file.exists():
            return ""
        with self._output_file.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - 20_000))
            text = file.read().decode("utf-8", "replace")
        return "\n".join(text.splitlines()[-_LAST_LINES:])

"""Files of each rank: its output, the record of its exception, and its heartbeat file."""

import socket
from pathlib import Path

from torch.distributed.elastic.multiprocessing.api import LogsDest, LogsSpecs

from headway.common import env
from headway.core.runtime import heartbeat_file
from headway.launch.agent.records import RankExit, read_record
from headway.launch.agent.shared_memory import SharedMemory
from headway.launch.order import AgentOrder
from headway.launch.watch.hang_watch import describe_progress


class RankFiles(LogsSpecs):
    """Paths of each rank's files: its output, the record of its exception, and its heartbeat file.

    In a run that can be restarted, each start of the ranks has its own log folder.

    Args:
        order: Instructions from the launcher for this agent.
        scratch: Temporary folder of the agent.
        memory: Folder in shared memory. Each rank receives its path in an environment variable.

    Attributes:
        memory: Folder in shared memory, as passed to the constructor.
        records: Paths of the exception records by local rank.
        heartbeats: Paths of the heartbeat files by local rank.
        control: Address of the control plane, encoded for the workers. Empty before the first rendezvous.
    """

    def __init__(self, order: AgentOrder, scratch: Path, memory: SharedMemory) -> None:
        super().__init__(order.log_dir)
        self.memory = memory
        self._order = order
        self._scratch = scratch
        self.records: dict[int, Path] = {}
        self.heartbeats: dict[int, Path] = {}
        self.control = ""
        self._logs: dict[int, str] = {}

    @property
    def root_log_dir(self) -> str:
        """Folder of the log files, or a temporary folder if the user has requested no log files."""
        return self._order.log_dir or str(self._scratch)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Choose the paths of each rank's files, and add the variables that each rank needs to its environment.

        torch's agent calls this method each time it starts the ranks. torch's interface for logs requires the name.

        Args:
            envs: Environment variables of each rank by local rank; changed in place.
        """
        restart = envs[0].get("TORCHELASTIC_RESTART_COUNT", "0")
        folder = Path(self.root_log_dir)
        if self._order.max_restarts > 0:
            folder /= f"attempt{restart}"
        folder.mkdir(parents=True, exist_ok=True)
        logs: dict[int, str] = {}
        self.records = {}
        for local_rank, variables in envs.items():
            logs[local_rank] = str(folder / f"rank{variables['RANK']}.log")
            self.records[local_rank] = self._scratch / f"rank{variables['RANK']}-attempt{restart}.json"
            self.heartbeats[local_rank] = self.records[local_rank].with_suffix(".pulse")
            heartbeat_file.create_file(self.heartbeats[local_rank])
            variables["TORCHELASTIC_ERROR_FILE"] = str(self.records[local_rank])
            variables.update(self._order.variables)
            variables[env.CONTROL] = self.control
            variables[env.MEMORY] = self.memory.folder
            variables[heartbeat_file.VARIABLE] = str(self.heartbeats[local_rank])
        screen = dict.fromkeys(envs, "")
        # With "3" a worker redirects stderr to its stdout, so that one file contains both in order.
        logs_stdout = self._order.tee in ("1", "3")
        logs_stderr = self._order.tee == "2"
        self._logs = logs if logs_stdout or logs_stderr else {}
        return LogsDest(
            stdouts=logs if logs_stdout else screen,
            stderrs=logs if logs_stderr else screen,
            tee_stdouts=logs if logs_stdout else {},
            tee_stderrs=logs if logs_stderr else {},
            error_files={local_rank: str(path) for local_rank, path in self.records.items()},
        )

    def read_exit(self, rank: int, local_rank: int, pid: int, code: int | None) -> RankExit | None:
        """Return a description of how a rank ended, or None if it has neither failed nor recorded an exception.

        If the rank has recorded an exception and has a log file, its traceback is appended to this file. The screen
        shows one traceback for all ranks.

        Args:
            rank: Global rank.
            local_rank: Local rank.
            pid: Process ID.
            code: Exit code. None if the agent ended the rank because the run was over.
        """
        path = self.records[local_rank]
        record = read_record(path)
        if record is None and not code:
            return None
        if record is not None and local_rank in self._logs:
            with open(self._logs[local_rank], "a") as log:
                log.write(record.trace)
        fault_file = Path(f"{path}.fault")  # in which faulthandler writes the stack at a crash
        has_crashed = code is not None and code < 0 and fault_file.exists()
        return RankExit(
            rank,
            socket.gethostname(),
            pid,
            code,
            record,
            crash=fault_file.read_text() if has_crashed else "",
            crashed_at=fault_file.stat().st_mtime if has_crashed else 0.0,
            progress=describe_progress(self.heartbeats[local_rank]),
        )

"""Files of each rank: its output, the record of its exception, and the pulse, in which the rank records its state."""

import socket
from pathlib import Path

from torch.distributed.elastic.multiprocessing.api import LogsDest, LogsSpecs

from headway.common import env
from headway.core.runtime import pulse
from headway.launch.agent.records import RankExit, read_record
from headway.launch.agent.shared_memory import SharedMemory
from headway.launch.plan import AgentOrder
from headway.launch.watch.hang_watch import describe_progress


class RankFiles(LogsSpecs):
    """Paths of each rank's files: its output, the record of its exception, and its state (pulse).

    In a run that can be restarted, each start of the ranks has its own log folder.

    Args:
        order: Instructions from the launcher for this agent.
        scratch: Temporary folder of the agent.
        memory: Folder in shared memory. Each rank receives its path in an environment variable.

    Attributes:
        records: Paths of the exception records by local rank.
        pulses: Paths of the pulses by local rank.
        control: Address of the control plane, encoded for the workers.
    """

    def __init__(self, order: AgentOrder, scratch: Path, memory: SharedMemory) -> None:
        super().__init__(order.log_dir)
        self.memory = memory
        self._order = order
        self._scratch = scratch
        self.records: dict[int, Path] = {}
        self.pulses: dict[int, Path] = {}
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
        attempt = envs[0].get("TORCHELASTIC_RESTART_COUNT", "0")
        folder = Path(self.root_log_dir, "" if self._order.max_restarts == 0 else f"attempt{attempt}")
        folder.mkdir(parents=True, exist_ok=True)
        logs: dict[int, str] = {}
        self.records = {}
        for local_rank, variables in envs.items():
            logs[local_rank] = str(folder / f"rank{variables['RANK']}.log")
            record = self._scratch / f"rank{variables['RANK']}-attempt{attempt}.json"
            self.records[local_rank] = record
            variables["TORCHELASTIC_ERROR_FILE"] = str(record)
            variables.update(self._order.variables)
            variables[env.CONTROL] = self.control
            variables[env.MEMORY] = self.memory.folder
            self.pulses[local_rank] = record.with_suffix(".pulse")
            pulse.create_pulse(self.pulses[local_rank])
            variables[pulse.VARIABLE] = str(self.pulses[local_rank])
        screen = dict.fromkeys(envs, "")
        tee = self._order.tee
        stdouts = logs if tee in "13" and tee != "0" else screen
        # With "3" a worker redirects stderr to its stdout, so that one file contains both in order.
        stderrs = logs if tee == "2" else screen
        self._logs = logs if tee != "0" else {}
        return LogsDest(
            stdouts=stdouts,
            stderrs=stderrs,
            tee_stdouts=logs if stdouts is logs else {},
            tee_stderrs=logs if stderrs is logs else {},
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
        record, crash = read_record(path), Path(f"{path}.fault")
        has_crashed = code is not None and code < 0 and crash.exists()
        if record is None and not code:
            return None
        if record is not None and local_rank in self._logs:
            with open(self._logs[local_rank], "a") as log:
                log.write(record.trace)
        text, when = (crash.read_text(), crash.stat().st_mtime) if has_crashed else ("", 0.0)
        return RankExit(
            rank, socket.gethostname(), pid, code, record, text, when, describe_progress(self.pulses[local_rank])
        )

"""Each rank's files: its output, the record of its exception and its pulse; and what they say of its end."""

import socket
from pathlib import Path

from torch.distributed.elastic.multiprocessing.api import LogsDest, LogsSpecs

from headway.common import env
from headway.launch.agent.records import RankExit, read_record
from headway.launch.plan import AgentOrder
from headway.launch.watch.machine import progress
from headway.runtime.heartbeat import file as pulse


class RankFiles(LogsSpecs):
    """Where each rank's output and its record of an exception go: a folder per attempt, a file per rank."""

    def __init__(self, order: AgentOrder, scratch: Path) -> None:
        super().__init__(order.log_dir)
        self._order = order
        self._scratch = scratch
        self.records: dict[int, Path] = {}
        self.pulses: dict[int, Path] = {}
        self.control = ""
        self._logs: dict[int, str] = {}

    @property
    def root_log_dir(self) -> str:
        """The folder of the log files, or where nothing stays."""
        return self._order.log_dir or str(self._scratch)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Name the files of one attempt, by local rank."""
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
            self.pulses[local_rank] = record.with_suffix(".pulse")
            pulse.create(self.pulses[local_rank])
            variables[pulse.VARIABLE] = str(self.pulses[local_rank])
        screen = dict.fromkeys(envs, "")
        tee = self._order.tee
        stdouts = logs if tee in "13" and tee != "0" else screen
        # With "3" a worker sends its stderr where its stdout goes, so that one file holds both in order.
        stderrs = logs if tee == "2" else screen
        self._logs = logs if tee != "0" else {}
        return LogsDest(
            stdouts=stdouts,
            stderrs=stderrs,
            tee_stdouts=logs if stdouts is logs else {},
            tee_stderrs=logs if stderrs is logs else {},
            error_files={local_rank: str(path) for local_rank, path in self.records.items()},
        )

    def death(self, rank: int, local_rank: int, pid: int, code: int | None) -> RankExit | None:
        """How a rank ended, from what it left; None where it left nothing and has no exit code of a failure.

        A rank's log file then ends with its own traceback, which the screen shows once for all ranks.
        """
        path = self.records[local_rank]
        record, crash = read_record(path), Path(f"{path}.fault")
        has_crashed = code is not None and code < 0 and crash.exists()
        if record is None and not code:
            return None
        if record is not None and local_rank in self._logs:
            with open(self._logs[local_rank], "a") as log:
                log.write(record.trace)
        return RankExit(
            rank,
            socket.gethostname(),
            pid,
            code,
            record,
            crash.read_text() if has_crashed else "",
            crash.stat().st_mtime if has_crashed else 0.0,
            progress(self.pulses[local_rank]),
        )

"""`VerifySession`: makes all runs of the script that the chosen proofs need, in parallel while CPU cores are free."""

import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from headway.verify.records import RunRecord
from headway.verify.request import RunRequest
from headway.verify.runs import ForkServer, LaunchOrder, RunningScript, VerifyError
from headway.verify.stacks import describe_stuck, read_stacks
from headway.verify.verdict import RunSet, describe_failure, describe_load

_SEED = 1234
_CLOCK_STEP = 1.1
"""Seconds between the starts of the first run and its repetition, so that seeds from the clock differ."""
_MEASURED_UPDATES = 2
"""Number of updates whose memory is measured, equal to the number that `headway estimate --script` traces."""
_ON_SERVER_0 = ("baseline", "reference", "several", "layout", "replayed", "reordered")


@dataclass(frozen=True)
class Options:
    """Options of a verification.

    Attributes:
        orders: Commands that start the script: with one process ("one"), with several ("several"), and under the
            layout that was given on the command line ("layout"). Also the commands that forecast the script's memory:
            on the device of the runs ("forecast") and on the device of the full run ("full").
        is_forked: Whether runs are forked from a process that has imported torch. Only runs on the CPU can be forked.
        num_processes: Number of processes of the runs that are compared with a single-process run.
        layout_name: Name of the layout that was given on the command line; "" if there is none.
        num_updates: Number of updates of each run.
        time_limit: Number of seconds that each run may go without a batch or an update. In all, a run may take three
            times as long plus 20 seconds.
        proofs: Keys of the requested proofs, such as "resume".
        notes: Remarks for the user.
        resume_args: Arguments that are added to those of the script when it is started again after a kill.
    """

    orders: dict[str, LaunchOrder]
    is_forked: bool
    num_processes: int
    layout_name: str
    num_updates: int
    time_limit: float
    proofs: tuple[str, ...]
    notes: tuple[str, ...] = ()
    resume_args: tuple[str, ...] = ()

    def needs_any(self, *words: str) -> bool:
        """Whether at least one of the proofs with these keys was requested."""
        return any(word in self.proofs for word in words)


class VerifySession:
    """Context manager that plans and makes all runs of one verification.

    Args:
        options: Options of the verification.
        say: Function that is called with the name of each run that starts.
        servers: Two servers that fork the runs. By default, `__enter__` starts two if runs are forked.
    """

    def __init__(
        self, options: Options, say: Callable[[str], None], servers: Sequence[ForkServer] | None = None
    ) -> None:
        self._options = options
        self._say = say
        self._scratch = Path(tempfile.mkdtemp(prefix="headway_verify_"))
        self._num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self._free = self._num_cores
        self._has_changed = threading.Condition()
        self._running: list[RunningScript] = []
        self._has_ended = False
        self._pool = ThreadPoolExecutor(8)
        # Each server has its own hash seed. Runs on different servers therefore iterate over sets of strings in
        # different orders, as two launches of a script do.
        self._owns_servers = servers is None
        self._servers = list(servers or ())
        self._starting: list[Future[ForkServer]] = []

    def __enter__(self) -> "VerifySession":
        """Start the servers if runs are forked, and return the session."""
        try:
            if self._owns_servers and self._options.is_forked:
                for _ in range(2):
                    # A signal interrupts only the main thread. A server that another thread starts is always known.
                    self._starting.append(self._pool.submit(ForkServer))
                self._servers = [each.result() for each in self._starting]
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        """End the runs that have not finished, and remove the scratch folder."""
        with self._has_changed:
            self._has_ended = True
            self._has_changed.notify_all()
        for each in list(self._running):
            each.end()
        for server in self._starting:
            server.result().close()
        self._pool.shutdown(cancel_futures=True)
        shutil.rmtree(self._scratch, ignore_errors=True)

    @property
    def _kill_at(self) -> int:
        return min(self._options.num_updates - 1, max(2, self._options.num_updates * 2 // 3))

    @property
    def _save_at(self) -> int:
        return self._options.num_updates // 2

    def run(self) -> RunSet:
        """Run the script as often as the proofs need, and return the records of all runs.

        Raises:
            VerifyError: If the script fails, creates no Accelerator, or makes no update in the first run, which has one
                process. Also if a server that forks runs has ended.
        """
        options = self._options
        needs_repeat = options.needs_any("repeat", "resume")
        baseline_run = self._start_run(self._make_request("baseline"), 1)
        if needs_repeat:
            time.sleep(_CLOCK_STEP)
        repeat_run = self._start_run(
            replace(self._make_request("repeat"), saves_after=self._save_at, kills_after=self._kill_at, reverses_listings=True), 1
        ) if needs_repeat else None  # fmt: skip
        baseline = baseline_run.result()
        self._check_baseline(baseline)
        repeat = repeat_run.result() if repeat_run is not None else None
        runs = RunSet(baseline, repeat, num_processes=options.num_processes, layout_name=options.layout_name)
        runs.notes += [*options.notes]
        self._run_others(runs)
        return runs

    def _run_others(self, runs: RunSet) -> None:
        """Make all runs except the first run and its repetition, and store their records in `runs`.

        Args:
            runs: Records of the first run and its repetition. The other records are added.
        """
        options, baseline, repeat = self._options, runs.baseline, runs.repeat
        is_seeded = repeat is None or repeat.rank0_facts.get("initial_hashes") == baseline.rank0_facts.get(
            "initial_hashes"
        )
        draws = bool(
            baseline.rank0_facts.get("draw_lines")
            or baseline.rank0_facts.get("num_dropout_calls")
            or baseline.rank0_facts.get("num_dropout_rates")
        )
        seed = -1 if is_seeded else _SEED
        base = replace(
            self._make_request("reference"),
            shares_draws=draws,
            seed=seed,
            shares_order=bool(baseline.rank0_facts["uses_accelerate_rules"]),
        )
        sizes = {number: about["batch_size"] for number, about in baseline.rank0_facts.get("loaders", {}).items()}
        split = replace(base, splits_batches=True, batch_sizes=sizes)
        waiting: dict[str, Future[RunRecord]] = {}
        compares = options.needs_any("processes", "layout", "samples", "learning")
        needs_order = compares or options.needs_any("resume", "out_of_memory")
        n = options.num_processes
        if compares:
            waiting["several"] = self._start_run(replace(split, name="several"), n)
            if options.layout_name:
                waiting["layout"] = self._start_run(replace(split, name="layout"), n, order="layout")
        if draws or not is_seeded or base.shares_order:
            if compares:
                waiting["reference"] = self._start_run(base, 1)
        else:
            runs.reference = baseline
        if needs_order:
            waiting["reordered"] = self._start_run(replace(base, name="reordered", reverses_rows=True), 1)
        if options.needs_any("resume") and repeat is not None and repeat.rank0_facts.get("saves"):
            waiting["resumed"] = self._start_run(
                self._request_continuation("resumed", repeat), 1, args=options.resume_args
            )
            if compares and not draws and is_seeded and not base.shares_order:
                waiting["resumed_on_several"] = self._start_run(
                    self._request_continuation("resumed_on_several", repeat), n, args=options.resume_args
                )
        if options.needs_any("out_of_memory") and baseline.rank0_facts.get("replays_batches"):
            waiting["replayed"] = self._start_run(
                replace(self._make_request("replayed"), fails_in=self._find_backward(baseline)), 1
            )
        if options.needs_any("memory"):
            waiting |= self._measure_memory()
        if options.needs_any("leaks", "learning"):
            waiting["probed"] = self._start_run(
                replace(base, name="probed", shares_draws=True, num_updates=1, probes_leaks=True), 1
            )
        for name, future in waiting.items():
            setattr(runs, name, future.result())

    def _measure_memory(self) -> "dict[str, Future[RunRecord]]":
        """Start the runs that measure and forecast the script's memory, and return the futures of their records."""
        measure = replace(self._make_request("measured"), num_updates=_MEASURED_UPDATES, measures_tensors=True)
        waiting = {"measured": self._start_run(measure, 1)}
        for name in ("forecast", "full"):
            if name in self._options.orders:
                waiting[name] = self._start_run(replace(self._make_request(name), is_recorded=False), 1, order=name)
        return waiting

    # ---------------------------------------------------------------- single runs

    def _make_request(self, name: str) -> RunRequest:
        return RunRequest(
            name=name,
            folder=str(self._scratch / name),
            output=self._get_output_folder(name),
            num_updates=self._options.num_updates,
            patience=self._options.time_limit,
        )

    def _get_output_folder(self, name: str) -> str:
        return str(self._scratch / "output" / name)

    def _request_continuation(self, name: str, killed: RunRecord) -> RunRequest:
        """Copy the output of a killed run, and return the request of a run that resumes from it."""
        request = self._make_request(name)
        source = Path(killed.request.output)
        if source.exists():
            shutil.copytree(source, request.output, symlinks=True)
        return request

    def _find_backward(self, baseline: RunRecord) -> int:
        """Return the number of a backward pass in the middle of the run, in which to inject an out-of-memory error.

        Args:
            first: Record of the single-process run.
        """
        return max(2, int(baseline.rank0_facts.get("num_backwards", 2)) // 2 + 1)

    def _start_run(
        self, request: RunRequest, num_processes: int, *, order: str = "", args: tuple[str, ...] = ()
    ) -> "Future[RunRecord]":
        """Start a run as soon as enough CPU cores are free, and return the future of its record.

        Args:
            request: Options of the run.
            num_processes: Number of processes of the run.
            order: Key of the command that starts the run. Default: the one for this number of processes.
            args: Arguments that are added to those of the script. Default: ().
        """
        request = replace(
            request, folder=str(self._scratch / request.name), output=self._get_output_folder(request.name)
        )
        chosen = self._options.orders[order or ("one" if num_processes == 1 else "several")]
        return self._pool.submit(self._make_run, request, chosen.add_arguments(args))

    def _make_run(self, request: RunRequest, order: LaunchOrder) -> RunRecord:
        """Wait until enough CPU cores are free, run the script, and return the record of the run.

        A run needs one core per process, or all cores if there are fewer.
        """
        size = min(order.num_processes, self._num_cores)
        with self._has_changed:
            self._has_changed.wait_for(lambda: self._has_ended or self._free >= size)
            self._free -= size
        try:
            self._say(request.name)
            server = self._servers[request.name not in _ON_SERVER_0] if self._servers else None
            running = self._launch_processes(order, request, server)
            return running.wait()
        finally:
            with self._has_changed:
                self._free += size
                self._has_changed.notify_all()

    def _launch_processes(self, order: LaunchOrder, request: RunRequest, server: ForkServer | None) -> RunningScript:
        """Start the processes of a run. If the session ends meanwhile, end them at once.

        Raises:
            VerifyError: If the session has ended.
        """
        if not self._has_ended:
            running = RunningScript(order, request, 3 * self._options.time_limit + 20, server)
            with self._has_changed:
                self._running.append(running)
                if not self._has_ended:
                    return running
            running.end()
        raise VerifyError("the verification has ended")

    def _check_baseline(self, baseline: RunRecord) -> None:
        """Raise an error unless the script's single-process run succeeded, created an Accelerator and made updates.

        Args:
            first: Record of the single-process run.

        Raises:
            VerifyError: If the script fails, creates no Accelerator, or makes no update.
        """
        tail = "\n".join(f"    {line}" for line in baseline.output.splitlines()[-25:]) or "    (it printed nothing)"
        where = describe_stuck(read_stacks(Path(baseline.request.folder), 1))
        where = f"; {where}" if where else ""
        load, more = describe_load(), f"--time_limit {max(300, 2 * self._options.time_limit):.0f}"
        busy = f"{load[0].upper()}{load[1:]}. Wait until it is idle, or set {more}. " if load else ""
        if baseline.code is None and not baseline.facts_by_rank:
            time_hint = busy or f"If it only needs more time, set {more}. "
            raise VerifyError(
                f"the script created no Accelerator in {baseline.seconds:.0f} s{where}. {time_hint}"
                "verify needs a script that trains with headway.Accelerator, with our Trainer, or under Accelerate's name "
                f"(add --as accelerate) (docs/verify.md#if-a-script-cannot-be-verified). Its last lines:\n{tail}"
            )
        if baseline.code is None or baseline.code == 70:
            without_step = self._describe_missing_step(baseline)
            size_hint = f"{'Otherwise, give' if busy else 'Give'} it smaller data or a smaller model, or fewer updates (--updates 3)"
            raise VerifyError(
                f"the script made {baseline.last_update} of {self._options.num_updates} updates in {baseline.seconds:.0f} s on one "
                f"process{where}. {busy}"
                + (f"{without_step}. " if without_step else f"{size_hint}{'' if busy else f', or more time ({more})'} ")
                + f"(docs/verify.md#if-a-script-cannot-be-verified). Its last lines:\n{tail}"
            )
        if baseline.code != 0:
            raise VerifyError(
                f"the script fails on one process (exit code {baseline.code}): {describe_failure(baseline)} "
                f"(docs/verify.md#if-a-script-cannot-be-verified). Its last lines:\n{tail}"
            )
        if not baseline.facts_by_rank:
            raise VerifyError(
                "the script ended without creating an Accelerator; verify needs a script that trains with headway.Accelerator, "
                "with our Trainer, or under Accelerate's name (add --as accelerate) "
                f"(docs/verify.md#if-a-script-cannot-be-verified). Its last lines:\n{tail}"
            )
        if not baseline.rank0_updates:
            why = self._describe_missing_step(baseline) or (
                "verify counts optimizer.step() of a prepared optimizer after accelerator.backward(); give arguments with which "
                f"the script trains for at least {self._options.num_updates} updates"
            )
            raise VerifyError(
                f"the script ended without an update. {why} "
                f"(docs/verify.md#if-a-script-cannot-be-verified). Its last lines:\n{tail}"
            )

    def _describe_missing_step(self, baseline: RunRecord) -> str:
        """Return what the script lacks if it computed gradients but made no update; else "".

        Args:
            first: Record of the single-process run.
        """
        num_backwards = int(baseline.rank0_facts.get("num_backwards", 0))
        if not num_backwards or baseline.last_update:
            return ""
        times = "once" if num_backwards == 1 else f"{num_backwards} times"
        return (
            f"It called accelerator.backward() {times}, but no optimizer.step() of a prepared optimizer followed: call step() on the "
            "optimizer that accelerator.prepare() returned. If the script accumulates gradients, give it enough batches for an "
            "update"
        )

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
from headway.verify.runs import ForkServer, RunningScript, ScriptCommand, VerifyError
from headway.verify.stacks import describe_stuck, read_stacks
from headway.verify.verdict import RunSet, describe_failure, describe_load

_SEED = 1234
"""Seed of the reference and of the runs that are compared with it, if the script sets no seed."""
_CLOCK_STEP = 1.1
"""Seconds between the starts of the baseline and its repetition, so that seeds from the clock differ."""
_MEASURED_UPDATES = 2
"""Number of updates whose memory is measured, equal to the number that `headway estimate --script` traces."""
_FIRST_SERVER_RUNS = ("baseline", "reference", "several", "layout", "replayed", "reordered")
"""Names of the runs that the first server forks. They are compared with each other.

The second server forks the other runs. It has another hash seed, so that sets of strings have another order, as in a
second launch of the script.
"""


@dataclass(frozen=True)
class VerifyOptions:
    """Options of a verification.

    Attributes:
        commands: Commands that start the script: with one process ("one"), with several ("several"), and under the
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

    commands: dict[str, ScriptCommand]
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
        announce_run: Function that is called with the name of each run that starts.
        servers: Two servers that fork the runs. By default, `__enter__` starts two if runs are forked.
    """

    def __init__(
        self,
        options: VerifyOptions,
        announce_run: Callable[[str], None],
        servers: Sequence[ForkServer] | None = None,
    ) -> None:
        self._options = options
        self._announce_run = announce_run
        self._scratch = Path(tempfile.mkdtemp(prefix="headway_verify_"))
        self._num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        # The condition guards the three attributes below it. It is notified when cores become free, and at the end.
        self._changed = threading.Condition()
        self._num_free_cores = self._num_cores
        self._running: list[RunningScript] = []
        self._has_ended = False
        self._pool = ThreadPoolExecutor(8)
        self._owns_servers = servers is None
        self._servers = list(servers or ())
        self._server_futures: list[Future[ForkServer]] = []

    def __enter__(self) -> "VerifySession":
        """Start the servers if runs are forked, and return the session."""
        try:
            if self._owns_servers and self._options.is_forked:
                # Ctrl-C raises KeyboardInterrupt in the main thread only. If it were raised while this thread started a
                # server, the server would run on, but nothing would refer to it. A thread of the pool always finishes
                # the start, and `__exit__` finds the server in its future.
                for _ in range(2):
                    self._server_futures.append(self._pool.submit(ForkServer))
                self._servers = [each.result() for each in self._server_futures]
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        """End the runs that have not finished and the servers of this session, and remove the scratch folder."""
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()
        for each in list(self._running):
            each.end()
        for server in self._server_futures:
            server.result().close()
        self._pool.shutdown(cancel_futures=True)
        shutil.rmtree(self._scratch, ignore_errors=True)

    @property
    def _kill_update(self) -> int:
        """Number of the update after which the repeated run is killed: two thirds of the run, but not its last update."""
        return min(self._options.num_updates - 1, max(2, self._options.num_updates * 2 // 3))

    @property
    def _save_update(self) -> int:
        """Number of the update after which the repeated run saves a checkpoint."""
        return self._options.num_updates // 2

    def run(self) -> RunSet:
        """Run the script as often as the proofs need, and return the records of all runs.

        Raises:
            VerifyError: If the script fails, creates no Accelerator, or makes no update in the first run, which has one
                process. Also if a server that forks runs has ended.
        """
        options = self._options
        baseline_future = self._start_run(self._make_request("baseline"), 1)
        repeat_future = None
        if options.needs_any("repeat", "resume"):
            time.sleep(_CLOCK_STEP)
            request = replace(
                self._make_request("repeat"),
                saves_after=self._save_update,
                kills_after=self._kill_update,
                reverses_listings=True,
            )
            repeat_future = self._start_run(request, 1)
        baseline = baseline_future.result()
        self._check_baseline(baseline)
        repeat = repeat_future.result() if repeat_future is not None else None
        runs = RunSet(baseline, repeat, num_processes=options.num_processes, layout_name=options.layout_name)
        runs.notes += options.notes
        self._make_other_runs(runs)
        return runs

    def _make_other_runs(self, runs: RunSet) -> None:
        """Make all runs except the baseline and its repetition, and store their records in `runs`.

        Args:
            runs: Records of the baseline and its repetition. The other records are added.
        """
        options, baseline, repeat = self._options, runs.baseline, runs.repeat
        request = self._request_reference(baseline, repeat)
        is_baseline_reference = not (request.shares_draws or request.shares_order) and request.seed == -1
        futures: dict[str, Future[RunRecord]] = {}  # by attribute of `runs`
        if self._compares_processes:
            futures |= self._start_runs_on_several(request, baseline)
        if is_baseline_reference:
            runs.reference = baseline
        elif self._compares_processes:
            futures["reference"] = self._start_run(request, 1)
        if self._compares_processes or options.needs_any("resume", "out_of_memory"):
            futures["reordered"] = self._start_run(replace(request, name="reordered", reverses_rows=True), 1)
        if options.needs_any("resume") and repeat is not None and repeat.rank0_facts.saves:
            futures |= self._resume_run(repeat, on_several=self._compares_processes and is_baseline_reference)
        if options.needs_any("out_of_memory") and baseline.rank0_facts.replays_batches:
            replayed = replace(self._make_request("replayed"), fails_in=self._choose_failing_backward(baseline))
            futures["replayed"] = self._start_run(replayed, 1)
        if options.needs_any("memory"):
            futures |= self._measure_memory()
        if options.needs_any("leaks", "learning"):
            probed = replace(request, name="probed", shares_draws=True, num_updates=1, probes_leaks=True)
            futures["probed"] = self._start_run(probed, 1)
        for name, future in futures.items():
            setattr(runs, name, future.result())

    @property
    def _compares_processes(self) -> bool:
        """Whether a requested proof compares a run on several processes with a single-process run."""
        return self._options.needs_any("processes", "layout", "samples", "learning")

    def _request_reference(self, baseline: RunRecord, repeat: RunRecord | None) -> RunRequest:
        """Return the request of the single-process run with which runs on several processes are compared.

        If the script draws random numbers, has no seed, or shuffles in an order that depends on the number of
        processes, the compared runs must draw, seed and shuffle independently of that number.

        Args:
            baseline: Plain single-process run.
            repeat: Its repetition, or None if it was not made.
        """
        initial_hashes = baseline.rank0_facts.initial_hashes
        is_seeded = repeat is None or repeat.rank0_facts.initial_hashes == initial_hashes
        return replace(
            self._make_request("reference"),
            shares_draws=baseline.draws_random_numbers,
            seed=-1 if is_seeded else _SEED,
            shares_order=baseline.rank0_facts.uses_accelerate_rules,
        )

    def _start_runs_on_several(self, reference: RunRequest, baseline: RunRecord) -> "dict[str, Future[RunRecord]]":
        """Start the runs on several processes, and return the futures of their records.

        Their processes share the batches of a single process, so that all runs train on equal global batches.

        Args:
            reference: Request of the single-process run with which they are compared.
            baseline: Plain single-process run.
        """
        num_processes = self._options.num_processes
        loaders = baseline.rank0_facts.loaders
        batch_sizes = {number: loader["batch_size"] for number, loader in loaders.items()}
        split = replace(reference, splits_batches=True, batch_sizes=batch_sizes)
        futures = {"several": self._start_run(replace(split, name="several"), num_processes)}
        if self._options.layout_name:
            futures["layout"] = self._start_run(replace(split, name="layout"), num_processes, command="layout")
        return futures

    def _resume_run(self, killed: RunRecord, *, on_several: bool) -> "dict[str, Future[RunRecord]]":
        """Start the runs that continue a killed run from its checkpoint, and return the futures of their records.

        Args:
            killed: Single-process run that saved a checkpoint before it was killed.
            on_several: Whether to resume also on several processes.
        """
        args = self._options.resume_args
        futures = {"resumed": self._start_run(self._request_continuation("resumed", killed), 1, args=args)}
        if on_several:
            request = self._request_continuation("resumed_on_several", killed)
            futures["resumed_on_several"] = self._start_run(request, self._options.num_processes, args=args)
        return futures

    def _measure_memory(self) -> "dict[str, Future[RunRecord]]":
        """Start the runs that measure and forecast the script's memory, and return the futures of their records."""
        request = replace(self._make_request("measured"), num_updates=_MEASURED_UPDATES, measures_tensors=True)
        futures = {"measured": self._start_run(request, 1)}
        for name in ("forecast", "full"):
            if name in self._options.commands:
                request = replace(self._make_request(name), is_recorded=False)
                futures[name] = self._start_run(request, 1, command=name)
        return futures

    # ---------------------------------------------------------------- single runs

    def _make_request(self, name: str) -> RunRequest:
        """Return the request for a run with this name, with the options of the session."""
        return RunRequest(
            name=name,
            folder=str(self._scratch / name),
            output=self._get_output_folder(name),
            num_updates=self._options.num_updates,
            patience=self._options.time_limit,
        )

    def _get_output_folder(self, name: str) -> str:
        """Return the folder into which the script of the named run writes its files."""
        return str(self._scratch / "output" / name)

    def _request_continuation(self, name: str, killed: RunRecord) -> RunRequest:
        """Copy the output of a killed run, and return the request of a run that resumes from it."""
        request = self._make_request(name)
        source = Path(killed.request.output)
        if source.exists():
            shutil.copytree(source, request.output, symlinks=True)
        return request

    def _choose_failing_backward(self, baseline: RunRecord) -> int:
        """Return the number of a backward pass in the middle of the run, in which to inject an out-of-memory error.

        Args:
            baseline: Record of the single-process run.
        """
        return max(2, int(baseline.rank0_facts.num_backwards) // 2 + 1)

    def _start_run(
        self, request: RunRequest, num_processes: int, *, command: str = "", args: tuple[str, ...] = ()
    ) -> "Future[RunRecord]":
        """Start a run as soon as enough CPU cores are free, and return the future of its record.

        Args:
            request: Options of the run.
            num_processes: Number of processes of the run.
            command: Key of the command that starts the run. Default: the one for this number of processes.
            args: Arguments that are added to those of the script. Default: ().
        """
        request = replace(
            request, folder=str(self._scratch / request.name), output=self._get_output_folder(request.name)
        )
        key = command or ("one" if num_processes == 1 else "several")
        return self._pool.submit(self._make_run, request, self._options.commands[key].add_arguments(args))

    def _make_run(self, request: RunRequest, command: ScriptCommand) -> RunRecord:
        """Wait until enough CPU cores are free, run the script, and return the record of the run.

        A run needs one core per process, or all cores if there are fewer.
        """
        num_cores = min(command.num_processes, self._num_cores)
        with self._changed:
            self._changed.wait_for(lambda: self._has_ended or self._num_free_cores >= num_cores)
            self._num_free_cores -= num_cores
        try:
            self._announce_run(request.name)
            return self._launch_processes(command, request).wait()
        finally:
            with self._changed:
                self._num_free_cores += num_cores
                self._changed.notify_all()

    def _launch_processes(self, command: ScriptCommand, request: RunRequest) -> RunningScript:
        """Start the processes of a run. If the session ends meanwhile, end them at once.

        Raises:
            VerifyError: If the session has ended.
        """
        server = None
        if self._servers:
            server = self._servers[0 if request.name in _FIRST_SERVER_RUNS else 1]
        if not self._has_ended:
            running = RunningScript(command, request, 3 * self._options.time_limit + 20, server)
            with self._changed:
                self._running.append(running)
                if not self._has_ended:
                    return running
            running.end()
        raise VerifyError("the verification has ended")

    def _check_baseline(self, baseline: RunRecord) -> None:
        """Raise an error unless the script's single-process run succeeded, created an Accelerator and made updates.

        Args:
            baseline: Record of the single-process run.

        Raises:
            VerifyError: If the script fails, creates no Accelerator, or makes no update.
        """
        last_lines = "\n".join(f"    {line}" for line in baseline.output.splitlines()[-25:])
        reference = (
            "(docs/verify.md#if-a-script-cannot-be-verified). Its last lines:\n"
            f"{last_lines or '    (it printed nothing)'}"
        )
        requirement = (
            "verify needs a script that trains with headway.Accelerator, with our Trainer, or under Accelerate's name (add --as "
            "accelerate)"
        )
        if baseline.has_stalled:
            raise VerifyError(f"{self._describe_slowness(baseline, requirement)} {reference}")
        if baseline.code != 0:
            raise VerifyError(
                f"the script fails on one process (exit code {baseline.code}): {describe_failure(baseline)} {reference}"
            )
        if not baseline.facts_by_rank:
            raise VerifyError(f"the script ended without creating an Accelerator; {requirement} {reference}")
        if not baseline.rank0_updates:
            reason = self._describe_missing_step(baseline) or (
                "verify counts optimizer.step() of a prepared optimizer after accelerator.backward(); give arguments with which "
                f"the script trains for at least {self._options.num_updates} updates"
            )
            raise VerifyError(f"the script ended without an update. {reason} {reference}")

    def _describe_slowness(self, baseline: RunRecord, requirement: str) -> str:
        """Return the error message for a single-process run that was ended because it made no progress.

        Args:
            baseline: Record of the single-process run.
            requirement: Phrase that says which scripts verify needs.
        """
        where = describe_stuck(read_stacks(Path(baseline.request.folder), 1))
        where = f"; {where}" if where else ""
        limit_hint = f"--time_limit {max(300, 2 * self._options.time_limit):.0f}"
        load = describe_load()
        load_hint = f"{load[0].upper()}{load[1:]}. Wait until it is idle, or set {limit_hint}. " if load else ""
        if baseline.code is None and not baseline.facts_by_rank:
            time_hint = load_hint or f"If it only needs more time, set {limit_hint}. "
            return f"the script created no Accelerator in {baseline.seconds:.0f} s{where}. {time_hint}{requirement}"
        progress = (
            f"the script made {baseline.last_update} of {self._options.num_updates} updates in {baseline.seconds:.0f} s on one "
            f"process{where}. {load_hint}"
        )
        missing_step = self._describe_missing_step(baseline)
        if missing_step:
            return f"{progress}{missing_step}."
        size_hint = "it smaller data or a smaller model, or fewer updates (--updates 3)"
        if load_hint:
            return f"{progress}Otherwise, give {size_hint}"
        return f"{progress}Give {size_hint}, or more time ({limit_hint})"

    def _describe_missing_step(self, baseline: RunRecord) -> str:
        """Return what the script lacks if it computed gradients but made no update; else "".

        Args:
            baseline: Record of the single-process run.
        """
        num_backwards = int(baseline.rank0_facts.num_backwards)
        if not num_backwards or baseline.last_update:
            return ""
        times = "once" if num_backwards == 1 else f"{num_backwards} times"
        return (
            f"It called accelerator.backward() {times}, but no optimizer.step() of a prepared optimizer followed: call step() on the "
            "optimizer that accelerator.prepare() returned. If the script accumulates gradients, give it enough batches for an "
            "update"
        )

"""`headway verify` for a function instead of a script: `accelerator.verify` in a notebook.

The function is pickled, as `notebook_launcher` does, and each run calls it in new processes. The results of earlier
notebook cells do not influence the runs.
"""

import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.common import env
from headway.common.optional import require
from headway.core.config.launch import SETTINGS
from headway.core.config.load import SettingValue, merge_layers
from headway.core.config.values import check_file_value
from headway.core.training.run import Run
from headway.errors import ConfigError
from headway.launch import machine
from headway.launch.order import Program
from headway.launch.plan import make_plan
from headway.verify.command import choose_code
from headway.verify.proofs import PROOFS
from headway.verify.runs import ScriptCommand
from headway.verify.session import VerifyOptions, VerifySession
from headway.verify.table import format_summary, format_table
from headway.verify.verdict import Verdict, shorten_paths


@dataclass(frozen=True)
class FunctionProofs:
    """Result of verifying a training function.

    Attributes:
        verdicts: Results of the proofs, in the order of the table.
        seconds: Duration of all runs together.
    """

    verdicts: tuple[Verdict, ...]
    seconds: float

    @property
    def passed(self) -> bool:
        """Whether no proof failed and at least one passed."""
        return choose_code(self.verdicts) == 0

    @property
    def statuses(self) -> dict[str, str]:
        """Status of each proof ("PASS", "FAIL" or "NOT CHECKED"), by the key of the proof, such as "resume"."""
        return {each.key: each.status for each in self.verdicts}

    def describe(self) -> str:
        """Return the table of proofs, and the details of the failed proofs, as text."""
        return f"{format_table(self.verdicts)}\n\n{format_summary(self.verdicts, self.seconds)}"

    def __str__(self) -> str:
        return self.describe()

    def __repr__(self) -> str:
        # A notebook shows this text below the table, which `verify_function` has printed.
        return f"<{format_summary(self.verdicts, self.seconds)}>"


def verify_function(
    run: Run,
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    *,
    num_processes: int = 2,
    strategy: str | None = None,
    only: Sequence[str] | None = None,
    skip: Sequence[str] = (),
    updates: int = 6,
    time_limit: float = 60.0,
) -> FunctionProofs:
    """Verify a function that builds an Accelerator and trains, and print the table of proofs.

    If this machine has fewer devices than `num_processes`, all runs use the CPU, and a note about it is printed.

    Args:
        run: Run of the Accelerator in the notebook.
        function: Function that creates its own Accelerator and trains.
        args: Positional arguments of the function.
        num_processes: Number of processes, at least 2, in each run that is compared with the single-process run.
            Default: 2.
        strategy: Layout, such as "fsdp", of an additional run with `num_processes` processes. Default: None, no such
            run.
        only: Keys of the proofs to run. Default: None, all proofs.
        skip: Keys of the proofs to leave out. Default: (), none.
        updates: Number of updates of each run. Default: 6.
        time_limit: Number of seconds that each run may go without a batch or an update. Default: 60.

    Raises:
        ConfigError: If an argument is invalid, or if this process is part of a run on several processes.
        VerifyError: If the function fails, creates no Accelerator, or makes no update in the single-process run.
        OptionalDependencyMissing: If cloudpickle is not installed.
    """
    cloudpickle = require("cloudpickle", "accelerator.verify needs", "cloudpickle")
    _check_arguments(run, function, args, num_processes)
    keys = _choose_proofs(only, skip, strategy)
    environment = env.copy_variables()
    this_machine = machine.inspect_machine(environment)
    is_on_cpu = run.runtime.device.type == "cpu" or len(this_machine.device_ids) < num_processes
    notes = []
    if is_on_cpu and run.runtime.device.type != "cpu":
        notes.append("there are fewer devices: all runs use the CPU")
    with tempfile.TemporaryDirectory(prefix="headway-verify-cell-") as folder:
        Path(folder, "call").write_bytes(cloudpickle.dumps((function, tuple(args))))
        program = Program("headway.launch.cell", (folder,), "module")
        # The processes must find the modules of the function.
        paths = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)

        def make_command(count: int, layout: str | None = None) -> ScriptCommand:
            values = {"num_processes": count, "cpu": is_on_cpu or None, "strategy": layout, "module": True}
            settings = {name: _check_setting(name, value) for name, value in values.items() if value is not None}
            planned = make_plan(merge_layers([settings]), program, this_machine, {**environment, "PYTHONPATH": paths})
            variables = {**planned.additions, "PYTHONPATH": paths}
            return ScriptCommand(planned.argv, variables, (program.kind, program.target, *program.args), count)

        commands = {"one": make_command(1), "several": make_command(num_processes)}
        if strategy:
            commands["layout"] = make_command(num_processes, strategy)
        options = VerifyOptions(
            commands=commands,
            is_forked=is_on_cpu,
            num_processes=num_processes,
            layout_name=strategy or "",
            num_updates=updates,
            time_limit=time_limit,
            proofs=keys,
        )
        start_time = time.monotonic()
        with VerifySession(options, lambda name: None) as session:
            runs = session.run()
            verdicts = tuple(shorten_paths(check(runs)) for key, check in PROOFS.items() if key in keys)
        result = FunctionProofs(verdicts, time.monotonic() - start_time)
    print(*notes, result.describe(), sep="\n")
    return result


def _check_arguments(run: Run, function: Any, args: Any, num_processes: int) -> None:
    """Raise `ConfigError` if arguments of `verify_function` are invalid, or if `run` has several processes.

    Args:
        run: Run of the Accelerator in the notebook.
        function: Value that must be callable.
        args: Value that must be a sequence of positional arguments, but no string.
        num_processes: Value that must be at least 2.
    """
    if run.runtime.world_size > 1:
        raise ConfigError(
            "accelerator.verify starts processes itself: call it in a notebook or in a script on one process"
        )
    if not callable(function):
        raise ConfigError(f"accelerator.verify got {function!r}; give the function itself: accelerator.verify(train)")
    if isinstance(args, str) or not isinstance(args, Sequence):
        raise ConfigError(f"accelerator.verify got args={args!r}; give a tuple of arguments: args=({args!r},)")
    if num_processes < 2:
        raise ConfigError(f"verify compares one process with several; num_processes={num_processes} must be at least 2")


def _check_setting(name: str, value: Any) -> SettingValue:
    """Return a setting of `headway launch`, with the argument of `accelerator.verify` as its origin in messages.

    Raises:
        ConfigError: If the value is invalid.
    """
    origin = f"accelerator.verify({name}=...)"
    return SettingValue(check_file_value(SETTINGS[name], value, origin), origin)


def _choose_proofs(only: Sequence[str] | None, skip: Sequence[str], strategy: str | None) -> tuple[str, ...]:
    """Return the keys of the proofs to run, in the order of the table.

    Args:
        only: Keys of the proofs to run; None for all.
        skip: Keys of the proofs to leave out.
        strategy: Layout of the run that is compared with the single-process run. None if there is no such run.

    Raises:
        ConfigError: If a key does not name a proof, or if no proof is left that can be checked.
    """
    wanted = [only] if isinstance(only, str) else list(only or PROOFS)
    unwanted = [skip] if isinstance(skip, str) else list(skip)
    for word in (*wanted, *unwanted):
        if word not in PROOFS:
            raise ConfigError(f"{word!r} is not a proof; there are {', '.join(PROOFS)}")
    proofs = tuple(word for word in PROOFS if word in wanted and word not in unwanted)
    if not proofs:
        raise ConfigError(f"only={only!r} and skip={skip!r} leave no proof to run; there are {', '.join(PROOFS)}")
    if proofs == ("layout",) and not strategy:
        raise ConfigError("the proof 'layout' needs a layout to compare with: add one, such as strategy='fsdp'")
    return proofs

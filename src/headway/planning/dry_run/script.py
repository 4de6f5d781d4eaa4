"""Run a user's script on tensors without values up to its second update (`headway estimate --script`).

The script runs as usual, with its arguments, data and loop, in the process of the command. When it prepares a model,
the model's tensors lose their values. Its loaders read real batches, but pass on only the shapes of their tensors. All
memory is traced from the first batch on. Nothing is saved, loaded or tracked. The script ends after the second update
of every optimizer. If one of the optimizers steps less often, the script ends after the 50th update of another one.
"""

import importlib.util
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from headway.accelerator import Accelerator
from headway.common import scope
from headway.core.runtime.dry_run import mark_dry_run
from headway.errors import ConfigError, HeadwayError
from headway.extras.eager_calls import EagerCalls
from headway.forecasting.device.devices import Device
from headway.forecasting.tracing.recipe import NUM_UPDATES
from headway.forecasting.tracing.trace import Trace
from headway.forecasting.tracing.trace_errors import is_trace_error, make_trace_error
from headway.planning.dry_run.script_accelerator import make_accelerator_class
from headway.planning.dry_run.script_loaders import UnpreparedLoaders
from headway.planning.dry_run.script_trace import ScriptDryRun, ScriptFinished


def dry_run_script(script: str, arguments: Sequence[str], device: Device, is_module: bool = False) -> tuple[Trace, int]:
    """Run a script up to its second update, and trace its memory. The process must not be used for anything else.

    Args:
        script: Path of a Python file, or name of a module, whose training loop uses Headway's Accelerator, or
            Accelerate's if Headway replaces Accelerate.
        arguments: Arguments of the script.
        device: Device to forecast for.
        is_module: Whether `script` is the name of a module, as for `python -m`. Default: False.

    Returns:
        The trace of the script's first updates, and the number of samples in its first batch. The number is 0 if
        unknown.

    Raises:
        ConfigError: If there is no such file or module, or if the script made no update or ended with an error code before its
            second update.
        UnsupportedError: If the step cannot be traced. The message names the operation and the user's line.
        Exception: Any exception that the script raises before its first batch.
    """
    if not is_module and not Path(script).is_file():
        raise ConfigError(f"there is no script {script}")
    # As with `python -m`, modules of the current folder come first.
    sys.path.insert(0, os.getcwd() if is_module else str(Path(script).resolve().parent))
    if is_module and not _has_module(script):
        raise ConfigError(f"there is no module {script} in the current folder or among the installed packages")
    dry_run = ScriptDryRun(device)
    # The Trainer and Accelerate's names are imported after this replacement, so they use the replaced class.
    mark_dry_run()
    scope.get_or_create(EagerCalls).install(has_script_begun=False)
    module = sys.modules[Accelerator.__module__]
    module.__dict__["Accelerator"] = make_accelerator_class(dry_run)
    sys.modules["headway"].__dict__.pop("Accelerator", None)
    sys.argv = [script, *arguments]
    try:
        _run_script(script, is_module, dry_run)
    finally:
        trace = dry_run.finish_trace()
    if dry_run.num_updates == 0:
        raise ConfigError(
            f"{script} made no update: it must prepare a model, an optimizer and a loader with an Accelerator, and step the optimizer"
        )
    return trace, dry_run.batch_size or 0


def _has_module(name: str) -> bool:
    """Whether a module with this name can be imported."""
    try:
        return importlib.util.find_spec(name) is not None
    except (ModuleNotFoundError, ValueError):  # a package on the way does not exist, or the name is relative
        return False


def _run_script(script: str, is_module: bool, dry_run: ScriptDryRun) -> None:
    """Run a script until it ends. Errors after the updates that the trace needs are ignored.

    Args:
        script: Path of a Python file, or name of a module.
        is_module: Whether `script` is the name of a module.
        dry_run: Dry run whose Accelerator the script creates.

    Raises:
        ConfigError: If the script ended with an error code before its second update.
        UnsupportedError: If the step cannot be traced.
        Exception: Any exception that the script raises before its first batch.
    """
    try:
        with UnpreparedLoaders(dry_run):
            if is_module:
                runpy.run_module(script, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(script, run_name="__main__")
    except BaseException as error:
        is_traced = dry_run.num_updates >= NUM_UPDATES
        if is_traced and isinstance(error, Exception | ScriptFinished | SystemExit):
            return  # the trace is complete, so the error makes no difference
        if is_traced or isinstance(error, HeadwayError):
            raise
        if isinstance(error, SystemExit):
            if error.code in (None, 0):
                return
            raise ConfigError(f"{script} ended with {error.code!r} before its second update") from error
        if isinstance(error, Exception) and (dry_run.is_running or is_trace_error(error)):
            raise make_trace_error(error, dry_run.tracker.last_operation) from error
        raise

"""`Behavior`: rules that differ between Headway's own `Accelerator` and subclasses for other libraries' scripts.

`headway.compat.accelerate.accelerator` defines the rules of Accelerate. The core itself has no rules of Accelerate.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from headway.core.data.loading_rules import LoadingRules
from headway.core.training.loss_policy import LossPolicy
from headway.core.training.prepared.optimizer import PreparedOptimizer
from headway.core.training.prepared.scheduler import PreparedScheduler
from headway.core.training.windows import AccumulationWindows


def _choose_no_hook() -> None:
    """Return None: no hook has to run after the user's save hooks."""


@dataclass(frozen=True)
class Behavior:
    """Rules of an Accelerator for training, clipping, prepared objects, loaders and checkpoints.

    The defaults are Headway's own rules. An Accelerator reads them once, at construction, and passes each of its parts
    the rules that concern it.

    Attributes:
        loss_policy: Policy for averaging losses. The argument `loss_policy` of the Accelerator takes precedence.
        windows: Class of the accumulation windows, which decides when a window ends.
        clips_partial_gradients: Whether clipping also changes the partial gradients of an unfinished accumulation
            window.
        optimizer: Class of prepared optimizers.
        scheduler: Class of prepared schedulers.
        loading_rules: Rules by which loaders order, read and split data.
        keeps_precision: Whether a model still runs under autocast after `free_memory()` has released it.
        refuses_drift: Whether to raise an error if models or optimizers differ between ranks. False: only a warning.
        refuses_leaks: Whether to raise an error if a model mixes the documents that transformers'
            `DataCollatorWithFlattening` has packed, and to turn off its cache of keys and values. False: only a
            warning.
        repeats_evaluations: Whether a run that saved during an evaluation repeats that evaluation from its start when
            it resumes.
        resume_method: Method with which programs continue from a checkpoint, for messages: "resume" or "load_state".
        choose_last_save_hook: Function that returns the hook to call after all other save hooks, or None. It is called
            at each save.
    """

    loss_policy: LossPolicy = field(default_factory=LossPolicy)
    windows: type[AccumulationWindows] = AccumulationWindows
    clips_partial_gradients: bool = False
    optimizer: type[PreparedOptimizer] = PreparedOptimizer
    scheduler: type[PreparedScheduler] = PreparedScheduler
    loading_rules: LoadingRules = field(default_factory=LoadingRules)
    keeps_precision: bool = False
    refuses_drift: bool = True
    refuses_leaks: bool = True
    repeats_evaluations: bool = True
    resume_method: str = "resume"
    choose_last_save_hook: Callable[[], Callable[..., Any] | None] = _choose_no_hook

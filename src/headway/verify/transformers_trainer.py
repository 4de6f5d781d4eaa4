"""Checkpoints of transformers' Trainer, which `headway verify` observes through a callback of that Trainer.

This Trainer writes and reads its checkpoints itself, without the Accelerator's methods for saving and loading.
"""

import os
import sys
from typing import Any, Protocol

from headway.verify.request import RunRequest, redirect_path


class _Recorder(Protocol):
    """Recorder to which saves and loads are reported. `RunRecorder` implements it."""

    def record_save(self, folder: str) -> None:
        """Record that the Trainer has saved a checkpoint in a folder."""

    def record_load(self, num_updates: int, folder: str) -> None:
        """Record that the Trainer has loaded a checkpoint from a folder, after `num_updates` updates."""


def watch_transformers_trainer(recorder: _Recorder, request: RunRequest) -> None:
    """Add a callback to each Trainer of transformers that this process creates from now on.

    The callback saves a checkpoint if the request asks for one, reports each save and load, and redirects an absolute
    output folder to the scratch folder. Do nothing if the script has not imported this Trainer. The function can be
    called when the Trainer's Accelerator is created, because the Trainer reads its list of default callbacks later.

    Args:
        recorder: Recorder of the run.
        request: Options of the run.
    """
    module: Any = sys.modules.get("transformers.trainer")
    if module is None:
        return
    from transformers.trainer_callback import TrainerCallback

    class CheckpointCallback(TrainerCallback):
        """Callback that saves a checkpoint when the request asks for one, and reports each save and load."""

        def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if os.path.isabs(args.output_dir):
                args.output_dir = str(redirect_path(args.output_dir, request))

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step:
                recorder.record_load(state.global_step, args.output_dir)

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if request.saves_after and state.global_step == request.saves_after:
                control.should_save = True

        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            recorder.record_save(args.output_dir)

    module.DEFAULT_CALLBACKS = [*module.DEFAULT_CALLBACKS, CheckpointCallback]

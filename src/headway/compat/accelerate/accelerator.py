"""The Accelerator of `import accelerate` where Headway stands in for it: Headway's, with Accelerate's arithmetic.

Scripts and libraries that were written against Accelerate count on how it divides losses and on float32 outputs; those are
kept here. `headway.Accelerator` itself weighs losses and leaves outputs as they are.
"""

from collections.abc import Sequence
from typing import Any

import torch

from headway.accelerator import Accelerator
from headway.compat.accelerate.batches import convert_to_fp32
from headway.compat.accelerate.changeable import fixed
from headway.compat.accelerate.trackers import makers
from headway.training.windows import ConstantDivision

_UNSET: Any = object()


class AccelerateAccelerator(Accelerator):
    """Headway's Accelerator with Accelerate's arguments and arithmetic.

    Each loss is divided by the accumulation steps, and ranks count alike, whatever the window held; under mixed precision
    outputs of the model are float32.

    Args:
        split_batches: ignored, as Accelerate ignores it; `dataloader_config` has it.
        others: as for `headway.Accelerator`.
    """

    def __init__(
        self,
        device_placement: bool = True,
        split_batches: Any = _UNSET,
        mixed_precision: str | None = None,
        gradient_accumulation_steps: int = 1,
        cpu: bool = False,
        dataloader_config: Any = None,
        deepspeed_plugin: Any = None,
        fsdp_plugin: Any = None,
        torch_tp_plugin: Any = None,
        megatron_lm_plugin: Any = None,
        rng_types: Sequence[str] | None = None,
        log_with: Any = None,
        project_dir: Any = None,
        project_config: Any = None,
        gradient_accumulation_plugin: Any = None,
        step_scheduler_with_optimizer: bool = True,
        kwargs_handlers: list[Any] | None = None,
        dynamo_backend: Any = None,
        dynamo_plugin: Any = None,
        deepspeed_plugins: Any = None,
        parallelism_config: Any = None,
    ) -> None:
        self._project = ""
        super().__init__(
            device_placement=device_placement,
            mixed_precision=mixed_precision,
            gradient_accumulation_steps=None if gradient_accumulation_steps == 1 else gradient_accumulation_steps,
            cpu=cpu or None,
            dataloader_config=fixed(dataloader_config),
            deepspeed_plugin=deepspeed_plugin,
            fsdp_plugin=fsdp_plugin,
            torch_tp_plugin=torch_tp_plugin,
            megatron_lm_plugin=megatron_lm_plugin,
            rng_types=rng_types if rng_types is not None else ("generator",),
            log_with=makers(log_with, lambda: self._project, lambda: self.logging_dir),
            project_dir=project_dir,
            project_config=fixed(project_config),
            gradient_accumulation_plugin=fixed(gradient_accumulation_plugin),
            step_scheduler_with_optimizer=step_scheduler_with_optimizer,
            kwargs_handlers=[fixed(each) for each in kwargs_handlers or ()],
            dynamo_backend=dynamo_backend,
            dynamo_plugin=dynamo_plugin,
            deepspeed_plugins=deepspeed_plugins,
            parallelism_config=parallelism_config,
            loss_policy=ConstantDivision(),
        )

    def init_trackers(self, project_name: str, config: Any = None, init_kwargs: Any = None) -> None:
        """As Headway's; trackers named in `log_with` are made of Accelerate's classes."""
        self._project = project_name
        super().init_trackers(project_name, config, init_kwargs)

    def prepare(self, *objects: Any, device_placement: list[bool] | None = None, strict: bool = False) -> Any:
        """As Headway's, and under mixed precision models give float32."""
        prepared = super().prepare(*objects, device_placement=device_placement, strict=strict)
        for each in objects:
            self._upcast(each)
        return prepared

    def prepare_model(
        self, model: torch.nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> torch.nn.Module:
        """As Headway's, and under mixed precision the model gives float32."""
        prepared = super().prepare_model(model, device_placement, evaluation_mode)
        self._upcast(prepared)
        return prepared

    def _upcast(self, model: Any) -> None:
        if isinstance(model, torch.nn.Module) and self.precision.is_mixed:
            model.register_forward_hook(lambda module, inputs, outputs: convert_to_fp32(outputs))

"""Mistakes in arguments."""

from typing import Any

import torch
from torch import nn

from headway import (
    Accelerator,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    ProjectConfiguration,
    TrainingArguments,
)
from tests.wrong_use.row import EQUAL, Section, error, plain_error
from tests.wrong_use.script import Script, train

section = Section("Arguments")
row = section.row

ONE = {"ddp": None, "fsdp": None, "tp": None}
"""Cells of a mistake whose result does not depend on the layout, so that one process suffices."""


@row("a misspelled keyword: `Accelerator(mixed_precison=...)`", error("did you mean mixed_precision?"), **ONE)
def keyword(s: Script) -> None:
    Accelerator(mixed_precison="bf16")


@row("a misspelled keyword: `ProjectConfiguration(total_limits=...)`", error("did you mean total_limit?"), **ONE)
def keyword_of_a_configuration(s: Script) -> None:
    ProjectConfiguration(total_limits=3)


@row("a misspelled keyword: `TrainingArguments(learning_rates=...)`", error("did you mean learning_rate?"), **ONE)
def keyword_of_the_trainer(s: Script) -> None:
    TrainingArguments(learning_rates=0.1)


@row("`mixed_precision='float16'`", error("fp16"), **ONE)
def unknown_precision(s: Script) -> None:
    Accelerator(mixed_precision="float16", cpu=True)


@row("`strategy='fspd'`", error("did you mean fsdp?"), **ONE)
def unknown_strategy(s: Script) -> None:
    Accelerator(strategy="fspd", cpu=True)


@row("`gradient_accumulation_steps=0`", error("1 or more"), **ONE)
def no_steps(s: Script) -> None:
    s.start(steps=0)


@row("`gradient_accumulation_steps='2'`", error("1 or more"), **ONE)
def steps_as_text(s: Script) -> None:
    s.start(steps="2")  # type: ignore[arg-type]


@row("`gradient_accumulation_steps` and a `GradientAccumulationPlugin`", error("not both"), **ONE)
def steps_twice(s: Script) -> None:
    s.start(gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=2))


@row("the same options object passed twice", error("GradScalerKwargs"), **ONE)
def options_twice(s: Script) -> None:
    s.start(handlers=(GradScalerKwargs(), GradScalerKwargs()))


@row("an object in `kwargs_handlers` that is not an options object", error("kwargs_handlers"), **ONE)
def no_options(s: Script) -> None:
    s.start(handlers=({"find_unused_parameters": True},))


@row("options of another layout, which have no effect", EQUAL)
def options_of_another(s: Script) -> None:
    train(*s.prepare_all(handlers=(DistributedDataParallelKwargs(bucket_cap_mb=1),)))


@row("two Accelerators with different settings", EQUAL, by_hand=lambda s: 2.0, **ONE)
def two_settings(s: Script) -> Any:
    accelerators = s.start(mixed_precision="bf16"), s.start(mixed_precision="no")
    return float(len({each.mixed_precision for each in accelerators}))


@row("`clip_grad_norm_(model, 1.0)` instead of `model.parameters()`", plain_error("not iterable"))
def clips_the_model(s: Script) -> None:
    accelerator, model, *_ = s.prepare_all()
    accelerator.clip_grad_norm_(model, 1.0)


@row("`accelerator.backward()` without a loss", plain_error("missing 1 required positional argument: 'loss'"))
def no_loss(s: Script) -> None:
    accelerator, *_ = s.prepare_all()
    accelerator.backward()


@row("`backward(loss, weight=-1)`", error("0 or more"))
def negative_weight(s: Script) -> None:
    accelerator, model, *_ = s.prepare_all()
    accelerator.backward(model(torch.ones(2, 4)).sum(), weight=-1)


@row("`backward(loss, reduction='avg')`", error("allowed: 'mean'"))
def unknown_reduction(s: Script) -> None:
    accelerator, model, *_ = s.prepare_all()
    accelerator.backward(model(torch.ones(2, 4)).sum(), reduction="avg")


@row("`on_non_finite='ignore'`", error("on_non_finite"), **ONE)
def unknown_policy(s: Script) -> None:
    s.start(on_non_finite="ignore")


@row(
    "a tensor-parallel plan that matches no module",
    error("has no such module"),
    single=None,
    ddp=None,
    fsdp=None,
)
def plan_of_another(s: Script) -> None:
    accelerator = s.start()
    accelerator.prepare(nn.Sequential(nn.Linear(2, 2)))


@row(
    "a model without a plan under tensor parallelism",
    error("TensorParallelOptions(plan="),
    single=None,
    ddp=None,
    fsdp=None,
)
def no_plan(s: Script) -> None:
    accelerator = Accelerator(cpu=True, strategy="tp")
    accelerator.prepare(nn.Linear(2, 2))

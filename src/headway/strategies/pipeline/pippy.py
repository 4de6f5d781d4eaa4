"""Inference through a pipeline: a model's blocks spread over the processes, and a batch in parts that follow each other."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from headway.config.mesh import Layout
from headway.config.parallelism import PipelineOptions
from headway.errors import ConfigError
from headway.runtime import process
from headway.runtime.collectives.checked import Collectives
from headway.strategies.pipeline.strategy import PipelineStrategy


def prepare_pippy(
    model: torch.nn.Module,
    split_points: str | Sequence[str] = "auto",
    no_split_module_classes: str | Sequence[str] | None = None,
    example_args: tuple[Any, ...] = (),
    example_kwargs: Mapping[str, Any] | None = None,
    num_chunks: int | None = None,
    gather_output: bool = False,
) -> torch.nn.Module:
    """Spread a model over the processes for inference: each keeps some of its blocks, on its device.

    The model comes back as the same object, in evaluation mode. Call it on every process with the same inputs; the batch passes
    through in chunks. For training, use `Accelerator(strategy="pp")`.

    Args:
        model: with its values, on every process.
        split_points: "auto": equally many blocks on each process; or the name of the first block of each process but the first.
        no_split_module_classes: class names of the blocks; None: what is repeated in the module tree.
        example_args: accepted for Accelerate's sake: shapes are found when the model is called.
        example_kwargs: as well.
        num_chunks: parts of a batch; None: as many as there are processes. A batch of fewer rows has a row in each.
        gather_output: outputs on all processes; False: on the last one, and None elsewhere.

    Raises:
        PrepareError: the model has fewer repeated blocks than there are processes.
        ConfigError: a split point that is no block, or a number of chunks below 1.
    """
    if split_points != "auto" and isinstance(split_points, str):
        raise ConfigError(f"split_points={split_points!r}; give 'auto' or a list of names of blocks")
    if num_chunks is not None and (isinstance(num_chunks, bool) or num_chunks < 1):
        raise ConfigError(f"num_chunks={num_chunks!r}; give a whole number, 1 or more, or None")
    runtime = process.start()
    collectives = Collectives(runtime)
    model.eval()
    if collectives.world_size == 1:
        return model.to(runtime.device)
    named = (no_split_module_classes,) if isinstance(no_split_module_classes, str) else no_split_module_classes
    options = PipelineOptions(
        num_microbatches=num_chunks or collectives.world_size,
        split=() if split_points == "auto" else tuple(split_points),
        blocks=tuple(named or ()),
    )
    strategy = PipelineStrategy(collectives, Layout(pp=collectives.world_size), options)
    strategy.setup(model)
    strategy.answer_only(gather_output)
    return model

"""`prepare_pippy`: distribute a model's blocks over processes, for inference without an Accelerator."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from headway.core.config.mesh import Layout
from headway.core.config.parallelism import PipelineOptions
from headway.core.runtime import process
from headway.core.runtime.collectives.checked import Collectives
from headway.errors import ConfigError
from headway.layouts.pipeline.strategy import PipelineStrategy


def prepare_pippy(
    model: torch.nn.Module,
    split_points: str | Sequence[str] = "auto",
    no_split_module_classes: str | Sequence[str] | None = None,
    example_args: tuple[Any, ...] = (),
    example_kwargs: Mapping[str, Any] | None = None,
    num_chunks: int | None = None,
    gather_output: bool = False,
) -> torch.nn.Module:
    """Distribute a model over processes for inference: each process keeps some of the model's blocks on its device.

    The given model is returned, in evaluation mode. Call both this function and the model on every process, the model
    with equal inputs. A batch passes through the processes in chunks. A single process only moves the model to its
    device. An Accelerator is not needed. For training, use `Accelerator(strategy="pp")`.

    Args:
        model: Model to distribute, built on every process. The values of process 0 are used.
        split_points: "auto" for an equal number of blocks per process, or a list with the name of the first block of
            each process after process 0. Default: "auto".
        no_split_module_classes: Class names of the blocks. None (the default): the blocks are the modules that are
            repeated in the module tree.
        example_args: Ignored; accepted for compatibility with Accelerate. Shapes are found when the model is called.
        example_kwargs: Ignored; accepted for compatibility with Accelerate.
        num_chunks: Number of chunks into which a batch is split. None (the default): the number of processes. A batch
            with fewer rows is split into chunks of one row.
        gather_output: Whether all processes get the outputs. False: only the last process gets them, and the others get
            None. Default: False.

    Raises:
        PrepareError: If the model cannot be split, for example because it has fewer repeated blocks than there are
            processes.
        ConfigError: If `num_chunks` is less than 1, or if `split_points` does not name one block for each process after
            process 0, in order.
        UnsupportedError: If the model is compiled as a whole.

    Example::

        model = prepare_pippy(model, gather_output=True)
        with torch.no_grad():
            outputs = model(inputs)
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
    block_classes = (no_split_module_classes,) if isinstance(no_split_module_classes, str) else no_split_module_classes
    options = PipelineOptions(
        num_microbatches=num_chunks or collectives.world_size,
        split=() if split_points == "auto" else tuple(split_points),
        blocks=tuple(block_classes or ()),
    )
    strategy = PipelineStrategy(collectives, Layout(pp=collectives.world_size), options)
    strategy.setup_model(model)
    strategy.serve_inference_only(gather_output)
    return model

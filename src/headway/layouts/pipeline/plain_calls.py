"""Direct calls of a pipelined model (`outputs = model(inputs)` on every rank), and the backward of their outputs.

The blocks run in micro-batches (GPipe). The rest of the model runs once, on the entire batch, on the last stage. All
ranks get its outputs, so that the script's loss is equal everywhere. The outputs are leaves of the script's autograd
graph. After the script's backward, the last stage gets the gradients of the outputs, continues backward, and sends
gradients to the previous stages.
"""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from headway.core.runtime.collectives.tree import Tree, concatenate, find_batch_size, list_tensors
from headway.errors import StateError, UnsupportedError
from headway.layouts.pipeline.runner import (
    PipelineBatch,
    PipelineRunner,
    rebuild_error,
    start_transfers,
    wait_for_transfers,
)
from headway.layouts.pipeline.stage_rng import advance_generators, isolate_generators


class OutputGradients:
    """Gradients that the script's backward computes for the outputs of one call of the model.

    The autograd graph of the outputs holds this object, so it is deleted once the script has dropped the outputs.

    Attributes:
        grads: Gradient of each output that requires one, or None for an output that backward has not reached. None:
            backward has reached no output.
    """

    grads: tuple[torch.Tensor | None, ...] | None = None


class _DetachedOutputs(torch.autograd.Function):
    """Autograd function that returns outputs to the script, detached from the graph of the stages.

    The script's autograd graph begins at these outputs. The script's backward ends there, and stores their gradients.
    """

    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, output_grads: OutputGradients, *values: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Return the values as new tensors that require gradients.

        Args:
            ctx: Context of the autograd function.
            anchor: Tensor that requires gradients, without which autograd would record nothing.
            output_grads: Object that backward fills.
            values: Outputs of the model.
        """
        ctx.output_grads = output_grads
        ctx.set_materialize_grads(False)
        return tuple(value.detach() for value in values)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        """Store the gradients of the outputs, and end the backward of this part of the graph. Inputs get no gradients."""
        ctx.output_grads.grads = grads
        return (None, None, *[None] * len(grads))


@dataclass
class PendingForward:
    """Record of a model call whose backward might still run.

    Attributes:
        output_grads: Weak reference to the gradients of the outputs. It is dead once the script has dropped the
            outputs.
        stage_graphs: Batch whose stages hold the autograd graphs of the micro-batches. None: backward has run.
        outputs: Outputs of the model that require gradients, with the autograd graph of the computation after the
            blocks. Empty except on the last stage, and after backward.
        block_outputs: Outputs of the last block for the entire batch. They are leaves of the autograd graph of
            `outputs`. Empty except on the last stage, and after backward.
    """

    output_grads: "weakref.ref[OutputGradients]"
    stage_graphs: PipelineBatch | None
    outputs: list[torch.Tensor]
    block_outputs: list[torch.Tensor]


class _ForwardResult(NamedTuple):
    """Result of the forward of a direct call on this rank. Both lists are empty except on the last stage.

    Attributes:
        description: Description of the model's outputs, a `StageActivation`.
        outputs: Tensors of the outputs.
        block_outputs: Outputs of the last block for the entire batch.
        batch: Batch with the autograd graphs of this rank's stages.
    """

    description: Any
    outputs: list[torch.Tensor]
    block_outputs: list[torch.Tensor]
    batch: PipelineBatch


class PlainCalls:
    """Direct calls of a pipelined model, and the backward of their outputs.

    Args:
        runner: Runner of the model's pipeline.
    """

    def __init__(self, runner: PipelineRunner) -> None:
        self._runner = runner
        self._pending: list[PendingForward] = []

    # ---------------------------------------------------------------- forward

    def __call__(
        self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], is_shared: bool = True
    ) -> Any:
        """Run the model on a batch and return its outputs.

        Args:
            call: The model's original `__call__`.
            args: Positional arguments for the entire batch.
            kwargs: Keyword arguments for the entire batch.
            is_shared: Whether all ranks get the outputs. False: only the rank of the last stage gets them, and the
                others get None. Default: True.

        Raises:
            UnsupportedError: If gradients are needed and the schedule is not GPipe.
        """
        runner = self._runner
        needs_grads = torch.is_grad_enabled() and any(p.requires_grad for p in runner.model.parameters())
        if needs_grads and runner.options.schedule != "gpipe":
            raise UnsupportedError(
                f"PipelineOptions(schedule={runner.options.schedule!r}) runs forward and backward in turn, so {runner.router.kind} "
                "cannot be called with gradients; use accelerator.forward_backward(batch, fn), or schedule='gpipe'"
            )
        result = self._forward(call, args, kwargs)
        if is_shared:
            return self._share_outputs(result, needs_grads)
        return result.description.fill_slots(result.outputs) if runner.is_last else None

    def _forward(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> _ForwardResult:
        """Run the blocks in micro-batches, and on the last stage the rest of the model on the entire batch.

        Args:
            call: The model's original `__call__`.
            args: Positional arguments for the entire batch.
            kwargs: Keyword arguments for the entire batch.

        Raises:
            HeadwayError: On the other ranks, if a stage fails. The rank of that stage raises the original error.
        """
        runner = self._runner
        last_stage = runner.num_stages - 1
        micro_batches = runner.split_call(args, kwargs)

        def compute_stage(stage_index: int, number: int, received: Tree) -> Tree:
            micro_args, micro_kwargs = micro_batches[number]
            stage_rng.seed_micro_batch(stage_index, number)
            return runner.router.run(stage_index, received, lambda: call(*micro_args, **micro_kwargs))

        failure: Exception | None = None
        result: Any = None
        block_outputs: list[torch.Tensor] = []
        with isolate_generators(runner.group.runtime.hardware) as stage_rng:
            batch = runner.begin_batch(micro_batches, compute_stage, "plain")
            self._run_forwards(batch)
            if runner.is_last:
                try:
                    received, block_outputs = self._join_micro_batches(batch, micro_batches)
                    stage_rng.seed_micro_batch(last_stage, batch.num_microbatches)
                    result = runner.router.run(
                        last_stage, received, lambda: call(*args, **kwargs), runs_to_end=True, is_after_blocks=True
                    )
                except Exception as error:
                    failure = error
        gathered = runner.group.gather_objects((stage_rng.used, runner.make_result(result, failure)))
        advance_generators(set().union(*(used for used, _ in gathered)), runner.device)
        _, (description, error_of_last_stage) = gathered[runner.last_rank]
        if failure is not None:  # the original error, with its traceback
            raise failure
        if error_of_last_stage is not None:
            raise rebuild_error(error_of_last_stage, last_stage, runner.last_rank)
        return _ForwardResult(description, list(list_tensors(result)), block_outputs, batch)

    def _run_forwards(self, batch: PipelineBatch) -> None:
        """Run the forwards of those micro-batches that `PipelineRunner.begin_batch` has not already run."""
        if len(batch.stages) > 1:
            self._runner.run_schedule(batch, has_backward=False)
            return
        (stage,) = batch.stages.values()
        sends: list[dist.Work] = []
        for number in range(batch.num_microbatches):
            if number not in batch.precomputed:
                wait_for_transfers(start_transfers(stage.get_fwd_recv_ops(number)))
                stage.compute(number)
                sends += start_transfers(stage.get_fwd_send_ops(number))
        wait_for_transfers(sends)

    def _join_micro_batches(
        self, batch: PipelineBatch, micro_batches: Sequence[Tree]
    ) -> tuple[Tree, list[torch.Tensor]]:
        """Concatenate the outputs of the model's last block over all micro-batches.

        Return the concatenated tree of tensors, and a list of its tensors.

        Raises:
            UnsupportedError: If an output does not have one row per sample of its micro-batch.
        """
        stage = batch.stages[self._runner.num_stages - 1]
        is_split = batch.num_microbatches > 1
        outputs = [
            stage.activations[number].fill_slots([tensor.detach() for tensor in stage.outputs[number]])
            for number in range(batch.num_microbatches)
        ]
        for output, micro_batch in zip(outputs, micro_batches):
            rows = find_batch_size(micro_batch)
            misfit = next((t for t in list_tensors(output) if is_split and (t.ndim == 0 or t.shape[0] != rows)), None)
            if misfit is not None:
                raise UnsupportedError(
                    f"a block of {self._runner.router.kind} returns a tensor of shape {tuple(misfit.shape)} for {rows} rows, so "
                    "micro-batches cannot be joined along their rows; use accelerator.forward_backward(batch, fn), or "
                    "PipelineOptions(num_microbatches=1)"
                )
        joined = concatenate(outputs) if is_split else outputs[0]
        tensors = list(list_tensors(joined))
        # The tensors are leaves of the graph of the computation after the blocks.
        for tensor, stage_output in zip(tensors, stage.outputs[0]):
            tensor.requires_grad_(stage_output.requires_grad and torch.is_grad_enabled())
        return joined, tensors

    def _share_outputs(self, result: _ForwardResult, needs_grads: bool) -> Any:
        """Broadcast the last stage's outputs to all ranks, prepare their backward, and return them.

        Args:
            result: Result of the forward on this rank.
            needs_grads: Whether gradients are needed.
        """
        runner = self._runner
        if runner.is_last:
            values = [tensor.detach().contiguous() for tensor in result.outputs]
        else:
            values = result.description.allocate_buffers(runner.device)
        runner.group.broadcast_in_place(values, runner.last_rank)
        indices = [index for index, (_, _, requires_grad) in enumerate(result.description.metas) if requires_grad]
        if needs_grads and indices:
            self._pending = [pending for pending in self._pending if pending.output_grads() is not None]
            output_grads, anchor = OutputGradients(), torch.zeros((), device=runner.device, requires_grad=True)
            leaves = _DetachedOutputs.apply(anchor, output_grads, *(values[index] for index in indices))  # type: ignore[no-untyped-call]
            for index, leaf in zip(indices, leaves):
                values[index] = leaf
            own_outputs = [result.outputs[index] for index in indices] if runner.is_last else []
            pending = PendingForward(weakref.ref(output_grads), result.batch, own_outputs, result.block_outputs)
            self._pending.append(pending)
        return result.description.fill_slots(values)

    # ---------------------------------------------------------------- backward

    def list_pending(self) -> list[tuple[PendingForward, OutputGradients | None]]:
        """Return the model calls whose backward might still run.

        Call it before the script's backward, and pass the result to `backward` afterwards. Meanwhile, the result keeps
        the gradients alive.

        Returns:
            Pairs of (call, gradients of its outputs). The gradients are None if the script has dropped the outputs.
        """
        return [(pending, pending.output_grads()) for pending in self._pending]

    def backward(self, calls: list[tuple[PendingForward, OutputGradients | None]], retains_graph: bool) -> None:
        """Continue backward through the stages, for each call whose outputs the script's backward has reached.

        The calls are processed in reverse order, as in autograd.

        Args:
            calls: Pairs that `list_pending` returned before the script's backward. Pairs whose second item is None are
                skipped.
            retains_graph: Whether the script's backward keeps its graph (`retain_graph=True`), which is not supported.

        Raises:
            StateError: If the script's backward reached a call for the second time, or keeps its graph.
        """
        for pending, output_grads in reversed(calls):
            if output_grads is None or output_grads.grads is None:
                continue
            grads, output_grads.grads = output_grads.grads, None
            if pending.stage_graphs is None or retains_graph:
                raise StateError(
                    f"backward was called twice for one forward of {self._runner.router.kind} (or with retain_graph=True), but under "
                    "pipeline parallelism a forward has one backward. Add the losses, and call accelerator.backward once"
                )
            batch, pending.stage_graphs = pending.stage_graphs, None
            self._run_backward(batch, pending, grads)
            pending.outputs, pending.block_outputs = [], []

    def _run_backward(
        self, batch: PipelineBatch, pending: PendingForward, grads: Sequence[torch.Tensor | None]
    ) -> None:
        """Run backward through this rank's stage, one micro-batch at a time. All ranks of the pipeline must call this.

        The last stage first runs backward through the part of the model after the blocks. Each other stage receives the
        gradients of its outputs from the next stage. Each stage except the first sends the gradients of its inputs to the
        previous one.

        Args:
            batch: Batch whose stages hold the autograd graphs of the micro-batches.
            pending: Model call whose backward runs.
            grads: Gradients of the call's outputs; None for an output that backward did not reach. Used only on the last
                stage.
        """
        (stage,) = batch.stages.values()  # direct calls with gradients need GPipe, which has one stage per rank
        stage.has_backward = True
        stage.chunks = batch.num_microbatches  # torch's attribute: number of micro-batches
        if self._runner.is_last:
            self._split_gradients(stage, batch, pending, grads)
        sends: list[dist.Work] = []
        for number in range(batch.num_microbatches):
            wait_for_transfers(start_transfers(stage.get_bwd_recv_ops(number)))
            stage.backward_one_chunk(number)
            sends += start_transfers(stage.get_bwd_send_ops(number))
        wait_for_transfers(sends)

    @staticmethod
    def _split_gradients(
        stage: Any, batch: PipelineBatch, pending: PendingForward, grads: Sequence[torch.Tensor | None]
    ) -> None:
        """Run backward through the part of the model after the blocks, and split the gradients by micro-batch.

        Args:
            stage: Last stage, which gets the gradients.
            batch: Autograd graphs of the micro-batches.
            pending: Model call whose backward runs.
            grads: Gradient of each output of this call. None for outputs that the loss does not use.
        """
        reached = [(output, grad) for output, grad in zip(pending.outputs, grads) if grad is not None]
        torch.autograd.backward([output for output, _ in reached], [grad for _, grad in reached])
        joined_outputs = [tensor for tensor in pending.block_outputs if tensor.requires_grad]
        start = 0
        for number in range(batch.num_microbatches):
            stage_outputs = [tensor for tensor in stage.outputs[number] if tensor.requires_grad]
            num_rows = stage_outputs[0].shape[0] if stage_outputs and stage_outputs[0].ndim else 0
            stage_grads = []
            for joined, output in zip(joined_outputs, stage_outputs):
                if joined.grad is None:
                    stage_grads.append(torch.zeros_like(output))
                elif batch.num_microbatches == 1:
                    stage_grads.append(joined.grad)
                else:
                    stage_grads.append(joined.grad[start : start + num_rows])
            stage.output_grads[number] = stage_grads
            start += num_rows

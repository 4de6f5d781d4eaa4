"""Direct calls of a pipelined model (`outputs = model(inputs)` on every rank), and the backward of their outputs.

The blocks run in micro-batches (GPipe). The rest of the model runs once, on the entire batch, on the last stage. All
ranks get its outputs, so that the script's loss is equal everywhere. The outputs are leaves of the script's autograd
graph. After the script's backward, the last stage gets the gradients of the outputs, continues backward, and sends
gradients to the previous stages.
"""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from headway.core.runtime.collectives.tree import Tree, concatenate, find_batch_size, list_tensors, map_tensors
from headway.errors import StateError, UnsupportedError
from headway.layouts.pipeline.runner import (
    PipelineBatch,
    PipelineRunner,
    advance_generators,
    isolate_generators,
    rebuild_error,
    start_transfers,
    wait_for_transfers,
)


class ReturnedOutputs:
    """Gradients that the script's backward computes for the outputs of one call of the model.

    Attributes:
        grads: Gradient of each output. None: backward has not reached the outputs.
    """

    grads: tuple[torch.Tensor | None, ...] | None = None


class _HandOver(torch.autograd.Function):
    """Autograd function that returns outputs to the script, detached from the graph of the stages.

    The script's autograd graph begins at these outputs. The script's backward ends there, and stores their gradients.
    """

    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, returned: ReturnedOutputs, *values: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.returned = returned
        ctx.set_materialize_grads(False)
        return tuple(value.detach() for value in values)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        ctx.returned.grads = grads
        return (None, None, *[None] * len(grads))


@dataclass
class PendingForward:
    """Record of a model call whose backward might still run.

    Attributes:
        returned: Weak reference to the gradients of the outputs. It is dead once the script has dropped the outputs.
        batch: Autograd graphs of the micro-batches. None: backward has run.
        whole: Outputs that require gradients, with their autograd graph. Empty except on the last stage.
        joined: Outputs of the last block for the entire batch. They are leaves of the autograd graph of `whole`. Empty
            except on the last stage.
    """

    returned: "weakref.ref[ReturnedOutputs]"
    batch: PipelineBatch | None
    whole: list[torch.Tensor]
    joined: list[torch.Tensor]


class PlainCalls:
    """Runner for direct calls of a pipelined model, and for the backward of their outputs.

    Args:
        pipe: Runner of the model's pipeline.
    """

    def __init__(self, pipe: PipelineRunner) -> None:
        self._pipe = pipe
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
        pipe = self._pipe
        learns = torch.is_grad_enabled() and any(p.requires_grad for p in pipe.model.parameters())
        if learns and pipe.options.schedule != "gpipe":
            raise UnsupportedError(
                f"PipelineOptions(schedule={pipe.options.schedule!r}) runs forward and backward in turn, so {pipe.route.kind} cannot "
                "be called with gradients; use accelerator.forward_backward(batch, fn), or schedule='gpipe'"
            )
        activation, found, joined, batch = self._forward(call, args, kwargs)
        if not is_shared:
            return activation.fill_slots(found) if pipe.is_last else None
        return self._share_outputs(activation, found, joined, batch, learns)

    def _forward(
        self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, list[torch.Tensor], list[torch.Tensor], PipelineBatch]:
        pipe, last = self._pipe, self._pipe.num_stages - 1
        pieces = pipe.split_call(args, kwargs)

        def compute_stage(stage_index: int, number: int, received: Tree) -> Tree:
            given, named = pieces[number]
            stage_rng.seed_micro_batch(stage_index, number)
            return pipe.route.run(stage_index, received, lambda: call(*given, **named))

        failure: Exception | None = None
        result: Any = None
        joined: list[torch.Tensor] = []
        with isolate_generators(pipe.group.runtime.hardware) as stage_rng:
            batch = pipe.begin_batch(pieces, compute_stage, "plain")
            self._run_forwards(batch)
            if pipe.is_last:
                try:
                    received, joined = self._join_micro_batches(batch, pieces)
                    stage_rng.seed_micro_batch(last, batch.num_microbatches)
                    result = pipe.route.run(last, received, lambda: call(*args, **kwargs), goes_on=True, is_tail=True)
                except Exception as error:
                    failure = error
        answers = pipe.group.gather_objects((stage_rng.used, pipe.make_answer(result, failure)))
        advance_generators(set().union(*(used for used, _ in answers)), pipe.device)
        _, (activation, problem) = answers[pipe.last_rank]
        if failure is not None:  # the original error, with its traceback
            raise failure
        if problem is not None:
            raise rebuild_error(problem, last, pipe.last_rank)
        return activation, list(list_tensors(result)), joined, batch

    def _run_forwards(self, batch: PipelineBatch) -> None:
        """Run the forwards of those micro-batches that `PipelineRunner.begin_batch` has not already run."""
        if len(batch.stages) > 1:
            self._pipe.run_schedule(batch, has_backward=False)
            return
        (stage,) = batch.stages.values()
        sent: list[dist.Work] = []
        for number in range(batch.num_microbatches):
            if number not in batch.ahead:
                wait_for_transfers(start_transfers(stage.get_fwd_recv_ops(number)))
                stage.compute(number)
                sent += start_transfers(stage.get_fwd_send_ops(number))
        wait_for_transfers(sent)

    def _join_micro_batches(self, batch: PipelineBatch, pieces: Sequence[Tree]) -> tuple[Tree, list[torch.Tensor]]:
        """Concatenate the outputs of the model's last block over all micro-batches.

        Return the concatenated tree of tensors, and a list of its tensors.

        Raises:
            UnsupportedError: If an output does not have one row per sample of its micro-batch.
        """
        stage = batch.stages[self._pipe.num_stages - 1]
        is_split = batch.num_microbatches > 1
        parts = [
            stage.activations[number].fill_slots([tensor.detach() for tensor in stage.outputs[number]])
            for number in range(batch.num_microbatches)
        ]
        for part, piece in zip(parts, pieces):
            rows = find_batch_size(piece)
            odd = next((t for t in list_tensors(part) if is_split and (t.ndim == 0 or t.shape[0] != rows)), None)
            if odd is not None:
                raise UnsupportedError(
                    f"a block of {self._pipe.route.kind} returns a tensor of shape {tuple(odd.shape)} for {rows} rows, so "
                    "micro-batches cannot be joined along their rows; use accelerator.forward_backward(batch, fn), or "
                    "PipelineOptions(num_microbatches=1)"
                )
        whole = concatenate(parts) if is_split else parts[0]
        learning = iter([t.requires_grad for t in stage.outputs[0]])
        whole = map_tensors(lambda t: t.requires_grad_(next(learning) and torch.is_grad_enabled()), whole)
        return whole, list(list_tensors(whole))

    def _share_outputs(
        self, activation: Any, found: list[torch.Tensor], joined: list[torch.Tensor], batch: PipelineBatch, learns: bool
    ) -> Any:
        """Broadcast the last stage's outputs to all ranks, prepare their backward, and return them.

        Args:
            activation: Description of the outputs.
            found: Tensors of the outputs. Empty except on the last stage.
            joined: Outputs of the last block for the entire batch. Empty except on the last stage.
            batch: Autograd graphs of the micro-batches.
            learns: Whether gradients are needed.
        """
        pipe = self._pipe
        values = [t.detach().contiguous() for t in found] if pipe.is_last else activation.allocate_buffers(pipe.device)
        pipe.group.broadcast_in_place(values, pipe.last_rank)
        learning = [number for number, meta in enumerate(activation.metas) if meta[2] and learns]
        if learning:
            self._pending = [each for each in self._pending if each.returned() is not None]
            returned, anchor = ReturnedOutputs(), torch.zeros((), device=pipe.device, requires_grad=True)
            handed = _HandOver.apply(anchor, returned, *(values[number] for number in learning))  # type: ignore[no-untyped-call]
            for number, value in zip(learning, handed):
                values[number] = value
            whole = [found[number] for number in learning] if pipe.is_last else []
            self._pending.append(PendingForward(weakref.ref(returned), batch, whole, joined))
        return activation.fill_slots(values)

    # ---------------------------------------------------------------- backward

    def list_pending(self) -> list[tuple[PendingForward, ReturnedOutputs | None]]:
        """Return the model calls whose backward might still run.

        Returns:
            Pairs of (call, gradients of its outputs). The gradients are None if the script has dropped the outputs.
        """
        return [(each, each.returned()) for each in self._pending]

    def backward(self, held: list[tuple[PendingForward, ReturnedOutputs | None]], is_kept: bool) -> None:
        """Continue backward through the stages, for each call whose outputs the script's backward has reached.

        Args:
            held: Calls that `list_pending` returned before the script's backward.
            is_kept: Whether the script's backward keeps its graph (`retain_graph=True`), which is not supported.

        Raises:
            StateError: If the script's backward reached a call for the second time, or keeps its graph.
        """
        for pending, returned in reversed(held):
            if returned is None or returned.grads is None:
                continue
            grads, returned.grads = returned.grads, None
            if pending.batch is None or is_kept:
                raise StateError(
                    f"backward was called twice for one forward of {self._pipe.route.kind} (or with retain_graph=True), but under "
                    "pipeline parallelism a forward has one backward. Add the losses, and call accelerator.backward once"
                )
            batch, pending.batch = pending.batch, None
            self._run_backward(batch, pending, grads)
            pending.whole, pending.joined = [], []

    def _run_backward(
        self, batch: PipelineBatch, pending: PendingForward, grads: Sequence[torch.Tensor | None]
    ) -> None:
        (stage,) = batch.stages.values()
        stage.has_backward = True
        stage.chunks = batch.num_microbatches  # torch's attribute: number of micro-batches
        if self._pipe.is_last:
            self._split_gradients(stage, batch, pending, grads)
        sent: list[dist.Work] = []
        for number in range(batch.num_microbatches):
            wait_for_transfers(start_transfers(stage.get_bwd_recv_ops(number)))
            stage.backward_one_chunk(number)
            sent += start_transfers(stage.get_bwd_send_ops(number))
        wait_for_transfers(sent)

    @staticmethod
    def _split_gradients(
        stage: Any, batch: PipelineBatch, pending: PendingForward, grads: Sequence[torch.Tensor | None]
    ) -> None:
        """Run backward through the part of the model after the blocks, and split the gradients by micro-batch.

        Args:
            stage: Last stage, which gets the gradients.
            batch: Autograd graphs of the micro-batches.
            pending: Model call whose backward runs.
            grads: Gradients of the outputs of this call.
        """
        reached = [(out, grad) for out, grad in zip(pending.whole, grads) if grad is not None]
        torch.autograd.backward([out for out, _ in reached], [grad for _, grad in reached])
        learning = [tensor for tensor in pending.joined if tensor.requires_grad]
        first = 0
        for number in range(batch.num_microbatches):
            own = [tensor for tensor in stage.outputs[number] if tensor.requires_grad]
            rows = own[0].shape[0] if own and own[0].ndim else 0
            here = slice(first, first + rows) if batch.num_microbatches > 1 else None
            stage.gradients[number] = [
                torch.zeros_like(part) if (grad := tensor.grad) is None else grad if here is None else grad[here]
                for tensor, part in zip(learning, own)
            ]
            first += rows

"""Run micro-batches through pipeline stages: find shapes, run torch's schedules, synchronize RNG states.

The shapes of the tensors that stages exchange are known only after a micro-batch has passed through the stages. So the
first micro-batch of each shape is run before the schedule, one stage after the other. After each stage, all ranks
receive a description of its output or of its error, so a failure raises an error on all of them. The schedule then
skips the forward of this micro-batch.

Under expert parallelism, ranks that read different data exchange tokens in each mixture-of-experts layer. They must run
the same number of micro-batches in the same order, so they agree on the number, and on those that run before the
schedule.

Pipeline ranks read identical data, and their RNG states must stay equal, although each stage draws a different number
of values. So RNG states are restored after a batch. The states that any rank has used then advance by one draw on all
ranks. The order of micro-batches in a stage depends on the schedule and on earlier batches. So each micro-batch starts
with seeds derived from its number.
"""

import pickle
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from headway import errors
from headway.core.config.parallelism import PipelineOptions
from headway.core.memory.oom import is_out_of_memory
from headway.core.runtime.collectives.checked import Collectives
from headway.core.runtime.collectives.tree import Tree, compute_slice_bounds, find_batch_size, slice_rows
from headway.core.strategies.fully_sharded.fsdp_state import find_autograd_parameters
from headway.errors import CollectiveError, HeadwayError, LossError, PeerOutOfMemory, UnsupportedError
from headway.layouts.pipeline.stage_forward import CallCache, ModuleRouter, describe_call
from headway.log import get_logger

if TYPE_CHECKING:
    from headway.layouts.pipeline.stage import PipelineStage, StageActivation

log = get_logger(__name__)

Compute = Callable[[int, int, Tree], Tree]
"""Function of (stage index, index of the micro-batch, tree received from the previous stage).

Returns the output of the stage's last block, or the loss.
"""


@dataclass(frozen=True)
class PipelineTask:
    """Batch whose loss the pipeline's schedule computes during backward.

    Attributes:
        fn: Function from a micro-batch to its loss.
        micro_batches: Micro-batches of the batch on this rank, equal on all ranks of the pipeline.
        weights: Number of items, such as rows or tokens, over which each micro-batch's loss is computed.
        reduction: How the loss is reduced over items: "mean" or "sum".
        loss: Placeholder tensor that receives the value of the batch's loss.
    """

    fn: Callable[[Tree], torch.Tensor]
    micro_batches: Sequence[Tree]
    weights: Sequence[float]
    reduction: str
    loss: torch.Tensor

    def compute_share(self, number: int) -> float:
        """Return the factor with which a micro-batch's loss is included in the loss of the batch.

        It is 1 for a sum. For a mean, it is the micro-batch's fraction of all items, or 0 if the batch has no items.

        Args:
            number: Index of the micro-batch.
        """
        if self.reduction == "sum":
            return 1.0
        total = sum(self.weights)
        return self.weights[number] / total if total else 0.0


@dataclass
class PipelineBatch:
    """State of a batch that is running through the pipeline.

    Attributes:
        stages: This rank's stages, by stage index.
        num_microbatches: Number of micro-batches.
        keys: Cache key of each micro-batch. It contains everything that determines the shapes of the tensors that
            stages exchange.
        precomputed: Indices of the micro-batches whose forward was run before the schedule.
    """

    stages: "dict[int, PipelineStage]"
    num_microbatches: int
    keys: list[Any]
    precomputed: set[int] = field(default_factory=set)


class StageResult(NamedTuple):
    """Result that the rank of a stage sends to the other ranks of the pipeline. At most one of the fields is set.

    Attributes:
        activation: Description of the stage's output. None on ranks that did not run the stage.
        error: Class name and message of the error that the stage raised, or None.
    """

    activation: "StageActivation | None"
    error: tuple[str, str] | None

    @classmethod
    def build(cls, activation: "StageActivation | None", failure: Exception | None) -> "StageResult":
        """Return the result of a rank, which contains only the error if the stage failed.

        Args:
            activation: Description of the stage's output, or None.
            failure: Error that the stage raised, or None.
        """
        return cls(activation, None) if failure is None else cls(None, _describe_error(failure))


class PipelineRunner:
    """Runs micro-batches through the pipeline stages of a model.

    Args:
        model: User's model.
        router: Object that runs the blocks of this rank's stages in a call of the model.
        group: Collectives over the ranks of one pipeline.
        options: Options of the pipeline.
        token_group: Collectives over the ranks that hold the same stages and exchange tokens with this rank's experts.
            None without expert parallelism.

    Attributes:
        device: Device of this rank.
        num_stages: Number of stages of the whole pipeline.
        rank_of_stage: Pipeline rank that has each stage, by stage index. A rank can have several stages.
        last_rank: Pipeline rank that has the last stage.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        router: ModuleRouter,
        group: Collectives,
        options: PipelineOptions,
        token_group: Collectives | None = None,
    ) -> None:
        self.model = model
        self.router = router
        self.group = group
        self.options = options
        self.token_group = token_group
        self.device = group.runtime.device
        self.num_stages = router.stages.num_stages
        self.rank_of_stage = [options.find_rank(index, group.world_size) for index in range(self.num_stages)]
        self.last_rank = self.rank_of_stage[-1]
        # Description of each stage's output, by everything that determines the shapes of the outputs.
        self._activations: CallCache[list[StageActivation]] = CallCache(
            "a micro-batch of each new kind runs through the stages by itself, which is slow"
        )
        stages_of_tensor = router.stages.map_stages(model)
        self._stage_parameters = {
            stage_index: [p for p in model.parameters() if stage_index in stages_of_tensor[id(p)]]
            for stage_index in router.local
        }

    @property
    def is_last(self) -> bool:
        """Whether this rank has the last stage."""
        return self.group.rank == self.last_rank

    # ---------------------------------------------------------------- parts of a batch

    def split_batch(self, batch: Tree, split: Callable[[Tree, int, int], Tree] | None = None) -> list[Tree]:
        """Return the micro-batches of a batch.

        Their number is the largest that the schedule supports, up to the requested number and the number of rows.

        Args:
            batch: Batch of this rank.
            split: Function from (batch, start, stop) to these rows of the batch. None: slice all tensors that have as
                many rows as the batch.
        """
        num_rows = find_batch_size(batch) or 1
        bounds = self._compute_bounds(num_rows)
        if len(bounds) == 1:
            return [batch]
        slice_batch = partial(slice_rows, num_rows=num_rows) if split is None else split
        return [slice_batch(batch, start, stop) for start, stop in bounds]

    def split_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        """Return the (args, kwargs) of a model call for each micro-batch.

        Tensors and other values with one entry per row are split. All other values are passed to each micro-batch.
        """
        num_rows = find_batch_size((args, kwargs)) or 1
        bounds = self._compute_bounds(num_rows)
        if len(bounds) == 1:
            return [(args, kwargs)]
        calls = []
        for start, stop in bounds:
            call_args = tuple(slice_rows(value, start, stop, num_rows) for value in args)
            call_kwargs = {name: slice_rows(value, start, stop, num_rows) for name, value in kwargs.items()}
            calls.append((call_args, call_kwargs))
        return calls

    def _compute_bounds(self, num_rows: int) -> list[tuple[int, int]]:
        """Return the rows of each micro-batch, as pairs of (index of the first row, index after the last row).

        Under expert parallelism, this runs a collective: all ranks use the smallest number of micro-batches.
        """
        requested = self.options.choose_num_microbatches(self.group.world_size)
        numbers = range(min(requested, num_rows), 0, -1)
        num_microbatches = next((number for number in numbers if self._supports_number(number)), 1)
        if self.token_group is not None:
            num_microbatches = int(self.token_group.reduce_numbers([num_microbatches], "min")[0])
        return [compute_slice_bounds(num_rows, num_microbatches, index) for index in range(num_microbatches)]

    def _supports_number(self, number: int) -> bool:
        """Whether the schedule supports this number of micro-batches.

        Schedules with several stages per rank, except "zbv", divide micro-batches into `number // world_size` groups,
        which must have equal size.

        Args:
            number: Number of micro-batches.
        """
        if self.options.num_per_rank == 1 or self.options.schedule == "zbv":
            return True
        return number % max(1, number // self.group.world_size) == 0

    def begin_batch(self, micro_batches: Sequence[Tree], compute: Compute, extra_key: Any) -> PipelineBatch:
        """Start and return a batch, and find the shapes of the tensors that the stages will exchange.

        If the shapes for a micro-batch are unknown, its forward is run now.

        Args:
            micro_batches: Micro-batches.
            compute: Function that runs a stage.
            extra_key: Hashable value that also affects these shapes, such as the code of the loss function.

        Raises:
            HeadwayError: On the other ranks, if a stage fails. The rank of that stage raises the original error.
        """
        # A script freezes parameters on all ranks, so `requires_grad` is valid for parameters of other stages, too.
        frozen = bytes(not parameter.requires_grad for parameter in self.model.parameters())
        mode = None if self.router.context_parallel is None else self.router.context_parallel.mode
        state = (
            extra_key,
            mode,
            self.model.training,
            torch.is_grad_enabled(),
            _get_autocast_dtype(self.device),
            frozen,
        )
        keys = [(describe_call(micro_batch), state) for micro_batch in micro_batches]
        batch = PipelineBatch(self._make_stages(compute), len(micro_batches), keys)
        is_unknown = self._find_unknown_shapes(keys)
        # Read all entries before new ones are stored, which may evict others. Ranks have agreed on `is_unknown`.
        activations_by_key = {key: entry for key in keys if (entry := self._activations.get(key)) is not None}
        for number, key in enumerate(keys):
            if is_unknown[number]:
                activations_by_key[key] = self._run_before_schedule(batch, number)
                self._activations.put(key, activations_by_key[key])
                batch.precomputed.add(number)
        for stage_index, stage in batch.stages.items():
            stage.precomputed = set(batch.precomputed)
            stage.chunks = batch.num_microbatches  # torch's attribute: number of micro-batches
            for number, key in enumerate(keys):
                stage.expected_outputs[number] = activations_by_key[key][stage_index]
                if stage_index:
                    stage.expected_inputs[number] = activations_by_key[key][stage_index - 1]
        return batch

    def _find_unknown_shapes(self, keys: Sequence[Any]) -> list[bool]:
        """Return whether each micro-batch must run before the schedule, because the shapes of its tensors are unknown.

        Of several micro-batches with equal keys, only the first must run. Under expert parallelism, this runs a
        collective: a micro-batch that must run on one rank runs on all.

        Args:
            keys: Cache keys of the micro-batches.
        """
        is_unknown = [key not in self._activations and key not in keys[:number] for number, key in enumerate(keys)]
        if self.token_group is None:
            return is_unknown
        return [flag > 0 for flag in self.token_group.reduce_numbers(is_unknown, "max")]

    def _make_stages(self, compute: Compute) -> "dict[int, PipelineStage]":
        """Return a new object for each stage of this rank, by stage index, in the order of the stages.

        Args:
            compute: Function that runs a stage.
        """
        from headway.layouts.pipeline.stage import PipelineStage  # torch's schedules, which take a second to import

        stages = {}
        for stage_index in sorted(self.router.local):
            trained = [parameter for parameter in self._stage_parameters[stage_index] if parameter.requires_grad]
            stages[stage_index] = PipelineStage(
                stage_index,
                self.num_stages,
                self.device,
                self.group.group,
                self.rank_of_stage,
                partial(find_autograd_parameters, self.model, trained),
                partial(compute, stage_index),
            )
        return stages

    def _run_before_schedule(self, batch: PipelineBatch, number: int) -> "list[StageActivation]":
        """Run the forward of one micro-batch through all stages, one after the other.

        All ranks must call this method.

        Args:
            batch: Batch whose stages store the outputs.
            number: Index of the micro-batch.

        Returns:
            Description of each stage's output.

        Raises:
            HeadwayError: On the other ranks, if a stage fails. The rank of that stage raises the original error.
        """
        activations: list[StageActivation] = []
        for stage_index, rank in enumerate(self.rank_of_stage):
            stage = batch.stages.get(stage_index)  # None if another rank has the stage
            own_activation: StageActivation | None = None
            failure: Exception | None = None
            if stage is not None:
                try:
                    stage.compute(number)
                    own_activation = self._check_sendable(stage.activations[number])
                except Exception as error:
                    failure = error
            results_by_rank = self.group.gather_objects(StageResult.build(own_activation, failure))
            activation, stage_error = results_by_rank[rank]
            if failure is not None:
                raise failure
            if stage_error is not None:
                raise rebuild_error(stage_error, stage_index, rank)
            activations.append(activation)
            if stage_index + 1 < self.num_stages:
                self._send_to_next_stage(batch, stage_index, number, activation)
        return activations

    def _send_to_next_stage(
        self, batch: PipelineBatch, stage_index: int, number: int, activation: "StageActivation"
    ) -> None:
        """Pass a stage's output to the next stage. Do nothing on ranks that have neither of these stages.

        Args:
            batch: Batch that contains this rank's stages.
            stage_index: Index of the stage that has computed the output.
            number: Index of the micro-batch.
            activation: Description of the output.
        """
        stage, next_stage = batch.stages.get(stage_index), batch.stages.get(stage_index + 1)
        if next_stage is not None:
            next_stage.expected_inputs[number] = activation
        if stage is not None and next_stage is not None:
            next_stage.set_local_fwd_input(stage.outputs[number], number)
        elif stage is not None:
            wait_for_transfers(start_transfers(stage.make_sends(number)))
        elif next_stage is not None:
            wait_for_transfers(start_transfers(next_stage.make_receives(number)))

    def make_result(self, result: Tree, failure: Exception | None) -> StageResult:
        """Return a description of the last stage's result, or of its error, to send to the other ranks.

        Args:
            result: Output of the last stage.
            failure: Error that the last stage raised, or None.
        """
        from headway.layouts.pipeline.stage import describe_tree

        activation = None
        if failure is None:
            try:
                activation = self._check_sendable(describe_tree(result)[0])
            except HeadwayError as error:
                failure = error
        return StageResult.build(activation, failure)

    def _check_sendable(self, activation: "StageActivation") -> "StageActivation":
        """Return the activation if it can be pickled for other ranks.

        Raises:
            UnsupportedError: If it cannot be pickled.
        """
        try:
            pickle.dumps(activation)
        except Exception as error:
            raise UnsupportedError(
                f"{self.router.kind} or one of its blocks returns something that cannot be sent to the other stages ({error}); let "
                "it return tensors, numbers, text, and containers of them"
            ) from error
        return activation

    # ---------------------------------------------------------------- torch's schedules

    def run_schedule(self, batch: PipelineBatch, has_backward: bool) -> None:
        """Run the forwards of a batch that have not run yet, and backward if requested, in the schedule's order.

        After backward, the `outputs` of the last stage are the losses.

        Args:
            batch: Batch from `begin_batch`.
            has_backward: Whether to run backward, too.
        """
        stages = [batch.stages[stage_index] for stage_index in sorted(batch.stages)]
        schedule = self._make_schedule(stages, batch.num_microbatches)
        run = schedule.step if has_backward else schedule.eval
        # torch splits a target per micro-batch; `_return_loss` ignores it.
        run(target=torch.arange(batch.num_microbatches), return_outputs=False)

    def _make_schedule(self, stages: "list[PipelineStage]", num_microbatches: int) -> Any:
        """Return torch's object for the requested schedule.

        Args:
            stages: Stages of this rank.
            num_microbatches: Number of micro-batches.
        """
        from torch.distributed.pipelining import schedules

        name = self.options.schedule
        options: dict[str, Any] = {"loss_fn": _return_loss, "scale_grads": False}
        if len(stages) == 1:
            # With fewer micro-batches than stages, 1F1B equals GPipe.
            is_1f1b = name == "1f1b" and num_microbatches >= self.num_stages
            schedule = schedules.Schedule1F1B if is_1f1b else schedules.ScheduleGPipe
            return schedule(stages[0], num_microbatches, **options)
        classes: dict[str, Any] = {
            "interleaved": schedules.ScheduleInterleaved1F1B,
            "zero_bubble": schedules.ScheduleInterleavedZeroBubble,
            "zbv": schedules.ScheduleZBVZeroBubble,
        }
        return classes[name](list(stages), num_microbatches, **options)


def start_transfers(ops: list[dist.P2POp]) -> list[dist.Work]:
    """Start point-to-point sends and receives, and return their handles."""
    return list(dist.batch_isend_irecv(ops)) if ops else []


def wait_for_transfers(works: Iterable[dist.Work]) -> None:
    """Wait for point-to-point transfers that `start_transfers` has started.

    With NCCL, only the current CUDA stream waits, not the host.

    Args:
        works: Handles of the transfers.
    """
    for work in works:
        work.wait()


def _return_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the last stage's output, which is already the loss. torch's schedules need a loss function to call."""
    return output


def _describe_error(error: Exception) -> tuple[str, str]:
    """Return the class name and message of an error, from which other ranks rebuild it."""
    if is_out_of_memory(error):  # on other ranks, the allocator's message would seem to be about their own memory
        return PeerOutOfMemory.__name__, "another rank of the pipeline ran out of memory; see the error of that rank"
    return type(error).__name__, str(error)


def rebuild_error(description: tuple[str, str], stage: int, rank: int) -> HeadwayError:
    """Return an equivalent of an error that another rank raised.

    Errors of Headway keep their class. Others become a `CollectiveError`.

    Args:
        description: Class name and message of the error.
        stage: Index of the stage that failed.
        rank: Pipeline rank that failed.
    """
    class_name, message = description
    error_class = getattr(errors, class_name, None)
    if isinstance(error_class, type) and issubclass(error_class, HeadwayError):
        return error_class(message)
    return CollectiveError(f"stage {stage} of the pipeline (rank {rank} along pp) failed: {class_name}: {message}")


def _get_autocast_dtype(device: torch.device) -> str:
    """Return the name of the dtype of the autocast context that is active for a device, or "" if none is."""
    return str(torch.get_autocast_dtype(device.type)) if torch.is_autocast_enabled(device.type) else ""


def check_loss(loss: Any) -> None:
    """Raise `LossError` unless a value is a loss: a one-element tensor that requires gradients.

    Args:
        loss: Return value of the user's loss function.

    Raises:
        LossError: If `loss` is not a tensor, has not exactly one element, or does not require gradients.
    """
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
        text = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise LossError(
            f"the function given to forward_backward returned {text}; it must return the loss of its micro-batch, a scalar tensor "
            "that depends on trainable parameters"
        )

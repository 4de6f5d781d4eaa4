"""Micro-batches through the stages of a pipeline: which go ahead, which schedule of torch's drives the others, and what they draw.

What travels between stages is known only once a micro-batch has passed through. So the first one of each shape goes ahead of the
schedule, one stage after the other, and after each stage all ranks hear what it hands on, or why it failed: what is wrong with a
model or a loss is an error on all of them. The schedule finds its forward done.

Ranks along a pipeline read the same data, and must go on to draw alike from every stream; what a stage draws is its own, and no other
stage draws as often. So the generators are put back after a batch, and those that any rank has drawn from move by one number on all.
In which order micro-batches pass a stage depends on the schedule, and on what has passed before: each begins generators of its own.
"""

import pickle
import random
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from headway import errors
from headway.config.parallelism import PipelineOptions
from headway.errors import CollectiveError, HeadwayError, LossError, PeerOutOfMemory, UnsupportedError
from headway.log import get_logger
from headway.memory.oom import is_out_of_memory
from headway.runtime.collectives.checked import Collectives
from headway.runtime.collectives.tree import Tree, cut_rows, find_batch_size, slice_bounds
from headway.runtime.device import Hardware
from headway.runtime.seed import mix, read_rng_states, write_rng_states
from headway.strategies.fully_sharded.fsdp_state import seen
from headway.strategies.pipeline.stage_forward import CallCache, ModuleRouter, signature

if TYPE_CHECKING:
    from headway.strategies.pipeline.stage import PipelineStage, StageActivation

log = get_logger(__name__)

Compute = Callable[[int, int, Tree], Tree]
"""From (stage, micro-batch, what was received) to what the stage's last block returns, or the loss."""


@dataclass(frozen=True)
class PipelineTask:
    """A batch whose loss is computed in backward.

    Attributes:
        fn: from a micro-batch to its loss.
        pieces: the micro-batches.
        weights: of each, over how many items its loss is taken.
        reduction: "mean" or "sum".
        loss: stands for the batch's loss until that is known.
    """

    fn: Callable[[Tree], torch.Tensor]
    pieces: Sequence[Tree]
    weights: Sequence[float]
    reduction: str
    loss: torch.Tensor

    def share(self, number: int) -> float:
        """How much a micro-batch's loss counts in the batch's."""
        total = sum(self.weights)
        return 1.0 if self.reduction == "sum" else self.weights[number] / total if total else 0.0


@dataclass
class PipelineBatch:
    """A batch on its way.

    Attributes:
        chunks: this rank's stages of it.
        num: its micro-batches.
        keys: what decides about the shapes that travel, for each micro-batch.
        ahead: the micro-batches whose forward is done.
    """

    chunks: "dict[int, PipelineStage]"
    num: int
    keys: list[Any]
    ahead: set[int] = field(default_factory=set)


class PipelineRunner:
    """One model's pipeline.

    Args:
        model: the user's.
        route: how its calls run.
        group: the ranks along the pipeline.
        options: as given.
    """

    def __init__(
        self, model: torch.nn.Module, route: ModuleRouter, group: Collectives, options: PipelineOptions
    ) -> None:
        self.model = model
        self.route = route
        self.group = group
        self.options = options
        self.device = group.runtime.device
        self.num_stages = route.stages.num
        self.owners = [options.rank_of(stage, group.world_size) for stage in range(self.num_stages)]
        self.last_rank = self.owners[-1]
        self._known: CallCache[list[StageActivation]] = CallCache(
            "a micro-batch of each new kind goes through the stages by itself, which is slow"
        )
        holders = route.stages.holders(model)
        self._weights = {
            stage: [parameter for parameter in model.parameters() if stage in holders[id(parameter)]]
            for stage in route.local
        }

    @property
    def is_last(self) -> bool:
        """Has this rank the last stage?"""
        return self.group.rank == self.last_rank

    # ---------------------------------------------------------------- parts of a batch

    def cut(self, batch: Tree) -> list[Tree]:
        """Micro-batches of a batch: as many as asked for, as the schedule takes, and at most one a row."""
        num_rows = find_batch_size(batch) or 1
        return [batch if bounds is None else cut_rows(batch, *bounds, num_rows) for bounds in self._bounds(num_rows)]

    def cut_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        """The arguments of a call for each micro-batch: each argument is a batch of its own."""
        num_rows = find_batch_size((args, kwargs)) or 1
        made = []
        for bounds in self._bounds(num_rows):
            if bounds is None:
                return [(args, kwargs)]
            given = tuple(cut_rows(each, *bounds, num_rows) for each in args)
            made.append((given, {name: cut_rows(each, *bounds, num_rows) for name, each in kwargs.items()}))
        return made

    def _bounds(self, num_rows: int) -> list[tuple[int, int] | None]:
        """Which rows each micro-batch has; None: all of them."""
        wanted = self.options.wanted_microbatches(self.group.world_size)
        num = next((number for number in range(min(wanted, num_rows), 0, -1) if self._takes(number)), 1)
        return [None] if num == 1 else [slice_bounds(num_rows, num, index) for index in range(num)]

    def _takes(self, number: int) -> bool:
        """Interleaved schedules go by rounds of as many micro-batches as there are ranks, or a few more."""
        if self.options.num_per_rank == 1 or self.options.schedule == "zbv":
            return True
        return number % max(1, number // self.group.world_size) == 0

    def begin(self, pieces: Sequence[Tree], compute: Compute, what: Any) -> PipelineBatch:
        """A batch, of which the micro-batches of unknown shapes have gone ahead.

        Args:
            pieces: its micro-batches.
            compute: runs a stage.
            what: what else decides about shapes.

        Raises:
            HeadwayError: on all ranks: what a stage raised on its way.
        """
        # Parameters of other stages carry the flag, too: what a script freezes it freezes on all ranks.
        frozen = bytes(not parameter.requires_grad for parameter in self.model.parameters())
        mode = None if self.route.context is None else self.route.context.mode
        state = (what, mode, self.model.training, torch.is_grad_enabled(), _autocast(self.device), frozen)
        keys = [(signature(piece), state) for piece in pieces]
        batch = PipelineBatch(self._chunks(compute), len(pieces), keys)
        activations: list[list[StageActivation]] = []
        for number, key in enumerate(keys):
            known = self._known.get(key)
            if known is None:
                known = self._go_ahead(batch, number)
                self._known.put(key, known)
                batch.ahead.add(number)
            activations.append(known)
        for stage, chunk in batch.chunks.items():
            chunk.ahead = set(batch.ahead)
            chunk.chunks = batch.num
            if stage:
                chunk.arriving = {number: known[stage - 1] for number, known in enumerate(activations)}
        return batch

    def _chunks(self, compute: Compute) -> "dict[int, PipelineStage]":
        from headway.strategies.pipeline.stage import PipelineStage  # torch's schedules, which take a second to import

        made = {}
        for stage in sorted(self.route.local):
            weights = [parameter for parameter in self._weights[stage] if parameter.requires_grad]
            learning, run = partial(seen, self.model, weights), partial(compute, stage)
            made[stage] = PipelineStage(
                stage, self.num_stages, self.device, self.group.group, self.owners, learning, run
            )
        return made

    def _go_ahead(self, batch: PipelineBatch, number: int) -> "list[StageActivation]":
        activations: list[StageActivation] = []
        for stage in range(self.num_stages):
            chunk, failure, told = batch.chunks.get(stage), None, None
            if chunk is not None:
                try:
                    chunk.compute(number)
                    told = self._sendable(chunk.activations[number])
                except Exception as error:
                    failure = error
            answer = (told if failure is None else None, None if failure is None else _named(failure))
            activation, problem = self.group.gather_objects(answer)[self.owners[stage]]
            if failure is not None:
                raise failure
            if problem is not None:
                raise again(problem, stage, self.owners[stage])
            activations.append(activation)
            if stage + 1 < self.num_stages:
                self._hand_on(batch, stage, number, activation)
        return activations

    def _hand_on(self, batch: PipelineBatch, stage: int, number: int, activation: "StageActivation") -> None:
        chunk, following = batch.chunks.get(stage), batch.chunks.get(stage + 1)
        if following is not None:
            following.arriving[number] = activation
        if chunk is not None and following is not None:
            following.set_local_fwd_input(chunk.outputs[number], number)
        elif chunk is not None:
            wait(start(chunk.send_ops(number)))
        elif following is not None:
            wait(start(following.receive_ops(number)))

    def told(self, result: Tree, failure: Exception | None) -> "tuple[StageActivation | None, tuple[str, str] | None]":
        """What the last stage tells the others of its result, or of its failure."""
        from headway.strategies.pipeline.stage import wrap

        if failure is not None:
            return None, _named(failure)
        try:
            return self._sendable(wrap(result)[0]), None
        except HeadwayError as error:
            return None, _named(error)

    def _sendable(self, activation: "StageActivation") -> "StageActivation":
        """What is beside the tensors goes to the other ranks as it is.

        Raises:
            UnsupportedError: it cannot.
        """
        try:
            pickle.dumps(activation)
        except Exception as error:
            raise UnsupportedError(
                f"{self.route.kind} or one of its blocks returns something that cannot be sent to the other stages ({error}); let it "
                "return tensors, numbers, text, and containers of them"
            ) from error
        return activation

    # ---------------------------------------------------------------- torch's schedules

    def drive(self, batch: PipelineBatch, has_backward: bool) -> None:
        """Run what remains of a batch by the schedule that was asked for; each chunk's `outputs` of the last stage are losses."""
        chunks = [batch.chunks[stage] for stage in sorted(batch.chunks)]
        schedule = self._schedule(chunks, batch.num)
        run = schedule.step if has_backward else schedule.eval
        run(target=torch.arange(batch.num), return_outputs=False)

    def _schedule(self, chunks: "list[PipelineStage]", num: int) -> Any:
        from torch.distributed.pipelining import schedules

        name = self.options.schedule
        given: dict[str, Any] = {"loss_fn": _loss, "scale_grads": False}
        if len(chunks) == 1:
            # With fewer micro-batches than stages 1F1B is GPipe.
            kind = schedules.Schedule1F1B if name == "1f1b" and num >= self.num_stages else schedules.ScheduleGPipe
            return kind(chunks[0], num, **given)
        kinds: dict[str, Any] = {
            "interleaved": schedules.ScheduleInterleaved1F1B,
            "zero_bubble": schedules.ScheduleInterleavedZeroBubble,
            "zbv": schedules.ScheduleZBVZeroBubble,
        }
        return kinds[name](list(chunks), num, **given)


def start(ops: list[dist.P2POp]) -> list[dist.Work]:
    """Send or receive."""
    return list(dist.batch_isend_irecv(ops)) if ops else []


def wait(works: Iterable[dist.Work]) -> None:
    """Until all of it is done."""
    for work in works:
        work.wait()


def _loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The last stage's output is the loss."""
    return output


def _named(error: Exception) -> tuple[str, str]:
    """What the other ranks raise: its class, and its message."""
    if is_out_of_memory(error):  # an allocator's own words would make it one of the reader's memory
        return PeerOutOfMemory.__name__, "another rank of the pipeline ran out of memory, and its own error says where"
    return type(error).__name__, str(error)


def again(problem: tuple[str, str], stage: int, rank: int) -> HeadwayError:
    """What another rank raised, of the same class where that is Headway's."""
    name, text = problem
    kind = getattr(errors, name, None)
    if isinstance(kind, type) and issubclass(kind, HeadwayError):
        return kind(text)
    return CollectiveError(f"stage {stage} of the pipeline (rank {rank} along pp) failed: {name}: {text}")


def _autocast(device: torch.device) -> str:
    return str(torch.get_autocast_dtype(device.type)) if torch.is_autocast_enabled(device.type) else ""


def check_loss(found: Any) -> None:
    """Refuse what is no loss.

    Raises:
        LossError: it is none.
    """
    if not isinstance(found, torch.Tensor) or found.numel() != 1 or not found.requires_grad:
        what = f"a tensor of shape {tuple(found.shape)}" if isinstance(found, torch.Tensor) else type(found).__name__
        raise LossError(
            f"the function given to forward_backward returned {what}; it must return the loss of its micro-batch, a scalar "
            "tensor that depends on parameters that learn"
        )


_GENERATORS = ("python", "numpy", "torch", "device")


class StageRNG:
    """What a batch draws in this rank's stages, and from which generators.

    Args:
        hardware: where the models compute.
        common: the generators before the batch, which ranks of a pipeline have alike.

    Attributes:
        flags: 1 or 0 for each of Python's, NumPy's, torch's and the device's: were numbers drawn from it?
    """

    def __init__(self, hardware: Hardware, common: dict[str, Any]) -> None:
        self.flags = [0.0] * len(_GENERATORS)
        self._hardware = hardware
        self._main = "torch" if hardware.kind == "cpu" else "device"
        # NumPy's stream may be of a kind that is not seeded like this: it goes on from one micro-batch to the next.
        seeded = {name: state for name, state in common.items() if name != "numpy" or isinstance(state, tuple)}
        self._seeds = {name: zlib.crc32(_bytes(state)) for name, state in seeded.items()}
        self._start = common

    def begin(self, stage: int, number: int) -> None:
        """A stage is about to compute a micro-batch.

        Where models compute, each stage draws from a stream of its own. The others are alike on all stages: on a GPU what a model's
        forward draws on the host, outside of its blocks, every stage draws.

        Args:
            stage: its number.
            number: of the micro-batch; that of what comes after all of them is the number of micro-batches.
        """
        self.look()
        self._start = self._start | {
            name: self._begun(name, mix(seed, number, stage if name == self._main else 0))
            for name, seed in self._seeds.items()
        }
        write_rng_states({name: self._start[name] for name in self._seeds}, self._hardware)

    def look(self) -> None:
        """Note which generators were drawn from since the last beginning."""
        now = read_rng_states(self._hardware)
        for index, name in enumerate(_GENERATORS):
            if name in self._start and _bytes(now[name]) != _bytes(self._start[name]):
                self.flags[index] = 1.0

    def _begun(self, name: str, seed: int) -> Any:
        if name == "python":
            return random.Random(seed).getstate()
        if name == "numpy":
            return sys.modules["numpy"].random.RandomState(seed % (1 << 32)).get_state()
        return torch.Generator("cpu" if name == "torch" else self._hardware.kind).manual_seed(seed).get_state()


@contextmanager
def own_generators(hardware: Hardware) -> Iterator[StageRNG]:
    """A block after which all generators are as before."""
    common = read_rng_states(hardware)
    told = StageRNG(hardware, common)
    try:
        yield told
    finally:
        told.look()
        write_rng_states(common, hardware)


def go_on(flags: Sequence[float], device: torch.device) -> None:
    """Move the common generators by one number each, where any rank has drawn: the next batch must not draw the same.

    Args:
        flags: of `StageRNG`, alike on all ranks.
        device: where the models compute.
    """
    drawn = {name for name, flag in zip(_GENERATORS, flags) if flag}
    if "python" in drawn:
        random.random()
    if "numpy" in drawn:
        import numpy

        numpy.random.random()
    if "torch" in drawn:
        torch.rand(())
    if "device" in drawn:
        torch.rand((), device=device)


def _bytes(state: Any) -> bytes:
    return state.numpy().tobytes() if isinstance(state, torch.Tensor) else pickle.dumps(state)

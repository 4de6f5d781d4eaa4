"""Find the origin of a NaN: rerun the accumulation window that produced it, and check every operation.

A window is run again after a non-finite loss or gradient. The loader returns the window's batches once more. RNG states
and buffers are restored to the beginning of the window. So the loop's own code runs again, but no update is made from
it. Meanwhile a `TorchDispatchMode` checks each operation of forward and backward. Each non-finite value is labeled with
its origin. The origin is an operation that created the value from finite inputs, a weight, or a tensor from outside the
model, such as the batch. The label is dropped if the value becomes finite again, as -inf does in a softmax. If an inf
was written on purpose (`masked_fill` and similar), the operation that turned it into NaN is the origin.

Hooks on all modules show which module is running. An operation in backward is assigned to the module whose call created
the operation's autograd node, which is found by autograd's sequence numbers. The operation is also assigned to the
source line that anomaly mode has recorded for the node.
"""

import re
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules import module as hooks

from headway.common.callsite import Frame, is_user_file, walk_stack
from headway.core.data.loader import PreparedLoader
from headway.core.runtime.collectives.tree import find_batch_size, list_tensors
from headway.core.strategies.fully_sharded.dtensors import get_local_shard
from headway.core.training.interfaces import NanOrigin, OriginSearch
from headway.core.training.prepared.objects import PreparedObjects
from headway.core.training.run import Run
from headway.core.training.windows import AccumulationWindow
from headway.extras._torch import TorchDispatchMode, current_autograd_node, disable_current_modes, get_sequence_number
from headway.extras.replay.snapshot import BatchSnapshot
from headway.log import get_logger

log = get_logger(__name__)

_MOST_ROWS = 8
_ON_PURPOSE = ("fill", "full", "where", "scatter", "index_put", "masked", "triu", "tril", "scalar_tensor", "lift")
# These operations only write to their first argument, so its old values do not matter.
_OVERWRITTEN = ("copy_", "fill_", "zero_", "normal_", "uniform_", "set_")
_TORCH = torch.__file__.removesuffix("__init__.py")
"""Directory of the torch package, whose source lines are never reported as the user's.

It can be outside of the directory of this Python environment.
"""
_NOTED = re.compile(r'\s*File "(.*)", line (\d+), in (\S+)')


class OperationTracer(TorchDispatchMode):
    """Dispatch mode that checks the result of each operation, and labels non-finite values with their origin.

    Args:
        prepared: Registry of the prepared models, from which origins get the names of modules and weights.
        rank: Rank of this process.

    Attributes:
        num_rows: Number of rows in the current batch, set by the caller. 0: unknown.
        of_loss: Origin of a loss that was not finite, or None.
        first_backward: Origin of the first non-finite value in a backward pass, or None.
    """

    def __init__(self, prepared: PreparedObjects, rank: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._rank, self.num_rows = rank, 0
        several = len(prepared.models) > 1
        self._names: dict[int, str] = {}
        self._weights: dict[int, str] = {}
        for number, model in enumerate(prepared.reshard_models()):
            label = f"model {number} ({type(model).__name__})" if several else f"the model ({type(model).__name__})"
            for name, each in model.named_modules():
                self._names.setdefault(id(each), name or label)
            for name, tensor in (*model.named_parameters(), *model.named_buffers()):
                self._weights[get_local_shard(tensor).untyped_storage()._cdata] = name
        self._labels: dict[int, tuple[StorageWeakRef, NanOrigin]] = {}
        self._calls: list[tuple[int, str]] = []
        self._spans: list[tuple[int, int, str]] = []
        self._given: dict[int, str] = {}
        self.of_loss: NanOrigin | None = None
        self.first_backward: NanOrigin | None = None
        self._block = ExitStack()

    def __enter__(self) -> Any:
        """Start checking results: register hooks on all modules, and enable autograd's anomaly mode."""
        anomaly = torch.autograd.set_detect_anomaly(True, check_nan=False)
        self._block.callback(anomaly.__exit__)
        self._block.callback(hooks.register_module_forward_pre_hook(self._enter_module).remove)
        self._block.callback(hooks.register_module_forward_hook(self._leave_module, always_call=True).remove)
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        """Stop checking operations, remove the hooks and end anomaly mode."""
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._block.close()

    # ---------------------------------------------------------------- modules

    def _enter_module(self, module: torch.nn.Module, args: tuple[Any, ...]) -> None:
        name = self._names.get(id(module), type(module).__name__)
        if not self._calls:
            for tensor in filter(_has_values, list_tensors(args)):
                self._given.setdefault(get_local_shard(tensor).untyped_storage()._cdata, name)
        self._calls.append((get_sequence_number(), name))
        for own, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            if _has_values(tensor) and not _is_finite(tensor):
                whole = own if " " in name else f"{name}.{own}"
                self._label_tensor(tensor, NanOrigin("weight", whole, "", "", (), self._rank))

    def _leave_module(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        if self._calls:
            start, name = self._calls.pop()
            self._spans.append((start, get_sequence_number(), name))

    def _find_module(self, node: Any) -> str:
        if self._calls or node is None:
            return self._calls[-1][1] if self._calls else ""
        number = node._sequence_nr()
        inside = [(end - start, name) for start, end, name in self._spans if start <= number < end]
        return (
            min(inside, key=lambda span: span[0])[1] if inside else ""
        )  # of equal spans the innermost, which ended first

    # ---------------------------------------------------------------- operations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, and check its inputs and results for non-finite values.

        Operations that are not torch's own (aten, prims), or that create uninitialized tensors, are not checked.
        """
        kwargs = kwargs or {}
        name = func._schema.name.rpartition("::")[2]
        is_plain = func.namespace in ("aten", "prims") and not name.startswith(("empty", "new_empty"))
        given = [each for each in list_tensors([args, kwargs]) if _has_values(each)] if is_plain else []
        if name in _OVERWRITTEN:
            given = given[1:]
        bad = [each for each in given if not _is_finite(each)]
        origins = [self._find_origin(each) for each in bad]
        has_nan = any(bool(get_local_shard(each).isnan().any()) for each in bad)
        result = func(*args, **kwargs)
        if not is_plain:
            return result
        before = {get_local_shard(each).untyped_storage()._cdata for each in given}
        for each in filter(_has_values, list_tensors(result)):
            key = get_local_shard(each).untyped_storage()._cdata
            if key in before and not func._schema.is_mutable:
                continue  # a view
            if _is_finite(each):
                self._labels.pop(key, None)
                continue
            known = next((o for o in origins if not _is_on_purpose(o) or has_nan), None)
            if known is None and (not origins or bool(get_local_shard(each).isnan().any())):
                known = self._describe_origin(func, name, each, given)
            self._label_tensor(each, known or origins[0])
            if self.first_backward is None and current_autograd_node() is not None:
                self.first_backward = known or origins[0]
        return result

    def _describe_origin(self, func: Any, name: str, result: torch.Tensor, given: Sequence[torch.Tensor]) -> NanOrigin:
        node = current_autograd_node()
        phase = "forward" if node is None else "backward"
        operation = f"{func.namespace}.{name}" + (f" in {node.name()}" if node is not None else "")
        rows = next((found for each in (result, *given) if (found := self._find_bad_rows(each))), ())
        return NanOrigin(phase, operation, self._find_module(node), _find_user_line(node), rows, self._rank)

    def _find_origin(self, tensor: torch.Tensor) -> NanOrigin:
        """Return the origin of a tensor's non-finite values.

        If the tensor has no label, it gets one: "weight" for a parameter or buffer, "input" for an argument of an
        outermost module call, such as the batch, and "elsewhere" for any other tensor.
        """
        key = get_local_shard(tensor).untyped_storage()._cdata
        known = self._labels.get(key)
        if known is not None:
            return known[1]
        node = current_autograd_node()
        if key in self._weights:
            found = NanOrigin("weight", self._weights[key], "", "", (), self._rank)
        elif key in self._given:
            found = NanOrigin("input", self._given[key], "", "", self._find_bad_rows(tensor), self._rank)
        else:
            found = NanOrigin(
                "elsewhere", "", self._find_module(node), _find_user_line(node), self._find_bad_rows(tensor), self._rank
            )
        self._label_tensor(tensor, found)
        return found

    def _label_tensor(self, tensor: torch.Tensor, origin: NanOrigin) -> None:
        storage = get_local_shard(tensor).untyped_storage()
        self._labels[storage._cdata] = StorageWeakRef(storage), origin  # type: ignore[no-untyped-call]

    def _find_bad_rows(self, tensor: torch.Tensor) -> tuple[int, ...]:
        """Return the indices of the first few batch rows (samples) that have non-finite entries in a tensor.

        Return no indices if the number of rows is unknown, or the tensor's first dimension is not a multiple of it.
        """
        plain, num_rows = get_local_shard(tensor), self.num_rows
        if not num_rows or not plain.ndim or plain.shape[0] % num_rows or _is_finite(tensor):
            return ()
        spoilt = ~torch.isfinite(plain.detach()).reshape(num_rows, -1).all(1)
        return tuple(spoilt.nonzero().flatten().tolist()[:_MOST_ROWS])

    def find_gradient_origin(self, parameters: Sequence[torch.Tensor]) -> NanOrigin | None:
        """Return the origin of a non-finite gradient of these parameters, or None if there is none.

        An origin other than "elsewhere" takes precedence. The origin of the first non-finite value in backward comes
        next, then "elsewhere".
        """
        grads = [get_local_shard(each.grad).untyped_storage()._cdata for each in parameters if each.grad is not None]
        known = [self._labels[key][1] for key in grads if key in self._labels]
        return next(
            (each for each in known if each.phase != "elsewhere"), self.first_backward or next(iter(known), None)
        )

    def check_loss(self, loss: torch.Tensor) -> None:
        """Record the origin of a loss that is not finite. Called before the backward of the loss.

        Only the first such loss is recorded, in `of_loss`.
        """
        with disable_current_modes():
            if self.of_loss is None and not _is_finite(loss):
                self.of_loss = self._find_origin(loss)


def _has_values(tensor: torch.Tensor) -> bool:
    plain = get_local_shard(tensor)
    is_real = plain.is_floating_point() or plain.is_complex()
    return is_real and plain.layout is torch.strided and not plain.is_meta and plain.numel() > 0


def _is_finite(tensor: torch.Tensor) -> bool:
    return bool(torch.isfinite(get_local_shard(tensor.detach())).all())


def _is_on_purpose(origin: NanOrigin) -> bool:
    return origin.phase == "forward" and any(word in origin.operation for word in _ON_PURPOSE)


def _find_user_line(node: Any) -> str:
    """Return the innermost source line in the user's code, or "" if there is none.

    Args:
        node: Autograd node. The line that created it is read from anomaly mode's record. None: use the current stack.
    """
    if node is None:
        places = (Frame.from_frame(frame) for frame in walk_stack())
    else:
        matches = filter(None, map(_NOTED.match, reversed(node.metadata.get("traceback_", ()))))
        places = (Frame(found[1], int(found[2]), found[3]) for found in matches)
    own = (place for place in places if is_user_file(place.file) and not place.file.startswith(_TORCH))
    return str(next(own, ""))


_MOST_BATCHES = 256
"""Largest number of batches of an accumulation window that are kept in memory until its update is judged."""
_TOO_LONG = (
    "this update cannot be run again to find the origin of its non-finite values, because it has more than %d batches: fewer, larger "
    "micro-batches make it possible"
)


class WindowReplay(OriginSearch):
    """Recorder of an accumulation window's batches. It runs the window again to find the origin of a NaN.

    Only one window of a run is run again. The loader then repeats its batches, so that the script's own code runs on
    them. If several sets of models train on one batch, the code of all of them runs, but only one window is traced.

    Args:
        run: Run of the Accelerator.

    Attributes:
        is_armed: Whether a window will be run again, as soon as its loader is asked for the next batch.
        is_repeating: Whether the script is processing repeated batches. No update may be made then.
        tracer: Tracer of the window that is being run again, or None.
        is_spent: Whether no further window will be run again: the only replay was used, or it is impossible.
    """

    def __init__(self, run: Run) -> None:
        self._prepared, self._windows, self._rank = run.prepared, run.windows, run.runtime.rank
        self._kept: deque[tuple[PreparedLoader, Any, Any]] = deque(maxlen=_MOST_BATCHES)
        self._num_fetched: Counter[PreparedLoader] = Counter()
        self._snapshot = BatchSnapshot(run.prepared, (), run.runtime.hardware, has_counts=False)
        self._loader: PreparedLoader | None = None
        self._models: tuple[torch.nn.Module, ...] = ()
        self.is_armed = self.is_repeating = self.is_spent = False
        self.tracer: OperationTracer | None = None
        run.events.repeats.append(self._repeat_batches)

    def _repeat_batches(self, loader: PreparedLoader, deliveries: Iterator[Any]) -> Iterator[Any]:
        """Yield a loader's batches, and record them. After a window was armed, yield its batches again."""
        try:
            for batch, share in deliveries:
                if not self.is_spent:
                    self._record_batch(loader, batch, share)
                yield batch, share
                if self.is_armed and self._loader is loader:
                    self.is_armed, self.is_repeating = False, True
                    yield from self._replay_batches()
                    self._end_replay()
        finally:  # also if the loop is left early
            if self._loader is loader:
                self._end_replay()

    def _record_batch(self, loader: PreparedLoader, batch: Any, share: Any) -> None:
        """Record a batch. If no window is unfinished, it begins a new one: save the state, and drop earlier batches."""
        windows = self._windows
        if windows.are_closed and not windows.is_unfinished and not windows.num_unused_reads:
            self._kept.clear()
            self._num_fetched.clear()
            self._snapshot.save_state()
            self._snapshot.restore_gradients()  # `save_state` has moved them into the snapshot
        self._kept.append((loader, batch, share))
        self._num_fetched[loader] += 1

    def _list_batches(self, loader: PreparedLoader) -> list[tuple[Any, Any]]:
        return [(batch, share) for whose, batch, share in self._kept if whose is loader]

    def _replay_batches(self) -> Iterator[Any]:
        assert self._loader is not None
        again = self._list_batches(self._loader)
        self._kept.clear()
        self._snapshot.restore()
        self.tracer = OperationTracer(self._prepared, self._rank)
        self.tracer.__enter__()
        for batch, share in again:
            if self.tracer is not None:
                self.tracer.num_rows = share.num_rows or find_batch_size(batch) or 0
                yield batch, share._replace(num_samples=0)

    def _end_replay(self) -> None:
        self.end_replay()
        self.is_armed, self.is_repeating, self._loader = False, False, None

    def arm_replay(self, window: AccumulationWindow) -> bool:
        """Prepare to run an accumulation window again, after its update was refused because of a non-finite value.

        The loader then returns the window's batches once more.

        Returns:
            Whether a window will be run again: this one, or one that was refused before it on the same batches. False
                if a window was run again before, if the batches did not come from a prepared loader, or if there were
                more than 256 of them.
        """
        if self.is_armed:
            return True
        loader = self._windows.loader
        is_spent, self.is_spent = self.is_spent, True
        if is_spent or loader is None or not (kept := self._list_batches(loader)):
            return False
        if len(kept) < self._num_fetched[loader]:
            log.warning(_TOO_LONG, _MOST_BATCHES)
            return False
        self._loader, self._models, self.is_armed = loader, window.models, True
        return True

    def is_of(self, window: AccumulationWindow) -> bool:
        """Whether `window` is the one that is being run again and traced."""
        return self.tracer is not None and window.models == self._models

    def end_replay(self) -> NanOrigin | None:
        """Stop checking operations, and restore the state from the beginning of the accumulation window.

        Returns:
            The origin of the non-finite value that was found on this rank, or None. Also None, with no effect, if no
                window is being run again.
        """
        tracer, self.tracer = self.tracer, None
        if tracer is None:
            return None
        tracer.__exit__(None, None, None)
        found = tracer.of_loss or tracer.find_gradient_origin(self._prepared.list_parameters())
        self._snapshot.restore()
        return found

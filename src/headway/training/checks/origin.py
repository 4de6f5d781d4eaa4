"""Where a nan began: a window whose loss or gradients were not finite is run again, with every operation checked.

The loaders give the window's batches once more, from the RNG states and buffers of its beginning, so that the loop's own code runs
again; no update is made from it. Meanwhile a `TorchDispatchMode` sees each operation of forward and backward. A value that is not
finite carries the place where it arose along: an operation that makes one from finite inputs, a weight, or a tensor from outside
(the batch). What becomes finite again, as -inf behind a softmax, is forgotten; an inf that was written on purpose (`masked_fill`
and the like) is no beginning of a nan, the operation that made nan of it is.

Modules are known by hooks on all of them; an operation of backward belongs to the module in whose call its node was made, by
autograd's sequence numbers, and to the line that anomaly mode has noted for it.
"""

import re
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch._C._autograd import _get_sequence_nr as _sequence_number
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules import module as hooks
from torch.utils._python_dispatch import TorchDispatchMode

from headway.common.callsite import Frame, is_users, stack
from headway.data.loader import PreparedLoader
from headway.runtime.collectives.tree import find_batch_size, tensors
from headway.strategies.fully_sharded.dtensors import local
from headway.training.hooks import RunParts
from headway.training.prepared.objects import PreparedObjects
from headway.training.replay.snapshot import BatchSnapshot

_MOST_ROWS = 8
_ON_PURPOSE = ("fill", "full", "where", "scatter", "index_put", "masked", "triu", "tril", "scalar_tensor", "lift")
_OVERWRITTEN = ("copy_", "fill_", "zero_", "normal_", "uniform_", "set_")
_TORCH = torch.__file__.removesuffix("__init__.py")
"""Its home, which may lie outside of this environment."""
_NOTED = re.compile(r'\s*File "(.*)", line (\d+), in (\S+)')


@dataclass(frozen=True)
class NanOrigin:
    """The origin of a value that is not finite.

    Attributes:
        phase: "forward", "backward", "weight" (a parameter or buffer held it), "input" (it came with the batch) or "elsewhere" (it
            was there already, or came from another rank).
        operation: torch's, such as "aten.log"; in backward with the node, such as "aten.div in SqrtBackward0". The name of a weight.
        module: the full name of the module that was being called; empty: none.
        line: of the user's code, such as "train.py:12 in loss"; empty: unknown.
        rows: rows of this rank's batch, at most 8; empty: unknown.
        rank: the rank on which it began.
    """

    phase: str
    operation: str
    module: str
    line: str
    rows: tuple[int, ...] = ()
    rank: int = 0

    def __str__(self) -> str:
        rows = (
            f", row{'s' if len(self.rows) > 1 else ''} {', '.join(map(str, self.rows))} of the batch"
            if self.rows
            else ""
        )
        what = {
            "weight": f"with {self.operation}, which holds values that are not finite",
            "input": f"with the values that were given to {self.operation}",
            "elsewhere": "with a tensor that no checked operation has produced",
        }.get(self.phase, f"in {self.phase} with {self.operation}")
        where = f" in {self.module}" if self.module else ""
        return f"it began {what}{where}{f' ({self.line})' if self.line else ''}{rows}, on rank {self.rank}"


class OperationTracer(TorchDispatchMode):
    """Looks at each operation in the block.

    Args:
        prepared: whose modules and weights have names.
        num_rows: of a batch.
        rank: of this process.

    Attributes:
        of_loss: where a loss came from that was not finite.
        first_backward: the same of the first such value in a backward.
    """

    def __init__(self, prepared: PreparedObjects, rank: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._rank, self.num_rows = rank, 0
        several = len(prepared.models) > 1
        self._names: dict[int, str] = {}
        self._weights: dict[int, str] = {}
        for number, model in enumerate(prepared.at_rest()):
            label = f"model {number} ({type(model).__name__})" if several else f"the model ({type(model).__name__})"
            for name, each in model.named_modules():
                self._names.setdefault(id(each), name or label)
            for name, tensor in (*model.named_parameters(), *model.named_buffers()):
                self._weights[local(tensor).untyped_storage()._cdata] = name
        self._labels: dict[int, tuple[StorageWeakRef, NanOrigin]] = {}
        self._calls: list[tuple[int, str]] = []
        self._spans: list[tuple[int, int, str]] = []
        self._given: dict[int, str] = {}
        self.of_loss: NanOrigin | None = None
        self.first_backward: NanOrigin | None = None
        self._block = ExitStack()

    def __enter__(self) -> Any:
        """Look from here on."""
        anomaly = torch.autograd.set_detect_anomaly(True, check_nan=False)
        self._block.callback(anomaly.__exit__)
        self._block.callback(hooks.register_module_forward_pre_hook(self._enter).remove)
        self._block.callback(hooks.register_module_forward_hook(self._leave, always_call=True).remove)
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        """Look no more."""
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._block.close()

    # ---------------------------------------------------------------- modules

    def _enter(self, module: torch.nn.Module, args: tuple[Any, ...]) -> None:
        name = self._names.get(id(module), type(module).__name__)
        if not self._calls:
            for tensor in filter(_has_values, tensors(args)):
                self._given.setdefault(local(tensor).untyped_storage()._cdata, name)
        self._calls.append((_sequence_number(), name))
        for own, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            if _has_values(tensor) and not _is_finite(tensor):
                whole = own if " " in name else f"{name}.{own}"
                self._label(tensor, NanOrigin("weight", whole, "", "", (), self._rank))

    def _leave(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        if self._calls:
            start, name = self._calls.pop()
            self._spans.append((start, _sequence_number(), name))

    def _module(self, node: Any) -> str:
        if self._calls or node is None:
            return self._calls[-1][1] if self._calls else ""
        number = node._sequence_nr()
        inside = [(end - start, name) for start, end, name in self._spans if start <= number < end]
        return (
            min(inside, key=lambda span: span[0])[1] if inside else ""
        )  # of spans alike the innermost, which ended first

    # ---------------------------------------------------------------- operations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, and look at what came in and went out."""
        kwargs = kwargs or {}
        name = func._schema.name.rpartition("::")[2]
        is_plain = func.namespace in ("aten", "prims") and not name.startswith(("empty", "new_empty"))
        given = [each for each in tensors([args, kwargs]) if _has_values(each)] if is_plain else []
        if name in _OVERWRITTEN:
            given = given[1:]
        bad = [each for each in given if not _is_finite(each)]
        origins = [self._origin_of(each) for each in bad]
        has_nan = any(bool(local(each).isnan().any()) for each in bad)
        result = func(*args, **kwargs)
        if not is_plain:
            return result
        before = {local(each).untyped_storage()._cdata for each in given}
        for each in filter(_has_values, tensors(result)):
            key = local(each).untyped_storage()._cdata
            if key in before and not func._schema.is_mutable:
                continue  # a view
            if _is_finite(each):
                self._labels.pop(key, None)
                continue
            known = next((o for o in origins if not _is_on_purpose(o) or has_nan), None)
            if known is None and (not origins or bool(local(each).isnan().any())):
                known = self._arisen(func, name, each, given)
            self._label(each, known or origins[0])
            if self.first_backward is None and torch._C._current_autograd_node() is not None:
                self.first_backward = known or origins[0]
        return result

    def _arisen(self, func: Any, name: str, result: torch.Tensor, given: Sequence[torch.Tensor]) -> NanOrigin:
        node = torch._C._current_autograd_node()
        phase = "forward" if node is None else "backward"
        told = f"{func.namespace}.{name}" + (f" in {node.name()}" if node is not None else "")
        rows = next((found for each in (result, *given) if (found := self._rows(each))), ())
        return NanOrigin(phase, told, self._module(node), _line(node), rows, self._rank)

    def _origin_of(self, tensor: torch.Tensor) -> NanOrigin:
        """Where its values came from: a tensor that is bad and unknown comes from outside."""
        key = local(tensor).untyped_storage()._cdata
        known = self._labels.get(key)
        if known is not None:
            return known[1]
        node = torch._C._current_autograd_node()
        if key in self._weights:
            found = NanOrigin("weight", self._weights[key], "", "", (), self._rank)
        elif key in self._given:
            found = NanOrigin("input", self._given[key], "", "", self._rows(tensor), self._rank)
        else:
            found = NanOrigin("elsewhere", "", self._module(node), _line(node), self._rows(tensor), self._rank)
        self._label(tensor, found)
        return found

    def _label(self, tensor: torch.Tensor, origin: NanOrigin) -> None:
        storage = local(tensor).untyped_storage()
        self._labels[storage._cdata] = StorageWeakRef(storage), origin  # type: ignore[no-untyped-call]

    def _rows(self, tensor: torch.Tensor) -> tuple[int, ...]:
        """The rows of the batch whose entries are not finite, where the first dimension is the batch's, or several times it."""
        plain, num_rows = local(tensor), self.num_rows
        if not num_rows or not plain.ndim or plain.shape[0] % num_rows or _is_finite(tensor):
            return ()
        spoilt = ~torch.isfinite(plain.detach()).reshape(num_rows, -1).all(1)
        return tuple(spoilt.nonzero().flatten().tolist()[:_MOST_ROWS])

    def of_gradient(self, parameters: Sequence[torch.Tensor]) -> NanOrigin | None:
        """Where a gradient came from that is not finite; where that is not known, the first such value of backward."""
        grads = [local(each.grad).untyped_storage()._cdata for each in parameters if each.grad is not None]
        known = [self._labels[key][1] for key in grads if key in self._labels]
        return next(
            (each for each in known if each.phase != "elsewhere"), self.first_backward or next(iter(known), None)
        )

    def saw_loss(self, loss: torch.Tensor) -> None:
        """A loss that is about to run backward."""
        with torch.utils._python_dispatch._disable_current_modes():
            if self.of_loss is None and not _is_finite(loss):
                self.of_loss = self._origin_of(loss)


def _has_values(tensor: torch.Tensor) -> bool:
    plain = local(tensor)
    is_real = plain.is_floating_point() or plain.is_complex()
    return is_real and plain.layout is torch.strided and not plain.is_meta and plain.numel() > 0


def _is_finite(tensor: torch.Tensor) -> bool:
    return bool(torch.isfinite(local(tensor.detach())).all())


def _is_on_purpose(origin: NanOrigin) -> bool:
    return origin.phase == "forward" and any(word in origin.operation for word in _ON_PURPOSE)


def _line(node: Any) -> str:
    """The user's innermost line: here, or where the forward made a node, as anomaly mode has noted it."""
    if node is None:
        places = (Frame.of(frame) for frame in stack())
    else:
        noted = filter(None, map(_NOTED.match, reversed(node.metadata.get("traceback_", ()))))
        places = (Frame(found[1], int(found[2]), found[3]) for found in noted)
    own = (place for place in places if is_users(place.file) and not place.file.startswith(_TORCH))
    return str(next(own, ""))


class WindowReplay:
    """Keeps what a window needs to be run again, and has its loader give it again.

    Args:
        parts: of the run.

    Attributes:
        tracer: looks at the window that is being run again; None: none is.
        is_spent: a window has been run again, or none can be.
    """

    def __init__(self, parts: RunParts) -> None:
        self._prepared, self._windows, self._rank = parts.prepared, parts.windows, parts.runtime.rank
        self._kept: deque[tuple[PreparedLoader, Any, Any]] = deque(maxlen=256)
        self._snapshot = BatchSnapshot(parts.prepared, (), parts.runtime.hardware)
        self._is_armed_for: PreparedLoader | None = None
        self.tracer: OperationTracer | None = None
        self.is_spent = False
        parts.events.came.append(self._note)
        parts.events.repeats.append(self._give)

    def _note(self, loader: PreparedLoader) -> None:
        if (
            self.tracer is None
            and not self.is_spent
            and not self._windows.is_unfinished
            and self._windows.num_read == 1
        ):
            self._snapshot.take()
            self._snapshot.give_back()

    def _give(self, loader: PreparedLoader, deliveries: Iterator[Any]) -> Iterator[Any]:
        for batch, share in deliveries:
            if not self.is_spent:
                self._kept.append((loader, batch, share))
            yield batch, share
            if self._is_armed_for is loader:
                self._is_armed_for = None
                again = [(batch, share) for whose, batch, share in self._kept if whose is loader]
                self._kept.clear()
                try:
                    yield from self._again(again)
                finally:
                    self.end()

    def _again(self, batches: list[tuple[Any, Any]]) -> Iterator[Any]:
        self._snapshot.restore()
        self.tracer = OperationTracer(self._prepared, self._rank)
        self.tracer.__enter__()
        for batch, share in batches:
            if self.tracer is not None:
                self.tracer.num_rows = share.num_rows or find_batch_size(batch) or 0
                yield batch, share._replace(num_samples=0)

    def is_good(self) -> None:
        """The window's update is made: its batches are not needed any more."""
        self._kept.clear()

    def arm(self) -> bool:
        """Run the refused window again? Where a prepared loader has given all of it."""
        loader = self._windows.loader
        if self.is_spent or loader is None or not any(whose is loader for whose, _, _ in self._kept):
            self.is_spent = True
            return False
        self._is_armed_for, self.is_spent = loader, True
        return True

    def end(self) -> NanOrigin | None:
        """Look no more; what was found on this rank."""
        tracer, self.tracer = self.tracer, None
        if tracer is None:
            return None
        tracer.__exit__(None, None, None)
        found = tracer.of_loss or tracer.of_gradient(self._prepared.all_parameters())
        self._snapshot.restore()
        return found

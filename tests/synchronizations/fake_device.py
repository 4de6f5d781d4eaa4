"""A fake device: tensors claim to be on "fake:0", operations run on the CPU, and every wait of the host for the device is counted.

It replaces a CUDA device on machines without one. torch's registration of Python backends makes "fake" a device type
that autograd, optimizers and DataLoaders treat as an accelerator. A dispatch mode replaces its kernels.

Operations count as waits if they make the host wait on CUDA (see ATen/native/cuda): `_local_scalar_dense`, `nonzero`
and operations built on it, and copies. Copies do not wait if they are non-blocking and use pinned host memory.

Time, streams and memory are not simulated: a side stream is only a label. `tests/gpu` tests what only a real device can
show.
"""

import traceback
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

aten = torch.ops.aten
KIND = "fake"
DEVICE = torch.device("privateuseone", 0)
"""Its string is "fake:0" after the backend is registered."""

_WAITING_OPERATIONS = {
    aten._local_scalar_dense.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten.equal.default,
    aten._unique2.default,
    aten.unique_dim.default,
    aten.is_nonzero.default,
}
"""Operations that wait for the device, because they return a number on the host or a tensor whose size depends on values."""


_LIBRARIES: list[torch.library.Library] = []


class _FactoryFunctions(TorchFunctionMode):
    """Function mode for `torch.tensor`, `new_tensor` and `tolist`, which bypass dispatch modes. They count as copies."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.tensor and kwargs.get("device") is not None:
            device = torch.device(kwargs.pop("device"))
            return func(*args, **kwargs).to(device)
        if func is torch.Tensor.new_tensor and isinstance(args[0], FakeTensor):
            return torch.tensor(*args[1:], **{"dtype": args[0].dtype, **kwargs}).to(args[0].device)
        if func is torch.Tensor.tolist and isinstance(args[0], FakeTensor):
            FakeDevice.current.wait("tolist")
            return args[0].held.tolist()
        return func(*args, **kwargs)


class FakeTensor(torch.Tensor):
    """A tensor on the fake device. `held` is the CPU tensor with its values."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> "FakeTensor":
        made = torch.Tensor._make_wrapper_subclass(
            cls, held.size(), strides=held.stride(), storage_offset=held.storage_offset(), dtype=held.dtype, device=DEVICE
        )  # fmt: skip
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return FakeDevice.current.run(func, args, kwargs or {})


class FakeDevice(TorchDispatchMode):
    """Dispatch mode that runs operations of the device "fake:0" and counts the host's waits for it.

    Attributes:
        waits: {(operation, innermost "file:line" outside torch): number of waits}.
        passes: {name of the operation: number of calls}.
        recorded: Tensors that were passed to `record_stream`.
        pins: Number of tensors that were copied into pinned memory.
        knows_record_stream: Whether the device supports `record_stream`. Tests may set it to False.
    """

    current: "FakeDevice"

    def __init__(self) -> None:
        super().__init__()
        FakeDevice.current = self
        self.waits: Counter[tuple[str, str]] = Counter()
        self.passes: Counter[str] = Counter()
        self.recorded: list[torch.Tensor] = []
        self.pins = 0
        self.knows_record_stream = True
        self._pinned: dict[int, torch.UntypedStorage] = {}
        self._numbers = _FactoryFunctions()

    def __enter__(self) -> "FakeDevice":
        self._numbers.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._numbers.__exit__(*error)

    @property
    def num_waits(self) -> int:
        """Total number of waits since the last `start_over`."""
        return sum(self.waits.values())

    def start_over(self) -> None:
        """Reset the counters."""
        self.waits.clear()
        self.passes.clear()

    def wait(self, what: str) -> None:
        """Count a wait of the host for the device, with the innermost line outside torch that caused it."""
        frames = [
            f for f in traceback.extract_stack() if "torch/" not in f.filename and not f.filename.endswith(__file__)
        ]
        place = frames[-1]
        self.waits[what, f"{place.filename.rpartition('headway/')[2]}:{place.lineno}"] += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.run(func, args, kwargs or {})

    # ---------------------------------------------------------------- one operation

    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run the operation on the CPU, and wrap its results if the operation belongs to the fake device."""
        special = self._special(func)
        if special is not None:
            return special(*args, **kwargs)
        if kwargs.get("pin_memory"):
            return self._pin_memory(func(*args, **{**kwargs, "pin_memory": False}))
        flat = pytree.tree_leaves((args, kwargs))
        is_here = any(isinstance(each, FakeTensor) or _is_fake(each) for each in flat)
        if not is_here:
            return func(*args, **kwargs)
        self.passes[func.overloadpacket.__name__] += 1
        if func in _WAITING_OPERATIONS or _is_indexed_by_mask(func, args):
            self.wait(func.overloadpacket.__name__)
        return self._run_on_cpu(func, args, kwargs)

    def _run_on_cpu(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        wrapped = {id(each.held): each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, FakeTensor)}
        out = func(*pytree.tree_map(_unwrap, args), **pytree.tree_map(_unwrap, kwargs))

        # In-place operations return their input, which must stay the same FakeTensor.
        def wrap(each: Any) -> Any:
            if not isinstance(each, torch.Tensor):
                return each
            known = wrapped.get(id(each))
            return FakeTensor(each) if known is None else known

        return pytree.tree_map(wrap, out)

    def _special(self, func: Any) -> Callable[..., Any] | None:
        return {
            aten._to_copy.default: self._to_copy,
            aten.copy_.default: self._copy_,
            aten.is_pinned.default: self._is_pinned,
            aten._pin_memory.default: self._pin_memory,
            aten.record_stream.default: self._record_stream,
        }.get(func)

    def _record_stream(self, tensor: torch.Tensor, stream: Any) -> None:
        if not self.knows_record_stream:
            raise NotImplementedError("aten::record_stream, as on MPS")
        self.recorded.append(tensor)

    # ---------------------------------------------------------------- copies

    def _to_copy(self, tensor: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        target = kwargs.get("device") or tensor.device
        is_async = kwargs.pop("non_blocking", False)
        source = _unwrap(tensor)
        if tensor.device.type != target.type and not (
            is_async and (target.type == "cpu" or self._is_in_pinned_memory(source))
        ):
            self.wait("copy to the host" if target.type == "cpu" else "copy from the host")
        made = aten._to_copy.default(source, **{**kwargs, "device": torch.device("cpu"), "pin_memory": False})
        return FakeTensor(made) if target.type == KIND else made

    def _copy_(self, target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        if target.device.type != source.device.type:
            host = source if target.device.type == KIND else target
            if not (non_blocking and self._is_in_pinned_memory(host)):
                self.wait("copy_ to the host" if host is target else "copy_ from the host")
        _unwrap(target).copy_(_unwrap(source))
        return target

    # ---------------------------------------------------------------- pinned memory

    def _is_in_pinned_memory(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._pinned

    def _is_pinned(self, tensor: torch.Tensor, device: Any = None) -> bool:
        return not isinstance(tensor, FakeTensor) and self._is_in_pinned_memory(tensor)

    def _pin_memory(self, tensor: torch.Tensor, device: Any = None) -> torch.Tensor:
        self.pins += 1
        made = tensor.clone()
        storage = made.untyped_storage()
        self._pinned[storage.data_ptr()] = storage  # the reference prevents that the address is reused
        return made


def _unwrap(each: Any) -> Any:
    return each.held if isinstance(each, FakeTensor) else torch.device("cpu") if _is_fake(each) else each


def _is_fake(each: Any) -> bool:
    return isinstance(each, torch.device) and each.type == KIND


def _is_indexed_by_mask(func: Any, args: Any) -> bool:
    return func in (aten.index.Tensor, aten.index_put_.default) and any(
        index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
    )


class _Module(_DummyBackendModule):
    """The module `torch.fake`, with the functions that Headway calls on a device's module."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        torch.set_rng_state(state)

    def set_device(self, device: Any) -> None:
        """Do nothing: there is only one device."""

    def synchronize(self, device: Any = None) -> None:
        FakeDevice.current.wait("synchronize")

    def empty_cache(self) -> None:
        """Do nothing: the fake device has no cache."""

    def manual_seed(self, seed: int) -> None:
        """Do nothing: the fake device uses the CPU's generator."""


def register() -> None:
    """Register the device type "fake" with torch.

    This is possible once per process, and only if no other PrivateUse1 backend is registered.
    """
    _setup_privateuseone_for_python_backend(KIND, _Module())
    # Autocast changes no dtypes on this device, because waits do not depend on dtypes.
    library = torch.library.Library("_", "IMPL", "AutocastPrivateUse1")
    library.fallback(torch.library.fallthrough_kernel)
    _LIBRARIES.append(library)

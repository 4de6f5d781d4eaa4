"""Measure the memory that a forward needs in addition to the weights, with a dry run on the meta device."""

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from headway.core.training.evaluation_mode import use_evaluation_mode
from headway.errors import ConfigError, DeviceMapError
from headway.offload._torch import TorchDispatchMode, tree_leaves, tree_map_only
from headway.offload.placement.sizes import Dtype, parse_dtype

_GROUPED = frozenset(
    function
    for function in (getattr(torch, "_grouped_mm", None), getattr(torch.nn.functional, "grouped_mm", None))
    if function is not None
)
"""Functions for grouped matrix products that the installed version of torch has."""


@dataclass(frozen=True)
class Workload:
    """Workload for which memory is reserved when weights are placed, for `infer_auto_device_map(workload=...)`.

    Attributes:
        batch_size: Number of samples, at least 1. Default: 1.
        num_tokens: Tokens per sample, at least 1, including those to be generated. One forward over all of them is
            measured, which needs more memory than generation of the same length. Default: 1.
        dtype: Dtype of activations and caches. None (the default): the dtype in which the model is loaded, or else that
            of the model's first floating parameter.
        use_cache: Whether to count the memory that the model keeps between forwards, such as KV caches. Default: True.
        inputs: Tensors by argument of `forward`, with the shapes to be run, for models without `input_ids`. Their values
            do not matter. If given, `batch_size` and `num_tokens` are not used. None (the default): token IDs.

    Raises:
        ConfigError: If `batch_size` or `num_tokens` is less than 1.

    Example::

        workload = Workload(batch_size=4, num_tokens=2048)
        device_map = infer_auto_device_map(model, {0: "20GiB", "cpu": "60GiB"}, workload=workload)
    """

    batch_size: int = 1
    num_tokens: int = 1
    dtype: Dtype | None = None
    use_cache: bool = True
    inputs: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.batch_size < 1 or self.num_tokens < 1:
            raise ConfigError(
                f"a workload of batch_size={self.batch_size} and num_tokens={self.num_tokens}; both are 1 or more"
            )


class ModuleDemand(NamedTuple):
    """Memory in bytes that one forward needs in a module in addition to the weights.

    Attributes:
        cache: Memory that stays in use after the forward, such as a KV cache.
        activations: Peak of the memory that is in use only while the module runs.
    """

    cache: int = 0
    activations: int = 0


def measure_demands(
    model: nn.Module, names: Sequence[str], workload: Workload, dtype: Dtype | None = None
) -> dict[str, ModuleDemand]:
    """Return the memory that one forward needs in each module, by module name. Modules that need none are left out.

    Tensors that the model keeps for the next forward, such as a KV cache, stay in use. Tensors that a forward returns,
    such as logits, belong to the caller and count as temporary.

    The model runs on the meta device. Nothing is computed, and its own tensors are not changed. If the model reads a
    value, such as whether there is padding, the value is 0. Each call of
    `torch.nn.functional.scaled_dot_product_attention` counts as a kernel that does not store its scores.

    Args:
        model: Model to measure.
        names: Names of the modules to measure.
        workload: Workload to run.
        dtype: Dtype in which the model will be loaded. The workload's own dtype takes precedence.
            None (the default): the model's dtype.

    Raises:
        DeviceMapError: If the model does not run on the meta device with these inputs.
    """
    demands, _ = _run_on_meta(model, names, workload, dtype)
    return demands


def measure_cache_and_outputs(model: nn.Module, workload: Workload, dtype: Dtype | None = None) -> tuple[int, int]:
    """Return the bytes that one forward keeps for the next one (a KV cache), and the bytes of its outputs (logits).

    Args:
        model: Model to measure.
        workload: Workload to run.
        dtype: Dtype in which the model will be loaded. The workload's own dtype takes precedence.
            None (the default): the model's dtype.

    Raises:
        DeviceMapError: If the model does not run on the meta device with these inputs.
    """
    demands, output_bytes = _run_on_meta(model, [""], workload, dtype)
    return sum(each.cache for each in demands.values()), output_bytes


def _run_on_meta(
    model: nn.Module, names: Sequence[str], workload: Workload, dtype: Dtype | None
) -> tuple[dict[str, ModuleDemand], int]:
    """Run one forward on the meta device, and measure its memory. See `measure_demands` for the arguments.

    Returns:
        Tuple of (memory that each module needs, by module name; bytes of the outputs).

    Raises:
        DeviceMapError: If the model does not run on the meta device with these inputs.
    """
    record = _StorageRecord()
    modules = dict(model.named_modules())
    watched = {name: modules[name] for name in names if name in modules}
    tensors = _make_meta_tensors(model, workload.dtype or dtype)
    arguments = _make_arguments(model, workload)
    try:
        with ExitStack() as stack:
            stack.enter_context(use_evaluation_mode(model))
            stack.enter_context(torch.no_grad())
            stack.enter_context(_watch_modules(watched, record))
            stack.enter_context(_FusedOperations())
            stack.enter_context(record)
            outputs = torch.func.functional_call(model, tensors, kwargs=arguments)
            output_sizes = _measure_outputs(outputs)
            demands = record.summarize(output_sizes)
            del outputs
    except (RuntimeError, TypeError, ValueError, AttributeError) as error:
        raise DeviceMapError(
            f"the workload could not be measured: {type(model).__name__} does not run on the meta device with "
            f"{', '.join(arguments)} ({error}). Give inputs={{argument: tensor}} with the shapes to be run, or place the "
            "model without a workload and leave free memory in max_memory"
        ) from error
    return demands, sum(output_sizes.values())


def _measure_outputs(outputs: Any) -> dict[int, int]:
    """Return the size in bytes of each storage in a forward's outputs, by storage address.

    Only outputs that are tensors count. Tensors inside container objects, such as caches, are not included.
    """
    values: Iterable[Any] = ()
    if isinstance(outputs, torch.Tensor):
        values = (outputs,)
    elif isinstance(outputs, Mapping):
        values = outputs.values()
    elif isinstance(outputs, tuple | list):
        values = outputs
    storages = [value.untyped_storage() for value in values if isinstance(value, torch.Tensor)]
    return {storage._cdata: storage.nbytes() for storage in storages}


def _make_meta_tensors(model: nn.Module, dtype: Dtype | None) -> dict[str, torch.Tensor]:
    """Return copies of the model's tensors on the meta device, by name, with floating tensors in `dtype`.

    If `dtype` is not a floating dtype of torch with at least 16 bits, the dtype of the first such parameter is used
    instead. Tied tensors stay tied.
    """
    target = parse_dtype(dtype)
    if not isinstance(target, torch.dtype) or not target.is_floating_point or target.itemsize < 2:
        target = next((p.dtype for p in model.parameters() if p.is_floating_point() and p.dtype.itemsize > 1), None)
    copies: dict[int, torch.Tensor] = {}  # by `id` of the original, so that tied tensors stay tied
    copies_by_name: dict[str, torch.Tensor] = {}
    for name, tensor in [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]:
        if id(tensor) not in copies:
            copy_dtype = target if tensor.is_floating_point() else tensor.dtype
            copies[id(tensor)] = torch.empty_like(tensor, device="meta", dtype=copy_dtype)
        copies_by_name[name] = copies[id(tensor)]
    return copies_by_name


def _make_arguments(model: nn.Module, workload: Workload) -> dict[str, Any]:
    """Return the keyword arguments of the forward, with all tensors on the meta device.

    They are the workload's inputs or, without these, token IDs for a model with `input_ids`.
    """
    if workload.inputs is not None:
        return {
            name: tree_map_only(torch.Tensor, lambda tensor: tensor.to("meta"), value)
            for name, value in workload.inputs.items()
        }
    tokens = torch.empty(workload.batch_size, workload.num_tokens, dtype=torch.long, device="meta")
    arguments: dict[str, Any] = {"input_ids": tokens}
    config = getattr(model, "config", None)
    if config is not None and hasattr(config, "use_cache"):
        arguments["use_cache"] = workload.use_cache
    if getattr(config, "is_encoder_decoder", False):
        arguments["decoder_input_ids"] = tokens
    return arguments


class _Allocation(NamedTuple):
    """Storage that the forward has allocated.

    Attributes:
        module: Name of the module that was running; None before any module has run.
        num_bytes: Size of the storage.
    """

    module: str | None
    num_bytes: int


class _MemoryEvent(NamedTuple):
    """Allocation or release of a storage.

    Attributes:
        module: Name of the module that was running; None before any module has run.
        number: Index of the storage in `_StorageRecord.allocations`.
        sign: 1 for an allocation, -1 for a release.
    """

    module: str | None
    number: int
    sign: int


class _StorageRecord(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that records which module allocates each storage, and when the storage is freed.

    Attributes:
        running: Names of the modules whose forward is running, the innermost last.
        last: Name of the module that ran last. Allocations between two modules count for it.
        alive: Index in `allocations` of each storage that exists, by storage address.
        allocations: All storages, in the order of allocation.
        events: Allocations and releases, in order.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.running: list[str] = []
        self.last: str | None = None
        self.alive: dict[int, int] = {}
        self.allocations: list[_Allocation] = []
        self.events: list[_MemoryEvent] = []

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:  # `.item()`, which a meta tensor does not support
            return torch.zeros((), dtype=args[0].dtype).item()
        result = func(*args, **(kwargs or {}))
        # A view shares the storage of an argument.
        argument_storages = {
            leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)
        }
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                if storage._cdata not in argument_storages and storage._cdata not in self.alive:
                    self._record_allocation(storage)
        return result

    def _record_allocation(self, storage: torch.UntypedStorage) -> None:
        """Record that a storage was allocated now, and record its release when it is freed."""
        number = self.alive[storage._cdata] = len(self.allocations)
        self.allocations.append(_Allocation(self._get_current(), storage.nbytes()))
        self.events.append(_MemoryEvent(self._get_current(), number, 1))
        weakref.finalize(storage, self._record_release, storage._cdata, number)

    def _record_release(self, address: int, number: int) -> None:
        """Record that a storage was freed now.

        Args:
            address: Address of the storage.
            number: Index of its allocation.
        """
        if self.alive.get(address) == number:  # the address can already belong to a newer storage
            del self.alive[address]
        self.events.append(_MemoryEvent(self._get_current(), number, -1))

    def _get_current(self) -> str | None:
        return self.running[-1] if self.running else self.last

    def summarize(self, output_addresses: Iterable[int] = ()) -> dict[str, ModuleDemand]:
        """Return the memory that each module needs, by module name.

        Call it while the outputs still exist. Memory that is allocated before any module runs counts for the first one.

        Args:
            output_addresses: Addresses of the outputs' storages, which belong to the caller and count only for the
                peak. Default: none.
        """
        outputs = set(output_addresses)
        cached = {number for address, number in self.alive.items() if address not in outputs}
        first_module = next((event.module for event in self.events if event.module is not None), "")
        cache: Counter[str] = Counter()
        for number in cached:
            allocation = self.allocations[number]
            cache[allocation.module or first_module] += allocation.num_bytes
        peaks: dict[str, int] = {}
        temporary = 0
        for event in list(self.events):  # a copy, because storages can be released meanwhile
            if event.number not in cached:
                temporary += event.sign * self.allocations[event.number].num_bytes
                module = event.module or first_module
                peaks[module] = max(peaks.get(module, 0), temporary)
        return {name: ModuleDemand(cache[name], peaks.get(name, 0)) for name in {*cache, *peaks}}


class _FusedOperations(TorchFunctionMode):
    """Torch function mode that allocates only the output of operations that accelerators run as one kernel."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.nn.functional.scaled_dot_product_attention and len(args) >= 3:
            query, value = args[0], args[2]
            return query.new_empty((*query.shape[:-1], value.shape[-1]))
        if func in _GROUPED and len(args) >= 2 and args[0].ndim == 2 and args[1].ndim == 3:
            # Experts: (tokens, in) x (experts, in, out). torch's meta kernel accepts only bfloat16.
            return args[0].new_empty((args[0].shape[0], args[1].shape[-1]))
        return func(*args, **kwargs)


@contextmanager
def _watch_modules(watched: Mapping[str, nn.Module], record: _StorageRecord) -> Iterator[None]:
    """Return a context in which forward hooks inform a storage record about which modules are running.

    Args:
        watched: Modules by name.
        record: Storage record to update.
    """
    handles = []
    for name, module in watched.items():

        def enter_module(module: nn.Module, args: Any, name: str = name) -> None:
            record.running.append(name)

        def leave_module(module: nn.Module, args: Any, output: Any) -> None:
            record.last = record.running.pop()

        handles += [module.register_forward_pre_hook(enter_module), module.register_forward_hook(leave_module)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()

"""A declared workload: what the first forward will need beside the weights, by a dry run on the meta device."""

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from headway.errors import ConfigError, DeviceMapError
from headway.offload.placement.sizes import Dtype, as_dtype


@dataclass(frozen=True)
class Workload:
    """What will be run, so that room for it is left when the weights are placed.

    Attributes:
        batch_size: samples at once.
        num_tokens: tokens of each, those to be generated included: one forward over all of them is measured, which is
            more than a generation of the same length needs.
        dtype: of activations and caches; None is what the model will be loaded with, else that of the first floating parameter.
        use_cache: count what the model keeps between forwards (KV caches).
        inputs: {argument of forward: tensor} with the shapes to be run, for models that do not take `input_ids`;
            batch_size and num_tokens are then not used.
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


def demands(
    model: nn.Module, names: Sequence[str], workload: Workload, dtype: Dtype | None = None
) -> dict[str, tuple[int, int]]:
    """(bytes it leaves behind, bytes at its peak) of one forward, for each named module that runs.

    What is left behind is what the model keeps for the next forward, a KV cache. The tensors that a forward returns, such as
    logits, are the caller's to drop, and count for the peak.

    The model runs on the meta device: nothing is computed, and its own tensors are not touched. A value that it reads (to
    see whether there is padding) is zero. Attention through
    torch.nn.functional.scaled_dot_product_attention counts as a kernel that does not write its scores out.

    Args:
        dtype: what the model will be loaded with; the workload's own dtype comes first.

    Raises:
        DeviceMapError: the model does not run on the meta device with these inputs.
    """
    return _measure(model, names, workload, dtype)[0]


def cache_and_outputs(model: nn.Module, workload: Workload, dtype: Dtype | None = None) -> tuple[int, int]:
    """Bytes of what one forward keeps for the next (a KV cache), and of the tensors that it returns (e.g. logits).

    The arguments and errors are those of `demands`.
    """
    found, outputs = _measure(model, [""], workload, dtype)
    return sum(kept for kept, _ in found.values()), outputs


def _measure(
    model: nn.Module, names: Sequence[str], workload: Workload, dtype: Dtype | None
) -> tuple[dict[str, tuple[int, int]], int]:
    record = _Record()
    modules = dict(model.named_modules())
    watched = {name: modules[name] for name in names if name in modules}
    tensors = _on_meta(model, workload.dtype or dtype)
    arguments = _arguments(model, workload)
    was_training = [module for module in modules.values() if module.training]
    try:
        with ExitStack() as stack:
            model.eval()
            stack.enter_context(torch.no_grad())
            stack.enter_context(_entering(watched, record))
            stack.enter_context(_Fused())
            stack.enter_context(record)
            outputs = torch.func.functional_call(model, tensors, kwargs=arguments)
            returned = _returned(outputs)
            found = record.result(returned)
            del outputs
    except (RuntimeError, TypeError, ValueError, AttributeError) as error:
        raise DeviceMapError(
            f"the workload could not be measured: {type(model).__name__} does not run on the meta device with "
            f"{', '.join(arguments)} ({error}). Give inputs={{argument: tensor}} with the shapes to be run, or place the "
            "model without a workload and leave room in max_memory"
        ) from error
    finally:
        for module in was_training:
            module.training = True
    return found, sum(returned.values())


def _returned(outputs: Any) -> dict[int, int]:
    """The storages of the tensors that a forward returns, {address: bytes}; caches are containers, and not among them."""
    if isinstance(outputs, torch.Tensor):
        outputs = (outputs,)
    values = outputs.values() if isinstance(outputs, Mapping) else outputs if isinstance(outputs, tuple | list) else ()
    storages = [value.untyped_storage() for value in values if isinstance(value, torch.Tensor)]
    return {storage._cdata: storage.nbytes() for storage in storages}


def _on_meta(model: nn.Module, dtype: Dtype | None) -> dict[str, torch.Tensor]:
    """The model's tensors without values, floating ones in `dtype`; a tied one is one tensor again."""
    target = as_dtype(dtype)
    if not isinstance(target, torch.dtype) or not target.is_floating_point or target.itemsize < 2:
        target = next((p.dtype for p in model.parameters() if p.is_floating_point() and p.dtype.itemsize > 1), None)
    known: dict[int, torch.Tensor] = {}
    found: dict[str, torch.Tensor] = {}
    for name, tensor in [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]:
        if id(tensor) not in known:
            kind = target if tensor.is_floating_point() else tensor.dtype
            known[id(tensor)] = torch.empty_like(tensor, device="meta", dtype=kind)
        found[name] = known[id(tensor)]
    return found


def _arguments(model: nn.Module, workload: Workload) -> dict[str, Any]:
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


class _Record(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Which storages were made while which module ran, when they went, and which are left at the end."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.running: list[str] = []
        self.last: str | None = None  # the module that ran last: what happens between two counts for it
        self.alive: dict[int, int] = {}  # storage's address -> its number
        self.made_by: list[tuple[str | None, int]] = []  # by number: module, bytes
        self.events: list[tuple[str | None, int, int]] = []  # (module, number, +1 or -1)

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return torch.zeros((), dtype=args[0].dtype).item()
        result = func(*args, **(kwargs or {}))
        given = {
            leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)
        }
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                if storage._cdata not in given and storage._cdata not in self.alive:
                    self._made(storage)
        return result

    def _made(self, storage: torch.UntypedStorage) -> None:
        number = self.alive[storage._cdata] = len(self.made_by)
        self.made_by.append((self._now(), storage.nbytes()))
        self.events.append((self._now(), number, 1))
        weakref.finalize(storage, self._gone, storage._cdata, number)

    def _gone(self, address: int, number: int) -> None:
        if self.alive.get(address) == number:
            del self.alive[address]
        self.events.append((self._now(), number, -1))

    def _now(self) -> str | None:
        return self.running[-1] if self.running else self.last

    def result(self, returned: Iterable[int] = ()) -> dict[str, tuple[int, int]]:
        """For each module, (bytes that stay, most bytes alive at once while it ran). Call it while the outputs live.

        Args:
            returned: addresses of storages that are the caller's in the end, and do not stay.
        """
        left = {number for address, number in self.alive.items() if address not in set(returned)}
        kept: Counter[str] = Counter()
        peak: dict[str, int] = {}
        first = next((name for name, _, _ in self.events if name is not None), "")
        for number in left:
            name, size = self.made_by[number]
            kept[name or first] += size
        alive = 0
        for name, number, change in list(self.events):
            if number not in left:
                alive += change * self.made_by[number][1]
                peak[name or first] = max(peak.get(name or first, 0), alive)
        return {name: (kept[name], peak.get(name, 0)) for name in {*kept, *peak}}


class _Fused(TorchFunctionMode):
    """Kernels that are one on an accelerator, as one: their output, and nothing in between."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.nn.functional.scaled_dot_product_attention and len(args) >= 3:
            query, value = args[0], args[2]
            return query.new_empty((*query.shape[:-1], value.shape[-1]))
        if func in _GROUPED and len(args) >= 2 and args[0].ndim == 2 and args[1].ndim == 3:
            # Experts: (tokens, in) x (experts, in, out); the meta version takes bfloat16 alone.
            return args[0].new_empty((args[0].shape[0], args[1].shape[-1]))
        return func(*args, **kwargs)


_GROUPED = frozenset(
    found
    for found in (getattr(torch, "_grouped_mm", None), getattr(torch.nn.functional, "grouped_mm", None))
    if found is not None
)


@contextmanager
def _entering(watched: Mapping[str, nn.Module], record: _Record) -> Iterator[None]:
    """Tell the record which of the modules runs."""
    handles = []
    for name, module in watched.items():

        def enter(module: nn.Module, args: Any, name: str = name) -> None:
            record.running.append(name)

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            record.last = record.running.pop()

        handles += [module.register_forward_pre_hook(enter), module.register_forward_hook(leave)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()

"""Stream of a model's weights to an inference engine: full (gathered) tensors in buckets of limited size.

All ranks iterate together.

Adapters are merged into their layers one layer at a time. The model itself does not change. Each adapted layer is
rebuilt from full tensors and merged by PEFT itself, so values equal those of `merge_and_unload`.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from headway.common.text import parse_bytes
from headway.core.runtime.collectives.checked import Collectives
from headway.core.strategies.parts import find_outermost
from headway.core.training.gathered_tensors import GatheredTensor, iterate_buckets, pass_by_all, wrap_sharded
from headway.core.training.interfaces import WeightBuckets
from headway.core.weights.compiled import remove_compiled_levels, rename_bare_items, unwrap_compiled
from headway.core.weights.export import split_ties
from headway.core.weights.module_copy import copy_with_tensors
from headway.core.weights.shards import TensorSpec, get_dtype_name
from headway.errors import CollectiveError, UnsupportedError

Bucket = list[tuple[str, torch.Tensor]]
"""Pairs of (name, tensor): full tensors on rank 0, meta tensors without memory on the other ranks."""


class WeightStream(WeightBuckets):
    """Iterable over a model's full tensors in buckets, which are gathered on demand.

    Every rank must iterate over it exactly once. A bucket is emptied when the next one is requested.

    If a rank leaves the loop early, because of an error or a `break`, the loop raises CollectiveError on the other
    ranks.

    Args:
        tensors: Pairs of (name, tensor) of the model. Only the first of several tied tensors is sent.
        bucket_size: Maximum size of a bucket, in bytes or as text such as "64MiB". A larger tensor gets its own bucket.
        everyone: Collectives over all ranks.
        adapted: Model whose adapters are merged. None: adapters are sent separately.

    Attributes:
        metadata: Triples of (name, dtype name, shape), one per tensor, in the order in which they are sent.

    Raises:
        CheckpointError: If ranks have different tensors.
        ConfigError: If `bucket_size` is not a size.
        UnsupportedError: If `adapted` has no adapters, or they cannot be merged.
    """

    def __init__(
        self,
        tensors: Iterable[tuple[str, Any]],
        bucket_size: int | str,
        everyone: Collectives,
        adapted: torch.nn.Module | None = None,
    ) -> None:
        kept, tied = split_ties(tensors)
        self._whole: Mapping[str, Any] = wrap_sharded(kept, everyone)
        if adapted is not None:
            self._whole = merge_adapters(adapted, self._whole, tied)
        self._most = parse_bytes(bucket_size)
        self._everyone = everyone
        self.metadata = [(name, get_dtype_name(each.dtype), list(each.shape)) for name, each in self._whole.items()]

    def __iter__(self) -> Iterator[Bucket]:
        others_left, is_within = False, False
        specs = {name: TensorSpec(tuple(each.shape), each.dtype) for name, each in self._whole.items()}
        sizes = ((name, spec.num_bytes) for name, spec in specs.items())
        try:
            for names in [*iterate_buckets(sizes, self._most), []]:
                is_within, others_left = False, self._exchange_leaving()
                if others_left or not names:
                    break
                is_within = True
                bucket = self._gather_bucket(names)  # if this raises, the other ranks must learn of it
                yield bucket
                bucket.clear()  # otherwise the receiver's variable keeps this bucket alive while the next one is gathered
        finally:
            if is_within:
                self._exchange_leaving(leaves=True)
        if others_left:
            raise CollectiveError(
                "another rank left accelerator.stream_weights() early, by a break or by an error, which its output shows. All "
                "ranks have stopped, and the receiver has only a part of the weights"
            )

    def _exchange_leaving(self, leaves: bool = False) -> bool:
        """Tell all ranks whether this rank leaves the loop. Return whether any other rank leaves it.

        This is a collective.

        Args:
            leaves: Whether this rank leaves the loop.
        """
        rows = self._everyone.gather_numbers([float(leaves)], "stream_weights")
        return any(row[0] for rank, row in enumerate(rows) if rank != self._everyone.rank)

    def _gather_bucket(self, names: list[str]) -> Bucket:
        found = [(name, self._whole[name]) for name in names]
        try:
            if self._everyone.rank == 0:
                return [(name, each.assemble() if isinstance(each, GatheredTensor) else each) for name, each in found]
        finally:  # on other ranks, and on rank 0 if it ran out of memory: the others still send
            pass_by_all(each for _, each in found)
        return [(name, torch.empty(each.shape, dtype=each.dtype, device="meta")) for name, each in found]


# ---------------------------------------------------------------- adapters

_BASE = "base_model.model."
"""Prefix under which a PeftModel keeps the model that it adapts."""


class MergedLayer:
    """Layer with PEFT adapters. Its tensors are gathered and merged on first use.

    The layer does not keep a merged tensor after `take_tensor` has returned it.

    Args:
        layer: Layer of the model, whose own tensors can be shards.
        parts: Tensors of the layer by relative name, full or as `GatheredTensor`.

    Attributes:
        specs: Tensors of the merged layer by name, on the meta device.

    Raises:
        UnsupportedError: If PEFT cannot merge the layer without values, for example on a quantized base.
    """

    def __init__(self, layer: torch.nn.Module, parts: Mapping[str, Any]) -> None:
        self._layer, self._parts = layer, parts
        self._made: dict[str, torch.Tensor] | None = None
        empty = {name: torch.empty(each.shape, dtype=each.dtype, device="meta") for name, each in parts.items()}
        try:
            self.specs = self._merge_values(empty)
        except Exception as error:
            raise UnsupportedError(
                f"merge_adapters=True: a {type(layer).__name__} cannot be merged ({type(error).__name__}: {error}); on quantized "
                "bases, leave it out, so that adapters are sent separately, or load the base unquantized"
            ) from error

    def _merge_values(self, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        twin: Any = copy_with_tensors(self._layer, values)
        for part in twin.modules():
            if hasattr(part, "parameter_name"):  # experts: under "ep" the layer counts only this rank's
                shape = part.get_param().shape
                part.num_experts = shape[0] if len(shape) == 3 else 1
        with torch.no_grad():
            if hasattr(twin, "unload_and_optionally_merge_module"):
                merged = twin.unload_and_optionally_merge_module(merge=True, safe_merge=False, adapter_names=None)
            else:
                twin.merge(safe_merge=False)
                merged = twin.get_base_layer()
        return {name: value.detach() for name, value in rename_bare_items(merged.state_dict().items())}

    def join_transfer(self) -> None:
        """Take part in the transfer of the layer's tensors to rank 0."""
        pass_by_all(self._parts.values())

    def take_tensor(self, name: str) -> torch.Tensor:
        """Return a merged tensor, and release the layer's reference to it.

        Only rank 0 may call this method. The other ranks call `join_transfer`.
        """
        if self._made is None:
            self._made = self._merge_values({
                key: each.assemble() if isinstance(each, GatheredTensor) else each.detach().clone()
                for key, each in self._parts.items()
            })  # fmt: skip
        return self._made.pop(name)


class MergedTensor(GatheredTensor):
    """Tensor of a merged layer, which is built on rank 0 on demand.

    Args:
        layer: Merged layer.
        name: Name of the tensor within the layer.
    """

    def __init__(self, layer: MergedLayer, name: str) -> None:
        self.shape, self.dtype = layer.specs[name].shape, layer.specs[name].dtype
        self.is_done = False
        self._layer, self._name = layer, name

    def assemble(self) -> torch.Tensor:
        """Return the full tensor with merged adapters. Called on rank 0; the other ranks call `pass_by`."""
        self.is_done = True
        return self._layer.take_tensor(self._name)

    def pass_by(self) -> None:
        """Take part in the transfer of the layer's tensors to rank 0, without building the merged tensor."""
        self.is_done = True
        self._layer.join_transfer()


def merge_adapters(model: torch.nn.Module, whole: Mapping[str, Any], tied: Mapping[str, str]) -> dict[str, Any]:
    """Return a model's tensors with its adapters merged, under the names that `merge_and_unload` would give them.

    Args:
        model: Model with PEFT adapters.
        whole: Tensors of the model by name, with sharded ones as `GatheredTensor`.
        tied: Names of tied tensors that `whole` leaves out, mapped to the name under which `whole` contains the tensor.

    Raises:
        UnsupportedError: If there are no adapters, or they cannot be merged.
    """
    paths = {id(module): name for name, module in model.named_modules()}
    layers = {
        remove_compiled_levels(f"{paths[id(module)]}.")[:-1]: unwrap_compiled(module)
        for module in find_outermost([model], _is_adapted)
    }
    if not layers:
        raise UnsupportedError(
            f"merge_adapters=True: {type(model).__name__} has no adapters that PEFT could merge; leave it out"
        )
    taken: dict[str, Any] = {}
    replaced: set[str] = set()
    for path, layer in layers.items():
        own = {name: tied.get(name, name) for name in (*whole, *tied) if name.startswith(f"{path}.")}
        made = MergedLayer(layer, {name.removeprefix(f"{path}."): whole[key] for name, key in own.items()})
        replaced.update(own)
        for name in made.specs:
            kept = tied.get(
                f"{path}.base_layer.{name}", f"{path}.{name}"
            )  # PEFT changes a tied tensor for all its holders
            if kept in taken:
                raise UnsupportedError(
                    f"merge_adapters=True: {kept} is shared by several adapted layers; leave it out, "
                    "so that adapters are sent separately"
                )
            taken[kept] = MergedTensor(made, name)
    rest = {name: each for name, each in whole.items() if name not in replaced}
    return {name.removeprefix(_BASE): each for name, each in _order_tensors(rest, taken, replaced, whole)}


def _order_tensors(
    rest: Mapping[str, Any], taken: Mapping[str, Any], replaced: set[str], whole: Mapping[str, Any]
) -> Iterator[tuple[str, Any]]:
    """Yield pairs of (name, tensor) in the model's order.

    All tensors of a merged layer are yielded at the position of the original layer's first tensor.

    Args:
        rest: Tensors of `whole` that are not replaced by merged ones, by name.
        taken: Merged tensors, by name.
        replaced: Names of the tensors of layers that have been merged.
        whole: All tensors of the model with adapters, in its order.
    """
    waiting = dict(taken)
    for name in whole:
        if name in rest:
            yield name, waiting.pop(name, rest[name])
            continue
        for found in [key for key in waiting if name.startswith(f"{key.rpartition('.')[0]}.")]:
            yield found, waiting.pop(found)
    yield from waiting.items()


def _is_adapted(module: torch.nn.Module) -> bool:
    return hasattr(module, "unload_and_optionally_merge_module") or (
        hasattr(module, "base_layer") and hasattr(module, "merge")
    )

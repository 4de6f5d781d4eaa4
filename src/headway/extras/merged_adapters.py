"""Merge PEFT adapters into full tensors one layer at a time, without changing the model.

Each adapted layer is rebuilt from full tensors and merged by PEFT itself, so values equal those of `merge_and_unload`.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from headway.core.strategies.blocks import find_outermost, get_class_name
from headway.core.training.gathered_tensors import (
    GatheredTensor,
    discard_remaining,
)
from headway.core.weights.compiled import remove_compiled_levels, rename_bare_items, unwrap_compiled
from headway.core.weights.module_copy import copy_with_tensors
from headway.errors import UnsupportedError

_BASE_PREFIX = "base_model.model."
"""Prefix under which a PeftModel keeps the model that it adapts."""


def merge_adapters(model: torch.nn.Module, tensors: Mapping[str, Any], tied_names: Mapping[str, str]) -> dict[str, Any]:
    """Return a model's tensors with its adapters merged, under the names that `merge_and_unload` would give them.

    Args:
        model: Model with PEFT adapters.
        tensors: Tensors of the model by name, with sharded ones as `GatheredTensor`.
        tied_names: Names of tied tensors that `tensors` leaves out, mapped to the name under which `tensors` contains
            the tensor.

    Raises:
        UnsupportedError: If there are no adapters, they cannot be merged, or several adapted layers share a tensor.
    """
    paths = {id(module): name for name, module in model.named_modules()}
    layers = {
        remove_compiled_levels(f"{paths[id(module)]}.")[:-1]: unwrap_compiled(module)
        for module in find_outermost([model], _is_adapted)
    }
    if not layers:
        raise UnsupportedError(
            f"merge_adapters=True: {get_class_name(model)} has no adapters that PEFT could merge; leave it out"
        )
    merged_tensors: dict[str, Any] = {}
    replaced_names: set[str] = set()
    for path, layer in layers.items():
        # Name of each tensor of the layer, mapped to the name under which `tensors` contains it.
        layer_names = {
            name: tied_names.get(name, name) for name in (*tensors, *tied_names) if name.startswith(f"{path}.")
        }
        layer_tensors = {name.removeprefix(f"{path}."): tensors[key] for name, key in layer_names.items()}
        merged_layer = MergedLayer(layer, layer_tensors)
        replaced_names.update(layer_names)
        for name in merged_layer.specs:
            # PEFT changes a tied tensor for all its holders, so it keeps the name under which it is sent.
            sent_name = tied_names.get(f"{path}.base_layer.{name}", f"{path}.{name}")
            if sent_name in merged_tensors:
                raise UnsupportedError(
                    f"merge_adapters=True: {sent_name} is shared by several adapted layers; leave it out, "
                    "so that adapters are sent separately"
                )
            merged_tensors[sent_name] = MergedTensor(merged_layer, name)
    unchanged = {name: each for name, each in tensors.items() if name not in replaced_names}
    ordered = _order_tensors(list(tensors), unchanged, merged_tensors)
    return {name.removeprefix(_BASE_PREFIX): each for name, each in ordered}


class MergedLayer:
    """Layer with PEFT adapters. Its tensors are gathered and merged on first use.

    The layer does not keep a merged tensor after `take_tensor` has returned it.

    Args:
        layer: Layer of the model, whose own tensors can be shards.
        tensors: Tensors of the layer by relative name, full or as `GatheredTensor`.

    Attributes:
        specs: Tensors of the merged layer by name, on the meta device.

    Raises:
        UnsupportedError: If PEFT cannot merge the layer without values, for example on a quantized base.
    """

    def __init__(self, layer: torch.nn.Module, tensors: Mapping[str, Any]) -> None:
        self._layer, self._tensors = layer, tensors
        self._merged: dict[str, torch.Tensor] | None = None
        meta_tensors = {
            name: torch.empty(each.shape, dtype=each.dtype, device="meta") for name, each in tensors.items()
        }
        try:
            self.specs = self._merge_values(meta_tensors)
        except Exception as error:
            raise UnsupportedError(
                f"merge_adapters=True: a {type(layer).__name__} cannot be merged ({type(error).__name__}: {error}); on quantized "
                "bases, leave it out, so that adapters are sent separately, or load the base unquantized"
            ) from error

    def _merge_values(self, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the tensors of the layer after PEFT has merged its adapters, by name.

        Args:
            values: Full tensors of the layer before the merge, by relative name. On the meta device, so is the result.
        """
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
        discard_remaining(self._tensors.values())

    def take_tensor(self, name: str) -> torch.Tensor:
        """Return a merged tensor, and release the layer's reference to it.

        Only rank 0 may call this method. The other ranks call `join_transfer`.
        """
        if self._merged is None:
            self._merged = self._merge_values({
                key: each.assemble() if isinstance(each, GatheredTensor) else each.detach().clone()
                for key, each in self._tensors.items()
            })  # fmt: skip
        return self._merged.pop(name)


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
        """Return the full tensor with merged adapters. Called on rank 0; the other ranks call `discard`."""
        self.is_done = True
        return self._layer.take_tensor(self._name)

    def discard(self) -> None:
        """Take part in the transfer of the layer's tensors to rank 0, without building the merged tensor."""
        self.is_done = True
        self._layer.join_transfer()


def _order_tensors(
    names: Iterable[str], unchanged: Mapping[str, Any], merged: Mapping[str, Any]
) -> Iterator[tuple[str, Any]]:
    """Yield pairs of (name, tensor) in the model's order.

    All tensors of a merged layer are yielded at the position of the original layer's first tensor.

    Args:
        names: Names of all tensors of the model with adapters, in its order.
        unchanged: Tensors that belong to no merged layer, by name.
        merged: Tensors of merged layers, by name. A tied one can replace an unchanged tensor of the same name.
    """
    pending = dict(merged)
    for name in names:
        if name in unchanged:
            yield name, pending.pop(name, unchanged[name])
            continue
        layer_names = [key for key in pending if name.startswith(f"{key.rpartition('.')[0]}.")]
        for merged_name in layer_names:
            yield merged_name, pending.pop(merged_name)
    yield from pending.items()


def _is_adapted(module: torch.nn.Module) -> bool:
    """Whether a module is a layer with PEFT adapters that can be merged."""
    return hasattr(module, "unload_and_optionally_merge_module") or (
        hasattr(module, "base_layer") and hasattr(module, "merge")
    )

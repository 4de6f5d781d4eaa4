"""A model's weights on their way out, to an engine that generates: whole tensors in bounded buckets, all ranks in step.

Adapters are merged into their layers on the way, layer by layer; the model itself does not change. Each adapted layer is built once
more, from whole tensors, and merged by PEFT itself: values are those of `merge_and_unload`.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from headway.common.text import parse_bytes
from headway.errors import CollectiveError, UnsupportedError
from headway.runtime.collectives.checked import Collectives
from headway.strategies.parts import outermost
from headway.training.weights import GatheredTensor, bucketed, gathered, pass_by
from headway.weights.export import untied
from headway.weights.shards import TensorSpec, dtype_name

Bucket = list[tuple[str, torch.Tensor]]
"""Names, and whole tensors on rank 0; on the other ranks without memory (meta)."""


class WeightStream:
    """Buckets of whole tensors, made as they are asked for; every rank iterates, once.

    A rank that leaves the loop early, by an error or a break, tells the others, for which that is an error, too.

    Args:
        tensors: of the model, by name; of tied ones the first comes.
        bucket_size: the most bytes in a bucket, or text such as "64MiB"; a larger tensor has a bucket of its own.
        everyone: all ranks.
        adapted: the model whose adapters are merged; None: they come apart.

    Attributes:
        metadata: (name, name of the dtype, shape) of each tensor, in the order in which they come.

    Raises:
        CheckpointError: ranks hold other tensors.
    """

    def __init__(
        self,
        tensors: Iterable[tuple[str, Any]],
        bucket_size: int | str,
        everyone: Collectives,
        adapted: torch.nn.Module | None = None,
    ) -> None:
        kept, tied = untied(tensors)
        self._whole: Mapping[str, Any] = gathered(kept, everyone)
        if adapted is not None:
            self._whole = merged(adapted, self._whole, tied)
        self._most = parse_bytes(bucket_size)
        self._everyone = everyone
        self.metadata = [(name, dtype_name(each.dtype), list(each.shape)) for name, each in self._whole.items()]

    def __iter__(self) -> Iterator[Bucket]:
        others_left, is_within = False, False
        specs = {name: TensorSpec(tuple(each.shape), each.dtype) for name, each in self._whole.items()}
        sizes = ((name, spec.num_bytes) for name, spec in specs.items())
        try:
            for names in [*bucketed(sizes, self._most), []]:
                is_within, others_left = False, self._meet()
                if others_left or not names:
                    break
                is_within, bucket = True, self._bring(names)
                yield bucket
                bucket.clear()  # else the receiver's variable keeps it while the next one comes
        finally:
            if is_within:
                self._meet(leaves=True)
        if others_left:
            raise CollectiveError(
                "another rank left accelerator.stream_weights() before its end, by a break or by an error that it shows, such as one "
                "of its receiver; all ranks have stopped, and the receiver has a part of the weights"
            )

    def _meet(self, leaves: bool = False) -> bool:
        """Does any other rank leave?"""
        rows = self._everyone.gather_numbers([float(leaves)], "stream_weights")
        return any(row[0] for rank, row in enumerate(rows) if rank != self._everyone.rank)

    def _bring(self, names: list[str]) -> Bucket:
        found = [(name, self._whole[name]) for name in names]
        try:
            if self._everyone.rank == 0:
                return [(name, each.whole() if isinstance(each, GatheredTensor) else each) for name, each in found]
        finally:  # on other ranks, and where rank 0 had no memory for one: the others send it
            pass_by(each for _, each in found)
        return [(name, torch.empty(each.shape, dtype=each.dtype, device="meta")) for name, each in found]


# ---------------------------------------------------------------- adapters

_BASE = "base_model.model."
"""Where a PeftModel has the model that it adapts."""


class MergedLayer:
    """One adapted layer: its tensors come, and those of the merged one are kept until each has been asked for.

    Args:
        layer: of the model, with whatever parts of tensors.
        parts: its tensors by their names within it: whole ones, or what brings them.

    Attributes:
        specs: the merged layer's tensors by name, without memory.

    Raises:
        UnsupportedError: a layer that PEFT does not merge without values, such as one on a quantised base.
    """

    def __init__(self, layer: torch.nn.Module, parts: Mapping[str, Any]) -> None:
        self._layer, self._parts = layer, parts
        self._made: dict[str, torch.Tensor] | None = None
        empty = {name: torch.empty(each.shape, dtype=each.dtype, device="meta") for name, each in parts.items()}
        try:
            self.specs = self._merge(empty)
        except Exception as error:
            raise UnsupportedError(
                f"merge_adapters=True: a {type(layer).__name__} cannot be merged ({type(error).__name__}: {error}); on quantised "
                "bases, leave it out, so that adapters are sent separately, or load the base unquantised"
            ) from error

    def _merge(self, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        twin: Any = _twin(self._layer, values)
        with torch.no_grad():
            if hasattr(twin, "unload_and_optionally_merge_module"):
                merged = twin.unload_and_optionally_merge_module(merge=True, safe_merge=False, adapter_names=None)
            else:
                twin.merge(safe_merge=False)
                merged = twin.get_base_layer()
        return {name: value.detach() for name, value in merged.state_dict().items()}

    def bring(self) -> None:
        """Let its tensors travel, for the other ranks' sake."""
        pass_by(self._parts.values())

    def take(self, name: str) -> torch.Tensor:
        """One of the merged tensors, on rank 0."""
        if self._made is None:
            self._made = self._merge({
                key: each.whole() if isinstance(each, GatheredTensor) else each.detach().clone()
                for key, each in self._parts.items()
            })  # fmt: skip
        return self._made.pop(name)


class MergedTensor(GatheredTensor):
    """A tensor of a merged layer.

    Args:
        layer: which.
        name: within it.
    """

    def __init__(self, layer: MergedLayer, name: str) -> None:
        self.shape, self.dtype = layer.specs[name].shape, layer.specs[name].dtype
        self.is_done = False
        self._layer, self._name = layer, name

    def whole(self) -> torch.Tensor:
        """On rank 0."""
        self.is_done = True
        return self._layer.take(self._name)

    def pass_by(self) -> None:
        """Elsewhere."""
        self.is_done = True
        self._layer.bring()


def merged(model: torch.nn.Module, whole: Mapping[str, Any], tied: Mapping[str, str]) -> dict[str, Any]:
    """What `merge_and_unload` would leave, by the names of the bare model.

    Args:
        model: with adapters of PEFT's.
        whole: its tensors by name, those that are spread as `GatheredTensor`.
        tied: names that `whole` leaves out, with those of the same tensors that are there.

    Raises:
        UnsupportedError: there are no adapters, or they cannot be merged.
    """
    paths = {id(module): name for name, module in model.named_modules()}
    layers = {paths[id(module)]: module for module in outermost([model], _is_adapted)}
    if not layers:
        raise UnsupportedError(
            f"merge_adapters=True: {type(model).__name__} has no adapters that PEFT could merge; leave it out"
        )
    taken: dict[str, Any] = {}
    gone: set[str] = set()
    for path, layer in layers.items():
        own = {name: tied.get(name, name) for name in (*whole, *tied) if name.startswith(f"{path}.")}
        made = MergedLayer(layer, {name.removeprefix(f"{path}."): whole[key] for name, key in own.items()})
        gone.update(own)
        for name in made.specs:
            kept = tied.get(
                f"{path}.base_layer.{name}", f"{path}.{name}"
            )  # PEFT adds to a tied tensor for all that hold it
            if kept in taken:
                raise UnsupportedError(
                    f"merge_adapters=True: {kept} is shared by several adapted layers; leave it out, "
                    "so that adapters are sent separately"
                )
            taken[kept] = MergedTensor(made, name)
    rest = {name: each for name, each in whole.items() if name not in gone}
    return {name.removeprefix(_BASE): each for name, each in _ordered(rest, taken, gone, whole)}


def _ordered(
    rest: Mapping[str, Any], taken: Mapping[str, Any], gone: set[str], whole: Mapping[str, Any]
) -> Iterator[tuple[str, Any]]:
    """Each layer's where its first tensor was."""
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


def _twin(module: torch.nn.Module, values: Mapping[str, torch.Tensor], path: str = "") -> torch.nn.Module:
    """The module once more, with these tensors by name."""
    twin: Any = object.__new__(type(module))
    twin.__dict__.update({
        key: value.copy() if type(value) in (list, dict, set) else value for key, value in vars(module).items()
    })  # fmt: skip
    for table in (twin._parameters, twin._buffers):
        for key in [key for key in table if path + key in values]:
            value = values[path + key]
            table[key] = torch.nn.Parameter(value, requires_grad=False) if table is twin._parameters else value
    for key, child in module._modules.items():
        twin._modules[key] = None if child is None else _twin(child, values, f"{path}{key}.")
    return twin  # type: ignore[no-any-return]

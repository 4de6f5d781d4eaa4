"""Digests that replace the frozen weights in a checkpoint.

A checkpoint can hold only a digest of each frozen weight instead of its values, for example for a base model with
adapters. A digest is the sum over a tensor's elements, each multiplied by an odd number that depends on its position.
The terms of all ranks' elements are added, so a base model has equal digests in every layout. A change of any single
element changes the digest.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from headway.core.checkpoint import _torch
from headway.core.checkpoint.format.text import to_logical_name
from headway.core.checkpoint.state import CollectedState, StatefulObjects
from headway.core.runtime.collectives.checked import Collectives
from headway.core.weights.compiled import rename_bare_items
from headway.core.weights.pieces import ShardPiece, TensorBox, get_local_part, get_memory_key, is_dtensor, is_sharded
from headway.core.weights.shard_splitter import ShardSplitter
from headway.core.weights.tensor_bytes import INTEGERS, get_dtype_name, get_raw_bytes, view_as_bits
from headway.errors import CheckpointError
from headway.log import get_logger

log = get_logger(__name__)

_KEY = "frozen"
"""Key of the digests in the manifest's state."""
_ODD, _MIX, _WRAP = -7046029254386353131, -4417276706812531889, 2**64
"""Constants of the digests. `_ODD`, `_MIX`: odd factors that mix positions and values. `_WRAP`: modulus of a digest."""
_BLOCK = 2**20
"""Number of elements that are processed at once when a digest is computed."""
_NUM_SAMPLED = 4096
"""Maximum number of evenly spaced elements of a tensor that are compared before its digest is used again."""
_CHANGED = (
    "%d frozen weights have changed since this run first saved or loaded them (%s, for example). With save_frozen=False, this "
    "checkpoint does not hold them, so a run can resume from it only on a base model that has been changed in the same way. "
    "merge_adapter() and unmerge_adapter() of PEFT change the base model, too: merge a copy, or save with save_frozen=True"
)


class FrozenWeights:
    """Digests that replace the frozen weights in a checkpoint, with a comparison during a load.

    Args:
        everyone: Collectives over all ranks.
    """

    def __init__(self, everyone: Collectives) -> None:
        self._everyone = everyone
        self._cache: dict[str, tuple[Any, list[Any]]] = {}
        """Pair of (key that changes with the tensor, digest entry), by logical name."""
        self._first_digests: dict[str, list[Any]] = {}
        """Digest entry of each weight at the first save or load, by logical name."""

    def replace_with_digests(
        self, collected: CollectedState, models: Iterable[torch.nn.Module], is_alone: bool
    ) -> None:
        """Replace the frozen weights in a state with their digests. Every rank must call it unless `is_alone` is True.

        A warning is logged if frozen weights have changed since the first save or load.

        Args:
            collected: State to change.
            models: Models without wrappers.
            is_alone: Whether only this rank calls it. Its tensors must then be unsharded.
        """
        frozen = {
            to_logical_name(f"model/{index}/{name}")
            for index, model in enumerate(models)
            for name, parameter in rename_bare_items(model.named_parameters())
            if not parameter.requires_grad
        }
        # The name of a tensor that belongs to a quantized weight begins with the weight's name.
        names = [name for name in collected.tensors if frozen & {name, *_list_enclosing_names(name)}]
        digests = self._compute_digests({name: collected.tensors.pop(name) for name in names}, is_alone)
        changed = [name for name, digest in digests.items() if self._first_digests.setdefault(name, digest) != digest]
        if changed:
            log.warning_once(_CHANGED, len(changed), changed[0])
        tied_digests = {tied: digests[name] for tied, name in collected.aliases.items() if name in digests}
        collected.aliases = {tied: name for tied, name in collected.aliases.items() if tied not in tied_digests}
        collected.state[_KEY] = digests | tied_digests

    def verify_and_exclude(self, saved_state: CollectedState, objects: StatefulObjects) -> StatefulObjects:
        """Compare this run's frozen weights with the saved digests, and exclude these weights from the load.

        Every rank must call it.

        Args:
            saved_state: Loaded state. The digests are removed from it.
            objects: Objects to load.

        Returns:
            Objects to load, whose `export` leaves out the weights that have digests. If the checkpoint holds no
            digests, `objects` unchanged.

        Raises:
            CheckpointError: If the digests of this run's weights differ from the saved ones, or a weight is missing.
        """
        saved_digests = saved_state.state.pop(_KEY, {})
        if not isinstance(saved_digests, dict):
            raise CheckpointError("the manifest's frozen weights are nothing that was saved")
        if not saved_digests:
            return objects
        own = {
            key: value
            for index, model in enumerate(objects.models)
            for name, value in objects.export(model)
            if (key := to_logical_name(f"model/{index}/{name}")) in saved_digests
        }
        own_digests = self._compute_digests(own, is_alone=False)
        differing = [name for name, digest in saved_digests.items() if own_digests.get(name) != digest]
        if differing:
            raise CheckpointError(
                "the checkpoint contains no frozen weights, only their names and digests (save_frozen=False), and "
                f"{len(differing)} of {len(saved_digests)} differ from this model's weights or are missing: "
                f"{', '.join(differing[:3])}. Build the model on the base that it was saved with, before load_state()"
            )
        self._first_digests |= own_digests
        indices = {id(model): index for index, model in enumerate(objects.models)}

        def export_without_digested(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
            prefix = f"model/{indices[id(model)]}/"
            for name, value in objects.export(model):
                if to_logical_name(prefix + name) not in saved_digests:
                    yield name, value

        return replace(objects, export=export_without_digested)

    def _compute_digests(self, tensors: dict[str, Any], is_alone: bool) -> dict[str, list[Any]]:
        """Return a list of [shape, dtype name, hexadecimal digest] for each tensor, by name.

        Every rank must call it unless `is_alone` is True. The digest of a sharded tensor covers the shards of all
        ranks. Digests are cached until a tensor changes. torch does not count changes through `.data`. They are found
        if they change one of up to `_NUM_SAMPLED` elements.

        Args:
            tensors: Tensors by name, in the same order on all ranks.
            is_alone: Whether only this rank calls it. Its tensors must then be unsharded.
        """
        cache_keys = _make_cache_keys(tensors)
        changed = [name for name, key in cache_keys.items() if name not in self._cache or self._cache[name][0] != key]
        # A digest is computed by all ranks if any rank needs it, because the terms of all ranks are added.
        changed_by_rank = [changed] if is_alone else self._everyone.gather_objects(changed)
        changed_on_any_rank = set().union(*changed_by_rank)
        outdated = [name for name in tensors if name in changed_on_any_rank]
        splitter = ShardSplitter()
        pieces = {name: splitter.split_tensor(value) if is_dtensor(value) else value for name, value in tensors.items()}
        own_terms = [_compute_term(pieces[name]) for name in outdated]
        terms_by_rank = [own_terms] if is_alone else self._everyone.gather_objects(own_terms)
        for index, name in enumerate(outdated):
            value = tensors[name]
            if is_sharded(value):
                total = sum(rank_terms[index] for rank_terms in terms_by_rank)
            else:  # each rank has the full tensor
                total = own_terms[index]
            digest = f"{total % _WRAP:016x}"
            self._cache[name] = cache_keys[name], [list(value.shape), get_dtype_name(value.dtype), digest]
        return {name: self._cache[name][1] for name in tensors}


def _make_cache_keys(tensors: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
    """Return for each tensor, by name, a key that changes with its memory, its version counter, or a sampled element.

    Args:
        tensors: Tensors by name. Of a sharded one, only this rank's part matters.
    """
    local = {name: get_local_part(value) for name, value in tensors.items()}
    samples = _read_samples(local)
    return {
        name: (get_memory_key(value), _torch.read_version(local[name]), samples[name])
        for name, value in tensors.items()
    }


def _read_samples(tensors: Mapping[str, torch.Tensor]) -> dict[str, bytes]:
    """Return the bytes of up to `_NUM_SAMPLED` evenly spaced elements of each tensor, by name.

    A difference from an earlier sample shows that a tensor was changed. The host waits only once for each device.

    Args:
        tensors: Tensors by name.
    """
    by_device: dict[torch.device, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        flat = view_as_bits(tensor.detach()).reshape(-1)
        sample = flat[:: max(1, -(-flat.numel() // _NUM_SAMPLED))].clone(memory_format=torch.contiguous_format)
        by_device.setdefault(tensor.device, {})[name] = sample.view(torch.uint8)
    sample_bytes: dict[str, bytes] = {}
    for samples in by_device.values():
        on_host = torch.cat([*samples.values()]).cpu()
        parts = torch.split(on_host, [each.numel() for each in samples.values()])
        sample_bytes.update((name, part.numpy().tobytes()) for name, part in zip(samples, parts))
    return sample_bytes


def _list_enclosing_names(name: str) -> tuple[str, str]:
    """Return a name without its last component, and without its last two components."""
    outer = name.rpartition(".")[0]
    return outer, outer.rpartition(".")[0]


def _compute_term(value: Any) -> int:
    """Return this rank's term of a tensor's digest: the weighted sum over the elements that this rank holds."""
    if not isinstance(value, ShardPiece):
        value = ShardPiece(tuple(value.shape), value.dtype, (TensorBox((0,) * value.ndim, value, True),))
    strides = torch.empty(value.shape, device="meta").stride()
    return sum(_compute_box_sum(box, strides) for box in value.boxes if box.is_written)


def _compute_box_sum(box: TensorBox, strides: tuple[int, ...]) -> int:
    """Return the weighted sum of a box's elements, whose weights depend on their positions in the whole tensor.

    Args:
        box: Rectangular block of the tensor.
        strides: Strides of the whole tensor in elements, as if it were contiguous.
    """
    if not box.values.numel():
        return 0
    rows, offsets = (box.values, box.offsets) if box.values.ndim else (box.values.reshape(1), (0,))
    rows_per_block = max(1, _BLOCK // rows[:1].numel())
    total = 0
    for start in range(0, len(rows), rows_per_block):
        block = rows[start : start + rows_per_block]
        positions = torch.zeros((), dtype=torch.int64)  # index of each element in the flattened whole tensor
        for dim, (offset, stride) in enumerate(zip(offsets, strides or (1,))):
            first = offset + (start if dim == 0 else 0)
            positions = positions[..., None] + torch.arange(first, first + block.shape[dim]) * stride
        word_dtype = INTEGERS[min(8, block.element_size())]
        words = get_raw_bytes(block).view(word_dtype).view(block.numel(), -1).to(torch.int64)
        bits = words[:, 0] + words[:, 1:].sum(1) * _MIX  # a complex128 element has two words
        # The weight must be odd, so that a change of any single element changes the sum modulo 2**64. The product and
        # the shift spread neighboring positions over all bits.
        mixed = positions.reshape(-1) * _ODD
        weights = (mixed ^ (mixed >> 29)) * _MIX | 1
        total += int(((bits + 1) * weights).sum())
    return total

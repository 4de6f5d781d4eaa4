"""Replacements for tensors in a checkpoint: means for tensors that differ between ranks, digests for frozen weights.

Under local SGD, ranks have different models inside a local SGD block, and different optimizer states. The checkpoint
holds the means over all ranks. Tools use them, and so does a run that continues outside a block or with another world
size. The checkpoint also holds each rank's own values. The models of a resumed run have the means until the run enters
the block again.

A checkpoint can hold only a digest of each frozen weight instead of its values, for example for a base model with
adapters. A digest is the sum over a tensor's elements, each multiplied by an odd number that depends on its position.
The terms of all ranks' elements are added, so a base model has equal digests in every layout. A change of any single
element changes the digest.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from headway.core.checkpoint import _torch
from headway.core.checkpoint.format.text import to_logical_name
from headway.core.checkpoint.state import ROWS, CollectedState, StatefulObjects, make_row
from headway.core.runtime.collectives.checked import Collectives
from headway.core.training.local_blocks import LocalTraining, iterate_averages
from headway.core.training.prepared.prepare import Preparation
from headway.core.weights.compiled import rename_bare_items
from headway.core.weights.pieces import (
    ShardCutter,
    ShardPiece,
    TensorBox,
    get_local_part,
    get_memory_key,
    is_dtensor,
    is_spread,
)
from headway.core.weights.shards import INTEGERS, get_dtype_name, get_raw_bytes, view_as_bits
from headway.errors import CheckpointError
from headway.log import get_logger

log = get_logger(__name__)


class LocalState:
    """Collector and restorer of the state that differs between ranks under local SGD.

    In a checkpoint, each such tensor is stored with one row per rank. In addition, a floating-point tensor of at least
    16 bits is stored as its mean over the ranks. Any other tensor is stored with this rank's own values.

    Args:
        training: Registry of the run's local SGD blocks.
        preparation: Prepared objects.
        collectives: Collectives over all ranks.
    """

    def __init__(self, training: LocalTraining, preparation: Preparation, collectives: Collectives) -> None:
        self._training = training
        self._preparation = preparation
        self._collectives = collectives
        self._rows: dict[str, torch.Tensor] = {}

    def list_steps(self) -> list[int | None]:
        """Return, for each model, the number of steps made in its local SGD block. None if it is in no such block."""
        blocks = self._training.blocks
        return [blocks[each].num_steps if each in blocks else None for each in self._preparation.models]

    @property
    def has_diverged(self) -> bool:
        """Whether optimizer states differ between the ranks, because of local SGD."""
        return any(self._list_owned_by(index) for index in range(len(self._preparation.optimizers)))

    def add(self, collected: CollectedState, steps: Sequence[int | None]) -> None:
        """Replace each tensor that differs between ranks with its mean, and add a tensor with every rank's values.

        The added tensor has one row per rank. Only floating-point tensors of at least 16 bits are averaged. Others keep
        each rank's own values. Every rank must call this method.

        Args:
            collected: State to change.
            steps: For each model, the number of steps made in its local SGD block. None if it is in no such block. Only
                weights of models in a block are changed.
        """
        inside = tuple(f"model/{index}/" for index, each in enumerate(steps) if each is not None)
        parted = tuple(
            f"optimizer/{index}/" for index in range(len(self._preparation.optimizers)) if self._list_owned_by(index)
        )
        tensors = collected.tensors
        own = {name: each for name, each in tensors.items() if name.startswith((*inside, *parted)) and each.numel()}
        floating = [name for name, each in own.items() if each.is_floating_point() and each.dtype.itemsize > 1]
        tensors.update(zip(floating, iterate_averages([own[name] for name in floating], self._collectives)))
        rank, count = self._collectives.rank, self._collectives.world_size
        tensors.update((ROWS + name, make_row(each, rank, count)) for name, each in own.items())

    def replace_means(self, found: CollectedState) -> None:
        """Replace the means of optimizer states in a loaded state with this rank's own values.

        This rank's values of weights are kept for `resume_blocks`. In the loaded state, weights remain means.

        Args:
            found: Loaded state to change. It has only this rank's row of each tensor with one row per rank.

        Raises:
            CheckpointError: If this rank's values do not match the shape and dtype of the mean.
        """
        self._rows = {}
        for name in [name for name in found.tensors if name.startswith(ROWS)]:
            row, common = found.tensors.pop(name).boxes[0].values[0], name.removeprefix(ROWS)
            whole = found.tensors.get(common)
            if whole is None or (tuple(whole.shape), whole.dtype) != (tuple(row.shape), row.dtype):
                raise CheckpointError(
                    f"the manifest has {name} of {row.dtype} and {tuple(row.shape)}, and none such for all ranks"
                )
            self._rows[common] = row
            if common.startswith("optimizer/"):
                found.tensors[common] = row

    def resume_blocks(self, parts: StatefulObjects, steps: Sequence[int | None]) -> None:
        """Set the step at which each local SGD block continues when it is entered, and this rank's weights for it.

        Call it after `replace_means`, and after the state has been restored.

        Args:
            parts: Restored objects.
            steps: For each model, the number of steps made in its block in the saved run.
        """
        rows, self._rows = self._rows, {}
        for index in range(len(self._preparation.optimizers)):
            if any(name.startswith(f"optimizer/{index}/") for name in rows):
                self._training.parted.update(self._find_trained_models(index))
        for (index, model), count in zip(parts.list_chosen(), steps):
            if count is None:
                continue
            own = {to_logical_name(f"model/{index}/{name}"): value for name, value in parts.export(model)}
            pairs = [(own[name], row) for name, row in rows.items() if name in own]
            if pairs:
                self._training.interrupt(self._preparation.models[index], count, partial(_put_back, pairs))

    def _list_owned_by(self, index: int) -> list[torch.nn.Module]:
        """Return the locally trained models whose parameters an optimizer updates.

        Args:
            index: Index of the optimizer.
        """
        return [model for model in self._find_trained_models(index) if model in self._training.parted]

    def _find_trained_models(self, index: int) -> list[torch.nn.Module]:
        groups = self._preparation.optimizers[index].optimizer.param_groups
        held = {id(parameter) for group in groups for parameter in group["params"]}
        return [model for model in self._preparation.models if any(id(each) in held for each in model.parameters())]


@torch.no_grad()
def _put_back(pairs: Sequence[tuple[Any, torch.Tensor]]) -> None:
    for own, row in pairs:
        own.copy_(row)


_KEY = "frozen"
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
        self._known: dict[str, tuple[Any, list[Any]]] = {}
        self._first: dict[str, list[Any]] = {}

    def take_out(self, collected: CollectedState, models: Iterable[torch.nn.Module], is_alone: bool) -> None:
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
        names = [name for name in collected.tensors if frozen & {name, *_list_enclosing(name)}]
        digests = self._compute_digests({name: collected.tensors.pop(name) for name in names}, is_alone)
        changed = [name for name, digest in digests.items() if self._first.setdefault(name, digest) != digest]
        if changed:
            log.warning_once(_CHANGED, len(changed), changed[0])
        gone = {tied: name for tied, name in collected.aliases.items() if name in digests}
        collected.aliases = {tied: name for tied, name in collected.aliases.items() if tied not in gone}
        collected.state[_KEY] = digests | {tied: digests[name] for tied, name in gone.items()}

    def put_back(self, found: CollectedState, parts: StatefulObjects) -> StatefulObjects:
        """Return the objects to load, excluding the weights for which the checkpoint holds only digests.

        Every rank must call it. `parts` is returned unchanged if the checkpoint holds no digests.

        Args:
            found: Loaded state. The digests are removed from it.
            parts: Objects to load.

        Raises:
            CheckpointError: If the digests of this run's weights differ from the saved ones, or a weight is missing.
        """
        named = found.state.pop(_KEY, {})
        if not isinstance(named, dict):
            raise CheckpointError("the manifest's frozen weights are nothing that was saved")
        if not named:
            return parts
        own = {
            key: value
            for index, model in enumerate(parts.models)
            for name, value in parts.export(model)
            if (key := to_logical_name(f"model/{index}/{name}")) in named
        }
        here = self._compute_digests(own, is_alone=False)
        odd = [name for name in named if here.get(name) != named[name]]
        if odd:
            raise CheckpointError(
                f"the checkpoint contains no frozen weights, only their names and digests (save_frozen=False), and {len(odd)} of "
                f"{len(named)} differ from this model's weights or are missing: {', '.join(odd[:3])}. Build the "
                "model on the base that it was saved "
                "with, before load_state()"
            )
        self._first |= here
        numbers = {id(model): index for index, model in enumerate(parts.models)}

        def iterate_rest(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
            prefix = f"model/{numbers[id(model)]}/"
            return ((name, value) for name, value in parts.export(model) if to_logical_name(prefix + name) not in named)

        return replace(parts, export=iterate_rest)

    def _compute_digests(self, tensors: dict[str, Any], is_alone: bool) -> dict[str, list[Any]]:
        """Return a list of [shape, dtype name, hexadecimal digest] for each tensor, by name.

        Every rank must call it unless `is_alone` is True. The digest of a sharded tensor covers the shards of all
        ranks. Digests are cached until a tensor changes. torch does not count changes through `.data`. They are found
        if they change one of up to `_NUM_SAMPLED` elements.

        Args:
            tensors: Tensors by name, in the same order on all ranks.
            is_alone: Whether only this rank calls it. Its tensors must then be unsharded.
        """
        local = {name: get_local_part(value) for name, value in tensors.items()}
        samples = _read_samples(local)
        keys = {
            name: (get_memory_key(value), _torch.read_version(local[name]), samples[name])
            for name, value in tensors.items()
        }
        new = [name for name, key in keys.items() if name not in self._known or self._known[name][0] != key]
        lists = [new] if is_alone else self._everyone.gather_objects(new)
        new = [name for name in tensors if any(name in each for each in lists)]
        cutter = ShardCutter()
        pieces = {name: cutter.cut_tensor(value) if is_dtensor(value) else value for name, value in tensors.items()}
        sums = [_compute_term(pieces[name]) for name in new]
        every = [sums] if is_alone else self._everyone.gather_objects(sums)
        for number, name in enumerate(new):
            value = tensors[name]
            terms = [each[number] for each in every] if is_spread(value) else [sums[number]]
            digest = f"{sum(terms) % _WRAP:016x}"
            self._known[name] = keys[name], [list(value.shape), get_dtype_name(value.dtype), digest]
        return {name: self._known[name][1] for name in tensors}


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
    found: dict[str, bytes] = {}
    for samples in by_device.values():
        joined = torch.cat([*samples.values()]).cpu()
        parts = torch.split(joined, [each.numel() for each in samples.values()])
        found.update((name, part.numpy().tobytes()) for name, part in zip(samples, parts))
    return found


def _list_enclosing(name: str) -> tuple[str, str]:
    outer = name.rpartition(".")[0]
    return outer, outer.rpartition(".")[0]


def _compute_term(value: Any) -> int:
    """Return this rank's term of a tensor's digest: the weighted sum over the elements that this rank holds."""
    if not isinstance(value, ShardPiece):
        value = ShardPiece(tuple(value.shape), value.dtype, (TensorBox((0,) * value.ndim, value, True),))
    strides = torch.empty(value.shape, device="meta").stride()
    return sum(_box_sum(box, strides) for box in value.boxes if box.is_written)


def _box_sum(box: TensorBox, strides: tuple[int, ...]) -> int:
    rows, offsets = (box.values, box.offsets) if box.values.ndim else (box.values.reshape(1), (0,))
    step = max(1, _BLOCK // max(1, rows[:1].numel()))
    total = 0
    for start in range(0, len(rows) if rows.numel() else 0, step):
        part = rows[start : start + step]
        place = torch.zeros((), dtype=torch.int64)
        for dim, (offset, stride) in enumerate(zip(offsets, strides or (1,))):
            first = offset + (start if dim == 0 else 0)
            place = place[..., None] + torch.arange(first, first + part.shape[dim]) * stride
        whole = INTEGERS[min(8, part.element_size())]
        words = get_raw_bytes(part).view(whole).view(part.numel(), -1).to(torch.int64)
        bits = words[:, 0] + words[:, 1:].sum(1) * _MIX  # a complex128 element has two words
        mixed = place.reshape(-1) * _ODD
        total += int(((bits + 1) * ((mixed ^ (mixed >> 29)) * _MIX | 1)).sum())
    return total

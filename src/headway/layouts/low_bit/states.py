"""States of low-bit optimizers in checkpoints: saved as float32 values, and quantized again for this rank's shards.

The values in a checkpoint do not depend on quantization blocks, so any layout and any number of ranks can load them.
Quantizing the values again returns the saved codes and scales if the blocks have not changed (`blocks.py`). Blocks do
not change if the layout is the same, or if shards begin and end at block boundaries. Otherwise the values change by
less than a quantization step, and a message is logged.
"""

from collections.abc import Iterator
from typing import Any

import torch

from headway.core.strategies.base import Strategy
from headway.core.strategies.fully_sharded.dtensors import assemble_boxes, get_local_shard
from headway.core.weights.pieces import ShardPiece, is_dtensor
from headway.errors import CheckpointError, UnsupportedError
from headway.layouts.low_bit import _torch, bitsandbytes, torchao
from headway.layouts.low_bit.bitsandbytes import GroupPosition
from headway.log import get_logger

log = get_logger(__name__)

_MAX_CUT_FRACTION = 0.1
"""Fraction of values that may keep full precision without a warning, because their shards do not divide into blocks."""


def keeps_low_bit_state(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer is a low-bit optimizer of torchao, or any optimizer of bitsandbytes."""
    return torchao.keeps_low_bit_state(optimizer) or bitsandbytes.keeps_low_bit_state(optimizer)


def export_state(optimizer: torch.optim.Optimizer, entry: Any) -> Any:
    """Return the state of one parameter with float32 values in place of quantization codes and scales.

    Args:
        optimizer: Optimizer that keeps the state. It may be of any class, for example a wrapper that shares the state
            of torchao's optimizer.
        entry: State of the parameter, from the optimizer or from its state dict. It is returned unchanged if it is not
            a dict. The same applies if it has no quantized tensors of torchao, and the optimizer is neither a low-bit
            optimizer of torchao nor an optimizer of bitsandbytes.

    Returns:
        The state, sharded as before. Unless it is returned unchanged, its moments are on the CPU.
    """
    if not isinstance(entry, dict):
        return entry
    is_wrapped = any(torchao.is_quantized(get_local_shard(value)) for value in entry.values())
    if is_wrapped or torchao.keeps_low_bit_state(optimizer):
        return torchao.export_entry(entry)
    return bitsandbytes.export_entry(entry) if bitsandbytes.keeps_low_bit_state(optimizer) else entry


def describe_export(optimizer: torch.optim.Optimizer, entry: dict[str, Any]) -> dict[str, Any]:
    """Return the state of one parameter as `export_state` would, with meta tensors in place of this rank's moments.

    No values are read, so the tensors of `entry` can be fake.

    Args:
        optimizer: Optimizer that keeps the state, of any class. Without low-bit states, `entry` is returned unchanged.
        entry: State of the parameter.
    """
    if torchao.keeps_low_bit_state(optimizer):
        return torchao.describe_export(entry)
    return bitsandbytes.describe_export(entry) if bitsandbytes.keeps_low_bit_state(optimizer) else entry


def quantize_states(optimizer: torch.optim.Optimizer) -> None:
    """Quantize the loaded states of a low-bit optimizer for this rank's shards. Do nothing for other optimizers.

    States that are already quantized do not change, nor do those of parameters that only other pipeline stages hold.
    Overridden options of bitsandbytes are registered. If blocks of the shards are not those of the saved states, values
    change by less than a quantization step, and a message is logged.

    Args:
        optimizer: Optimizer whose states contain dequantized values, as returned by `export_state`.

    Raises:
        CheckpointError: If another package's optimizer has saved the state, or if the state has bitsandbytes' codes of
            full parameters and the parameters are sharded.
    """
    if not keeps_low_bit_state(optimizer):
        return
    if bitsandbytes.keeps_low_bit_state(optimizer):
        bitsandbytes.register_overrides(optimizer)
    num_states = num_changed = 0
    for position, parameter in _iterate_positions(optimizer):
        loaded = optimizer.state.get(parameter)
        if not isinstance(loaded, dict) or not loaded or parameter.is_meta:  # meta: only other pipeline stages hold it
            continue
        entry = {name: _join_piece(value, parameter) for name, value in loaded.items()}
        _check_package(optimizer, entry)
        if torchao.keeps_low_bit_state(optimizer):
            quantized = torchao.import_entry(optimizer, parameter, entry)
        else:
            quantized = bitsandbytes.import_entry(optimizer, parameter, entry, position)
        if quantized is not entry:
            num_states += 1
            num_changed += not _has_equal_values(export_state(optimizer, quantized), export_state(optimizer, entry))
            optimizer.state[parameter] = quantized
    if num_changed:
        log.info(
            "%s: the states of %d of %d parameters were quantized again, because blocks of this layout's shards are not those of "
            "the saved ones. Values changed by less than a quantization step",
            type(optimizer).__name__,
            num_changed,
            num_states,
        )


def _iterate_positions(optimizer: torch.optim.Optimizer) -> Iterator[tuple[GroupPosition, torch.Tensor]]:
    """Yield (position in the optimizer, parameter) for each parameter of all groups."""
    for group_index, group in enumerate(optimizer.param_groups):
        for index, parameter in enumerate(group["params"]):
            yield GroupPosition(group_index, index), parameter


def _check_package(optimizer: torch.optim.Optimizer, entry: dict[str, Any]) -> None:
    """Raise `CheckpointError` if an optimizer of the other package has saved a parameter's state.

    The packages are torchao and bitsandbytes. They are recognized by the names of their moments.
    """
    is_torchao, name = torchao.keeps_low_bit_state(optimizer), type(optimizer).__name__
    if any(key.startswith("state" if is_torchao else "exp_avg") for key in entry):
        own, other = ("torchao", "bitsandbytes") if is_torchao else ("bitsandbytes", "torchao")
        raise CheckpointError(
            f"this {name} is of {own}, and the saved one was made by {other}, which stores other moments. Train "
            f"with {name} of {other}"
        )


def _join_piece(value: Any, parameter: torch.Tensor) -> Any:
    """Return a loaded state tensor that is sharded like its parameter.

    Under pipeline parallelism, states are loaded as `ShardPiece` objects, which are converted. Other values are
    returned unchanged.
    """
    if not isinstance(value, ShardPiece):
        return value
    if is_dtensor(parameter):
        return assemble_boxes(((box.offsets, box.values) for box in value.boxes), value.dtype, parameter)
    return value.boxes[0].values if value.boxes else torch.empty(value.shape, dtype=value.dtype)


def _has_equal_values(state: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether the tensors that two dequantized states have in common are bitwise equal on this rank.

    Scalars are not compared.
    """
    for name, value in state.items():
        if isinstance(value, torch.Tensor) and value.ndim and name in other:
            shard = get_local_shard(value)
            if not torch.equal(shard, get_local_shard(other[name]).to(shard)):
                return False
    return True


# -------------------------------------------------------------------- checks


def prepare_optimizer(optimizer: torch.optim.Optimizer, strategy: Strategy) -> None:
    """Check that a low-bit optimizer can train with a strategy, and make its stochastic rounding equal on all ranks.

    Do nothing in a single-process run. Rounding is changed only for torchao's optimizers with stochastic rounding.

    Args:
        optimizer: The user's optimizer.
        strategy: Strategy of the run.

    Raises:
        UnsupportedError: If the optimizer is torchao's `CPUOffloadOptimizer`, which needs a single-process run.
    """
    if strategy.everyone.world_size == 1:
        return
    is_offloading = any(
        (kind.__module__, kind.__name__) == ("torchao.optim.cpu_offload", "CPUOffloadOptimizer")
        for kind in type(optimizer).__mro__
    )
    if is_offloading:
        raise UnsupportedError(
            f"{type(optimizer).__name__} copies gradients to the CPU before ranks have reduced them, so it is for one process. Use "
            "strategy='fsdp' and ShardingOptions(cpu_offload=True) with torch's AdamW"
        )
    hooks = getattr(optimizer, _torch.HOOKS, {}).values()
    is_prepared = any(isinstance(getattr(hook, "__self__", None), EqualRounding) for hook in hooks)
    is_random = torchao.keeps_low_bit_state(optimizer) and getattr(optimizer, "bf16_stochastic_round", False)
    if is_random and not is_prepared:
        EqualRounding(optimizer)


def prepare_low_bit_shards(optimizer: torch.optim.Optimizer) -> None:
    """Prepare an optimizer for its first update of shards.

    Overridden options of bitsandbytes are registered. A warning is logged if torchao keeps more than a tenth of this
    rank's values in full precision, because shards do not divide into its blocks.

    Args:
        optimizer: Optimizer of sharded parameters. Nothing is done for optimizers of other packages.
    """
    if bitsandbytes.keeps_low_bit_state(optimizer):
        bitsandbytes.register_overrides(optimizer)
    if not torchao.keeps_low_bit_state(optimizer):
        return
    parameters = [parameter for _, parameter in _iterate_positions(optimizer) if is_dtensor(parameter)]
    cut = [parameter for parameter in parameters if torchao.is_cut_between_blocks(optimizer, parameter)]
    num_all = sum(get_local_shard(parameter).numel() for parameter in parameters)
    num_cut = sum(get_local_shard(parameter).numel() for parameter in cut)
    if num_cut > _MAX_CUT_FRACTION * num_all:
        log.warning_once(
            "%s does not quantize the state of %d parameters, %.0f%% of this rank's values: their shards do not divide into blocks "
            "of %d values. The first one has shape %s. Choose a block_size that divides the shards, or other sizes of layers",
            type(optimizer).__name__,
            len(cut),
            100 * num_cut / num_all,
            optimizer.block_size,  # type: ignore[attr-defined]
            tuple(cut[0].shape),
        )


def restore_generators(optimizer: torch.optim.Optimizer) -> None:
    """Restore the random generators after a step that has failed, if `EqualRounding` had seeded them.

    Args:
        optimizer: The user's optimizer.
    """
    for hook in getattr(optimizer, _torch.HOOKS, {}).values():
        owner = getattr(hook, "__self__", None)
        if isinstance(owner, EqualRounding):
            owner.restore()


class EqualRounding:
    """Step hooks that give all ranks equal random numbers for stochastic rounding, so that replicas stay equal.

    Otherwise each rank would draw from its own generator, whose state depends on the rank's data and dropout. Before
    each step, the states of the generators are saved, and the generators are seeded with the optimizer's step count.
    After the step, the saved states are restored. torch does not call the second hook if the step raises, so
    `restore_generators` must be called then.

    Args:
        optimizer: Optimizer of torchao.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        # Pairs of (torch or a device module such as `torch.cuda`, its RNG state before the step). Empty between steps.
        self._saved_states: list[tuple[Any, torch.Tensor]] = []
        optimizer.register_step_pre_hook(self._seed_generators)
        optimizer.register_step_post_hook(self._end_step)

    def _seed_generators(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Save the RNG states of the CPU and of the parameters' devices, and seed the generators.

        The seed is the largest step count in the optimizer's state, which is equal on all ranks. If states are saved
        already, because the previous step has failed, they are kept.
        """
        steps = [entry["step"] for entry in optimizer.state.values() if isinstance(entry, dict) and "step" in entry]
        seed = int(max(steps, default=0))
        kinds = {p.device.type for group in optimizer.param_groups for p in group["params"]} - {"cpu", "meta"}
        device_modules: list[Any] = [torch.get_device_module(kind) for kind in sorted(kinds)]
        if not self._saved_states:
            self._saved_states = [(module, module.get_rng_state()) for module in (torch, *device_modules)]
        # Not `torch.manual_seed`, which would also seed the generators of all accelerators.
        torch.default_generator.manual_seed(seed)
        for module in device_modules:
            module.manual_seed(seed)

    def _end_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Restore the RNG state after the optimizer step. Called by torch as a hook."""
        self.restore()

    def restore(self) -> None:
        """Restore the states that the random generators had before the step. Do nothing between steps."""
        for module, state in self._saved_states:
            module.set_rng_state(state)
        self._saved_states = []

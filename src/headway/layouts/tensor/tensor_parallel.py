"""Tensor parallelism: split a model's matrices across the ranks of one mesh axis, in place.

All parameters become DTensors on that axis, either sharded or replicated. So an optimizer has only one kind of tensor,
and `fully_shard` can shard the parameters along other axes. Forward computes on plain local tensors (`calls`).
`crossings` contains the collectives that convert between replicated and sharded activations.

Gradients of replicated parameters must be equal on all ranks of tensor parallelism. This is checked once, in the first
optimizer step. A parameter that the plan leaves replicated might act on sharded activations: a scale within an
attention, or a trained activation function between two matrices. Its gradient then differs between ranks. Without the
check, the parameter's values would diverge between ranks without any error.
"""

from collections.abc import Callable, Container
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from headway.common.optional import LazyModule
from headway.core import extensions
from headway.core.config.float8 import Float8Options
from headway.core.config.parallelism import TensorParallelOptions
from headway.core.runtime.collectives.checked import Collectives
from headway.core.strategies.blocks import find_parameter_owners
from headway.core.strategies.fully_sharded import dtensors
from headway.core.strategies.fully_sharded.axes import ModelAxis, SplitModel
from headway.core.weights.pieces import is_dtensor
from headway.errors import ConfigError, PrepareError
from headway.layouts.tensor import automatic, calls, plans, styles
from headway.layouts.tensor._torch import is_fake
from headway.layouts.tensor.calls import GatheredInput, LocalParameters, SequenceBlock, SplitCall
from headway.layouts.tensor.crossings import SplitAxis, SplitRNG, take_packed_chunks
from headway.layouts.tensor.plans import AdaptedCall, ModelSplit, SequenceRegion
from headway.layouts.tensor.styles import SplitModule

_RELATIVE_TOLERANCE = 1e-3
"""Largest accepted difference between ranks' gradients, as a fraction of the gradient's norm."""
_MAX_NAMES = 4
"""Maximum number of parameters that the error about differing gradients names."""
_TOLERANCE_OF_LARGEST = 1e-6
"""Additional tolerance for gradient differences, as a fraction of the largest gradient norm.

Some kernels need it, because they add numbers in a different order on each call.
"""
_BLOCK_SIZE = 2**22
"""Number of gradient elements that `_make_gradient_digest` converts to float64 at once."""


def compare_gradients(model: torch.nn.Module, axis: SplitAxis, everyone: Collectives) -> bool:
    """Raise an error if gradients of replicated parameters differ between ranks.

    Args:
        model: Model that is split along the axis.
        axis: Mesh axis whose ranks must have equal gradients.
        everyone: Collectives over all ranks of the run, so that all of them learn the result. Otherwise ranks of groups
            without an error would hang in the next collective.

    Returns:
        Whether any parameter on any rank has a gradient.

    Raises:
        PrepareError: On all ranks, if the gradients of replicated parameters differ within any tensor-parallel group.
    """
    replicated_grads = [
        (name, dtensors.get_local_shard(parameter.grad).detach())
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
        and is_dtensor(parameter)  # a parameter added after prepare() is a plain tensor
        and parameter.placements[-1].is_replicate()
    ]
    # A forecast on fake tensors has no values.
    has_values = bool(replicated_grads) and not is_fake(replicated_grads[0][1])
    differing = _list_differing(replicated_grads, axis) if has_values else []
    has_grads = any(parameter.grad is not None for parameter in model.parameters())
    numbers_by_rank = everyone.gather_numbers([float(len(differing)), float(has_grads)])
    counts = [int(count) for count, _ in numbers_by_rank]
    if any(counts):
        names_by_rank = everyone.gather_objects(differing[:_MAX_NAMES])
        ranks = [rank for rank, count in enumerate(counts) if count]
        count, names = counts[ranks[0]], names_by_rank[ranks[0]]
        more = " and others" if count > len(names) else ""
        raise PrepareError(
            f"the gradients of {count} parameters that the tensor-parallel plan leaves whole differ between ranks "
            f"{', '.join(map(str, ranks))}: {', '.join(names)}{more}. They act on activations that are split. Give their "
            'modules the style "replicated_with_grad_allreduce", which sums their gradients; if their inputs are whole, something '
            "before them draws different random numbers on each rank, or the ranks of a group read different batches"
        )
    return any(
        has_any for _, has_any in numbers_by_rank
    )  # of all ranks, because one pipeline stage can be frozen entirely


def _list_differing(grads: list[tuple[str, torch.Tensor]], axis: SplitAxis) -> list[str]:
    """Return the names of the gradients that differ between the ranks of the axis. All of them must call it.

    Args:
        grads: Pairs of (name of the parameter, gradient), in the same order on all ranks.
        axis: Mesh axis whose ranks compare their gradients.
    """
    digests = torch.stack([_make_gradient_digest(grad) for _, grad in grads])
    digests_by_rank = [torch.empty_like(digests) for _ in range(axis.size)]
    dist.all_gather(digests_by_rank, digests, group=axis.group)
    stacked = torch.stack(digests_by_rank)  # (ranks, gradients, 2): norm and projection
    differences = (stacked - stacked[0]).abs().amax(dim=(0, 2))
    norms = stacked[..., 0].abs().amax(0)
    is_differing = differences > _RELATIVE_TOLERANCE * norms + _TOLERANCE_OF_LARGEST * norms.max()
    return [name for (name, _), differs in zip(grads, is_differing.tolist()) if differs]


def _make_gradient_digest(grad: torch.Tensor) -> torch.Tensor:
    """Return a tensor with the norm and one projection of a gradient, so that ranks can compare gradients cheaply.

    The gradient is processed in blocks, because a float64 copy of all of it would take many times its memory.
    """
    flat, wide_dtype = grad.reshape(-1), dtensors.choose_norm_dtype(grad.device)
    sums = torch.zeros(2, device=flat.device, dtype=wide_dtype)
    for start in range(0, flat.numel(), _BLOCK_SIZE):
        block = flat[start : start + _BLOCK_SIZE].to(wide_dtype)
        # Fixed weights that differ for all elements, so that the projection depends on the order of the elements.
        weights = torch.arange(start, start + block.numel(), device=flat.device, dtype=wide_dtype).cos()
        sums += torch.stack([block @ block, block @ weights])
    return torch.stack([sums[0].sqrt(), sums[1]])


tensor = LazyModule("torch.distributed.tensor")
placements = LazyModule("torch.distributed.tensor.placement_types")
parallel = LazyModule("torch.distributed.tensor.parallel")


class TensorAxis(ModelAxis):
    """Mesh axis "tp" for tensor parallelism, in which ranks hold shards of the same matrices."""

    def split_model(
        self, model: torch.nn.Module, mesh: Any, ranks: Collectives, other_stage_ids: Container[int] = ()
    ) -> "TensorParallel":
        """Split the model's matrices in place, and return a handle of the split model.

        Args:
            model: Model to split.
            mesh: DeviceMesh of the run, with an axis "tp".
            ranks: Collectives over all ranks of the run.
            other_stage_ids: IDs of parameters and buffers that only other pipeline stages hold. They are not split.

        Raises:
            ConfigError: If the plan does not fit the model.
            PrepareError: If a module cannot be split as the plan requires.
        """
        options = self.options
        is_sharded = options.layout.num_shards > 1
        is_float8 = options.number_format == "fp8"
        convert = (
            partial(_convert_layers, options=options.float8 or Float8Options(), ranks=ranks) if is_float8 else None
        )
        return TensorParallel(model, mesh["tp"], options.tensor, is_sharded, convert, other_stage_ids)


class TensorParallel(SplitModel):
    """Handle to a model whose matrices are split across the ranks of one axis. The constructor splits the model in place.

    Args:
        model: Model to split. It must hold the same values on all ranks of the axis, or no values (meta tensors).
        mesh: One-dimensional DeviceMesh of the ranks.
        options: Plan and options of tensor parallelism.
        is_sharded: Whether parameters are also sharded along their first dimension afterwards. Default: False.
        convert: Function that converts linear layers to float8, before the model is split. None: no layer is converted.
        other_stage_ids: IDs of parameters and buffers that only other pipeline stages hold. They are not split.

    Raises:
        ConfigError: If the plan does not fit the model.
        PrepareError: If a module cannot be split as the plan requires.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        mesh: Any,
        options: TensorParallelOptions,
        is_sharded: bool = False,
        convert: "Convert | None" = None,
        other_stage_ids: Container[int] = (),
    ) -> None:
        self.axis = SplitAxis.from_mesh(mesh)
        self._rng_states = SplitRNG(self.axis)
        self._exit_stack = ExitStack()
        self._model = model
        self._has_checked_gradients = False
        self._local_parameters = list[LocalParameters]()
        planned_options = automatic.complete_plan(model, options, self.axis.size, is_sharded)
        model_split = plans.read_plan(model, self.axis, planned_options)
        _check_outside_of_attention(model, model_split)
        calls.check_heads(model, model_split, self.axis.size, planned_options)
        if planned_options.sequence_parallel:
            region = plans.arrange_sequences(model, model_split)
        else:
            region = SequenceRegion([])
        if planned_options is not options:
            automatic.check_blocks(model, model_split, region)
        head = _find_head(model, model_split) if planned_options.loss_parallel else None
        dimensions = _find_dimensions(model, model_split, self.axis)
        if is_sharded:
            _check_packed_rows(model, dimensions)
        # All checks are done. The model changes from here on.
        if convert is not None:
            convert(model, model_split, dimensions, self.axis)
        calls.divide_counts(model, model_split, self.axis.size, planned_options)
        converted = self._apply_torch_styles(model, model_split)
        _place_parameters(model, dimensions, self.axis, other_stage_ids)
        self._hook_modules(model, model_split, region, converted, head, other_stage_ids)
        self._has_head = head is not None
        self.resume()

    def check_gradients(self, ranks: Collectives) -> None:
        """Raise an error if gradients of replicated parameters differ between ranks.

        Only the first optimizer step is checked. A step in which no parameter has a gradient does not count as the
        first.

        Args:
            ranks: Collectives over all ranks of the run.

        Raises:
            PrepareError: On all ranks, if the gradients of replicated parameters differ within any tensor-parallel
                group.
        """
        if not self._has_checked_gradients:
            self._has_checked_gradients = compare_gradients(self._model, self.axis, ranks)

    def resume(self) -> None:
        """Enable torch's loss parallelism, so that losses accept sharded logits.

        Do nothing if the option `loss_parallel` is not set.
        """
        if self._has_head:
            self._exit_stack.enter_context(parallel.loss_parallel())

    def end_forward(self) -> None:
        """Restore the DTensor parameters of all modules after a forward that ended early."""
        for local_parameters in reversed(self._local_parameters):
            local_parameters.after_forward()

    def release(self) -> None:
        """Disable torch's loss parallelism, if it is enabled."""
        self._exit_stack.close()

    def _apply_torch_styles(self, model: torch.nn.Module, model_split: ModelSplit) -> set[torch.nn.Module]:
        """Apply torch's `ParallelStyle` objects in a plan, and return the modules whose parameters they converted."""
        for name, style in model_split.torch_styles.items():
            style.src_data_rank = None
            style._apply(model.get_submodule(name), self.axis.mesh)
        converted = set()
        for module in model.modules() if model_split.torch_styles else ():
            for parameter in module.parameters(recurse=False):
                if isinstance(parameter, tensor.DTensor):
                    converted.add(module)
                    if parameter.requires_grad:
                        parameter.register_post_accumulate_grad_hook(_complete_gradient)
        return converted

    def _hook_modules(
        self,
        model: torch.nn.Module,
        model_split: ModelSplit,
        region: SequenceRegion,
        converted: set[torch.nn.Module],
        head: SplitModule | None,
        other_stage_ids: Container[int],
    ) -> None:
        """Register the hooks of all modules. Their order matters: pre-hooks run in the order in which they are registered.

        Args:
            model: Model whose parameters are DTensors.
            model_split: Modules that the plan splits.
            region: Stacks of blocks whose activations are sharded along the sequence. Empty without sequence
                parallelism.
            converted: Modules that a `ParallelStyle` of torch has converted. They compute on DTensors.
            head: Output head whose logits stay sharded in training. None: logits are gathered.
            other_stage_ids: IDs of parameters and buffers that only other pipeline stages hold.
        """
        with_partial_grads = {
            split_module.module for split_module in model_split.split_modules.values() if split_module.style.is_partial
        }
        with_partial_grads |= {model.get_submodule(name) for name in region.partial}
        split_modules = {
            split_module.module: split_module
            for split_module in model_split.split_modules.values()
            if not any(id(parameter) in other_stage_ids for parameter in split_module.module.parameters())
        }
        gathered = {model.get_submodule(name) for name in region.gathered}
        blocks = {model.get_submodule(name): (name, names) for names in region.stacks for name in names}
        rng_states = None if blocks else self._rng_states  # under sequence parallelism, only blocks switch RNG states
        adapted_styles = {model.get_submodule(name): style for name, style in model_split.adapted_styles.items()}
        within_adapted = {module for adapted in adapted_styles for module in adapted.modules()}
        scopes = _find_scopes(model, model_split)
        for module in model.modules():
            if module in blocks:
                name, names = blocks[module]
                self._register_hooks(
                    module, SequenceBlock(self.axis, self._rng_states, name == names[0], name == names[-1])
                )
            if module in gathered:
                self._register_hooks(module, GatheredInput(self.axis))
            if module in split_modules:
                wrap_logits = self._wrap_logits if head is not None and split_modules[module] is head else None
                switches_rng = any(module in scope.modules() for scope in scopes) and module not in within_adapted
                self._register_hooks(
                    module, SplitCall(split_modules[module], rng_states if switches_rng else None, wrap_logits)
                )
            if module in adapted_styles and rng_states is not None:
                self._register_hooks(module, AdaptedCall(adapted_styles[module], rng_states))
            # MultiheadAttention reads the parameters of its submodules without calling them.
            is_attention = isinstance(module, torch.nn.MultiheadAttention)
            if module not in converted and (module._parameters or is_attention):
                holders = [*module.modules()] if is_attention else [module]
                self._register_hooks(module, LocalParameters(holders, self.axis, module in with_partial_grads))
            if module in scopes and rng_states is not None:
                module.register_forward_hook(lambda *_: self._rng_states.use_common_state(), always_call=True)
        # A module can read parameters of modules that it does not call. Replicated ones are replaced during the whole forward.
        others = [m for m in model.modules() if m not in converted and m not in with_partial_grads]
        self._register_hooks(model, LocalParameters(others, self.axis, only_replicated=True))

    def _register_hooks(self, module: torch.nn.Module, call: Any) -> None:
        """Register the methods of a hook object, such as `SplitCall`, with a module.

        Args:
            module: Module.
            call: Object with the method `before_forward`, and optionally `after_forward` and `after_any`. The latter
                also runs if the forward raised an error.
        """
        if isinstance(call, LocalParameters):
            self._local_parameters.append(call)
        module.register_forward_pre_hook(call.before_forward, with_kwargs=True)
        if hasattr(call, "after_any"):
            module.register_forward_hook(call.after_any, always_call=True)
        if hasattr(call, "after_forward"):
            module.register_forward_hook(call.after_forward, always_call=isinstance(call, LocalParameters))

    def _wrap_logits(self, module: torch.nn.Module, output: torch.Tensor) -> Any:
        """Return this rank's logits as a DTensor that is sharded along the vocabulary, for torch's loss parallelism."""
        shape = torch.Size((*output.shape[:-1], styles.num_outputs(module)))
        return dtensors.wrap_shard(output, self.axis.mesh, [tensor.Shard(output.dim() - 1)], shape)


def _complete_gradient(parameter: Any) -> None:
    """Redistribute a parameter's gradient to the parameter's placements, if a style of torch has left it `Partial`.

    Args:
        parameter: DTensor parameter with a gradient.
    """
    if isinstance(parameter.grad, tensor.DTensor) and parameter.grad.placements != parameter.placements:
        parameter.grad = parameter.grad.redistribute(placements=parameter.placements)


def _check_outside_of_attention(model: torch.nn.Module, model_split: ModelSplit) -> None:
    """Raise `PrepareError` if a plan splits something within a `torch.nn.MultiheadAttention`."""
    for name in (*model_split.split_modules, *model_split.torch_styles, *model_split.parameters):
        for ancestor in plans.list_ancestors(name):
            if isinstance(model.get_submodule(ancestor), torch.nn.MultiheadAttention):
                raise PrepareError(
                    f"{name!r} is part of a torch.nn.MultiheadAttention, which uses the weights of its submodules but does not call "
                    "them, so it cannot be split; leave it out of the plan (it stays whole), or write attention with linear layers"
                )


def _check_packed_rows(model: torch.nn.Module, dimensions: "SplitDimensions") -> None:
    """Raise `PrepareError` if several matrices are packed along the first dimension, along which FSDP shards, too."""
    for name, parameter in model.named_parameters():
        dim, factor = dimensions.get(id(parameter), (None, 1))
        if dim == 0 and factor > 1:
            raise PrepareError(
                f"{name!r} packs several matrices along its first dimension, along which the layout also shards it; use tensor "
                "parallelism alone or with ddp, or use 'colwise_gather_output' for it and for the next matrix 'rowwise_split_input'"
            )


def _find_head(model: torch.nn.Module, model_split: ModelSplit) -> SplitModule:
    """Return the split output head whose logits the plan gathers.

    Raises:
        ConfigError: If there is not exactly one such module.
    """
    gathered = [
        split_module
        for split_module in model_split.split_modules.values()
        if isinstance(split_module.style, styles.Colwise) and split_module.style.gathers_output
    ]
    model_head = plans.find_output_head(model)
    heads = [split_module for split_module in gathered if model_head is None or split_module.module is model_head]
    if len(heads) != 1:
        raise ConfigError(
            "loss_parallel=True needs one head whose plan is 'colwise_gather_output', so that its logits can stay split along the "
            f"vocabulary; the plan has {', '.join(split_module.name for split_module in heads) or 'none'}"
        )
    return heads[0]


def _find_scopes(model: torch.nn.Module, model_split: ModelSplit) -> list[torch.nn.Module]:
    """Return the innermost modules that contain both ends of a region in which activations are sharded.

    The region begins at a split module whose style has `opens`, and ends at one whose style has `closes`.
    """
    ends = [name for name, split_module in model_split.split_modules.items() if split_module.style.ends_split_region]
    scopes: dict[str, None] = {}  # a set of names in order
    for name, split_module in model_split.split_modules.items():
        if split_module.style.begins_split_region:
            for ancestor in plans.list_ancestors(name):
                if any(end.startswith(f"{ancestor}." if ancestor else "") for end in ends):
                    scopes[ancestor] = None
                    break
    return [model.get_submodule(name) for name in scopes]


SplitDimensions = dict[int, tuple[int, int]]
"""Mapping from a parameter's `id` to a pair: the sharded dimension, and the number of matrices packed along it."""


Convert = Callable[[torch.nn.Module, ModelSplit, SplitDimensions, SplitAxis], None]
"""Function that converts linear layers of a model that will be split."""


def _convert_layers(
    model: torch.nn.Module,
    model_split: ModelSplit,
    dimensions: SplitDimensions,
    axis: SplitAxis,
    options: Float8Options,
    ranks: Collectives,
) -> None:
    """Convert linear layers to float8 before their matrices are split, and put the new modules into `model_split`.

    Args:
        model: Model that will be split.
        model_split: Modules that the plan splits.
        dimensions: How each parameter will be split.
        axis: Mesh axis of tensor parallelism.
        options: Options of float8.
        ranks: Collectives over all ranks of the run.
    """
    from headway.layouts.tensor.float8 import LayerSplit  # imports torchao

    splits = {
        name: LayerSplit(dimensions[id(module.weight)][0], axis.size, axis.group.group_name)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and id(module.weight) in dimensions
    }
    extensions.load("feature", "float8").convert_model(model, options, ranks, splits)
    for name, split_module in model_split.split_modules.items():
        split_module.module = model.get_submodule(name)


def _find_dimensions(model: torch.nn.Module, model_split: ModelSplit, axis: SplitAxis) -> SplitDimensions:
    """Return how each parameter is split. Parameters that stay replicated are left out.

    Modules that share a split parameter, but are not in the plan, are added to `model_split`.

    Args:
        model: Model to split.
        model_split: Modules that the plan splits.
        axis: Mesh axis of tensor parallelism.

    Raises:
        ConfigError: If the plan splits a shared parameter in two ways.
        PrepareError: If a parameter cannot be divided among the ranks, if a module that shares it cannot be split, or if
            a `ParallelStyle` of torch would untie it.
    """
    dimensions: SplitDimensions = {}
    for parameter, owners in find_parameter_owners(model).values():
        splits = {
            f"{name}.{key}" if name else key: _find_split(model_split, name, key, parameter) for name, _, key in owners
        }
        distinct_splits = {split for split in splits.values() if split is not None}
        with_torch_style = [
            name
            for name, *_ in owners
            if any(path in model_split.torch_styles for path in (name, *plans.list_ancestors(name)))
        ]
        if len(owners) > 1 and with_torch_style:
            raise PrepareError(
                f"{' and '.join(splits)} are one parameter, which a ParallelStyle object would untie; give {with_torch_style[0]!r} a "
                "style by name, such as 'colwise_gather_output'"
            )
        if len(distinct_splits) > 1:
            raise ConfigError(
                f"{' and '.join(splits)} are one parameter, but the tensor-parallel plan splits it in two ways"
            )
        if not distinct_splits:
            continue
        dim, factor = distinct_splits.pop()
        dimensions[id(parameter)] = dim, factor
        _check_size(next(iter(splits)), parameter, dim, factor, axis)
        for (name, _, key), split in zip(owners, splits.values()):
            if split is None:
                model_split.split_modules[name] = _make_tied_module(model, name, key, dim, model_split, axis)
    return dimensions


def _find_split(model_split: ModelSplit, name: str, key: str, parameter: torch.Tensor) -> tuple[int, int] | None:
    """Return how the plan splits a parameter of a module, or None if it is replicated.

    Args:
        model_split: Modules and parameters that the plan splits.
        name: Name of the module.
        key: Name of the parameter in the module.
        parameter: Parameter.

    Returns:
        Pair of (dimension, number of matrices packed along it).
    """
    style = model_split.parameters.get(f"{name}.{key}" if name else key)
    if style is None and name in model_split.split_modules:
        style = model_split.split_modules[name].style
    if style is None or (dim := style.find_shard_dim(key, parameter)) is None:
        return None
    return dim, style.factor


def _check_size(name: str, parameter: torch.Tensor, dim: int, factor: int, axis: SplitAxis) -> None:
    """Raise `PrepareError` if packed matrices cannot be divided evenly, or if the last rank would get an empty shard.

    Args:
        name: Name of the parameter, for the message.
        parameter: Full parameter.
        dim: Dimension to shard.
        factor: Number of matrices packed along the dimension.
        axis: Mesh axis of tensor parallelism.
    """
    size = parameter.shape[dim] if dim < parameter.dim() else 0
    if factor > 1 and size % (factor * axis.size):
        raise PrepareError(
            f"{name!r} packs {factor} matrices along dimension {dim} of {tuple(parameter.shape)}, which cannot be divided among "
            f"{axis.size} ranks; use another number of ranks, or leave it out of the plan"
        )
    if size <= -(-size // axis.size) * (axis.size - 1):  # the last rank's part would be empty
        raise PrepareError(
            f"{name!r} of shape {tuple(parameter.shape)} cannot be split along dimension {dim} across {axis.size} ranks; use fewer "
            "ranks, or leave it out of the plan"
        )


def _make_tied_module(
    model: torch.nn.Module, name: str, key: str, dim: int, model_split: ModelSplit, axis: SplitAxis
) -> SplitModule:
    """Return a `SplitModule` for a module that the plan omits but that shares a parameter with a split module.

    Args:
        model: Model that will be split.
        name: Name of the module.
        key: Name of the shared parameter in the module.
        dim: Dimension along which the parameter is split.
        model_split: Modules that the plan splits.
        axis: Mesh axis of tensor parallelism.

    Raises:
        PrepareError: If the module cannot be split along the dimension of the shared parameter.
    """
    module = model.get_submodule(name)
    style: styles.SplitStyle | None = None
    if name not in model_split.split_modules and key == "weight" and isinstance(module, torch.nn.Embedding):
        style = styles.EmbeddingRowwise() if dim == 0 else styles.EmbeddingColwise()
    elif (
        name not in model_split.split_modules
        and key == "weight"
        and isinstance(getattr(module, "out_features", None), int)
    ):
        style = styles.Colwise(gathers_output=True) if dim == 0 else styles.Rowwise(shards_input=True)
    reason = "the plan keeps it whole" if style is None else style.describe_misfit(module, axis.size)
    if style is None or reason is not None:
        raise PrepareError(
            f"{name!r} shares its {key} with a module that is split, but cannot be split in the same way: {reason}; give both a "
            "style, or neither"
        )
    return SplitModule(module, name, axis, style)


def _place_parameters(
    model: torch.nn.Module, dimensions: SplitDimensions, axis: SplitAxis, other_stage_ids: Container[int]
) -> None:
    """Replace the parameters of a model with DTensors. Shared parameters stay shared.

    Parameters that are DTensors already, or that only other pipeline stages hold, are not replaced.

    Args:
        model: Model to split.
        dimensions: How parameters are split. The others are replicated.
        axis: Mesh axis of tensor parallelism.
        other_stage_ids: IDs of parameters that only other pipeline stages hold.
    """
    for parameter, owners in find_parameter_owners(model).values():
        if isinstance(parameter, tensor.DTensor) or id(parameter) in other_stage_ids:
            continue  # converted by a torch style, or on another stage of a pipeline
        placed = place_parameter(parameter, dimensions.get(id(parameter)), axis)
        for _, module, key in owners:
            module._parameters[key] = placed


def place_parameter(
    parameter: torch.nn.Parameter, split: tuple[int, int] | None, axis: SplitAxis
) -> torch.nn.Parameter:
    """Return a DTensor parameter that replaces a full parameter, with the attributes of the full parameter.

    Args:
        parameter: Full parameter.
        split: Dimension to shard, and number of matrices packed along it. None: the parameter is replicated.
        axis: Mesh axis of tensor parallelism.
    """
    local, placement = parameter.detach(), tensor.Replicate()
    if split is not None:
        dim, factor = split
        local = take_packed_chunks(local, axis, dim, factor)
        placement = placements._StridedShard(dim, split_factor=factor) if factor > 1 else tensor.Shard(dim)
    stride = parameter.stride() if split is None else None
    dtensor = dtensors.wrap_shard(local, axis.mesh, [placement], parameter.shape, stride)
    placed = torch.nn.Parameter(dtensor, requires_grad=parameter.requires_grad)
    placed.__dict__.update(parameter.__dict__)
    return placed

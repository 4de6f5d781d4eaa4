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

_RELATIVE = 1e-3
"""Largest accepted difference between ranks' gradients, as a fraction of the gradient's norm."""
_NUM_NAMES = 4
"""Maximum number of parameters that the error about differing gradients names."""
_OF_LARGEST = 1e-6
"""Additional tolerance for gradient differences, as a fraction of the largest gradient norm.

Some kernels need it, because they add numbers in a different order on each call.
"""
_BLOCK = 2**22
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
    named = [
        (name, dtensors.get_local_shard(parameter.grad).detach())
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
        and is_dtensor(parameter)  # a parameter added after prepare() is a plain tensor
        and parameter.placements[-1].is_replicate()
    ]
    has_values = bool(named) and not is_fake(named[0][1])  # a forecast on fake tensors has no values
    odd = _find_differing(named, axis) if has_values else []
    has_any = any(parameter.grad is not None for parameter in model.parameters())
    rows = everyone.gather_numbers([float(len(odd)), float(has_any)])
    counts = [int(row[0]) for row in rows]
    if any(counts):
        names = everyone.gather_objects(odd[:_NUM_NAMES])
        ranks = [rank for rank, count in enumerate(counts) if count]
        first = ranks[0]
        more = " and others" if counts[first] > len(names[first]) else ""
        raise PrepareError(
            f"the gradients of {counts[first]} parameters that the tensor-parallel plan leaves whole differ between ranks "
            f"{', '.join(map(str, ranks))}: {', '.join(names[first])}{more}. They act on activations that are split. Give their "
            'modules the style "replicated_with_grad_allreduce", which sums their gradients; if their inputs are whole, something '
            "before them draws different random numbers on each rank, or the ranks of a group read different batches"
        )
    return any(row[1] for row in rows)  # of all ranks, because one pipeline stage can be frozen entirely


def _find_differing(named: list[tuple[str, torch.Tensor]], axis: SplitAxis) -> list[str]:
    rows = torch.stack([_make_gradient_digest(grad) for _, grad in named])
    found = [torch.empty_like(rows) for _ in range(axis.size)]
    dist.all_gather(found, rows, group=axis.group)
    every = torch.stack(found)
    spread = (every - every[0]).abs().amax(dim=(0, 2))
    norms = every[..., 0].abs().amax(0)
    odd = spread > _RELATIVE * norms + _OF_LARGEST * norms.max()
    return [name for (name, _), is_odd in zip(named, odd.tolist()) if is_odd]


def _make_gradient_digest(grad: torch.Tensor) -> torch.Tensor:
    """Return a tensor with the norm and one projection of a gradient, so that ranks can compare gradients cheaply.

    The gradient is processed in blocks, because a float64 copy of all of it would take many times its memory.
    """
    flat, wide = grad.reshape(-1), dtensors.choose_norm_dtype(grad.device)
    sums = torch.zeros(2, device=flat.device, dtype=wide)
    for start in range(0, flat.numel(), _BLOCK):
        part = flat[start : start + _BLOCK].to(wide)
        waves = torch.arange(start, start + part.numel(), device=flat.device, dtype=wide).cos()
        sums += torch.stack([part @ part, part @ waves])
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
        self._ends = ExitStack()
        self._model = model
        self._is_checked = False
        self._lent = list[LocalParameters]()
        given, options = options, automatic.complete_plan(model, options, self.axis.size, is_sharded)
        cuts = plans.read_plan(model, self.axis, options)
        _refuse_within_attention(model, cuts)
        calls.check_heads(model, cuts, self.axis.size, options)
        stack = plans.arrange_sequences(model, cuts) if options.sequence_parallel else SequenceRegion([])
        if options is not given:
            automatic.check_parts(model, cuts, stack)
        head = _find_head(model, cuts) if options.loss_parallel else None
        where = _find_dimensions(model, cuts, self.axis)
        if is_sharded:
            _refuse_packed_rows(model, where)
        # All checks are done. The model changes from here on.
        if convert is not None:
            convert(model, cuts, where, self.axis)
        calls.divide_counts(model, cuts, self.axis.size, options)
        foreign = self._apply_foreign(model, cuts)
        _place_parameters(model, where, self.axis, other_stage_ids)
        self._hook_modules(model, cuts, stack, foreign, head, other_stage_ids)
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
        if not self._is_checked:
            self._is_checked = compare_gradients(self._model, self.axis, ranks)

    def resume(self) -> None:
        """Enable torch's loss parallelism, so that losses accept sharded logits.

        Do nothing if the option `loss_parallel` is not set.
        """
        if self._has_head:
            self._ends.enter_context(parallel.loss_parallel())

    def end_forward(self) -> None:
        """Restore the DTensor parameters of all modules after a forward that ended early."""
        for each in reversed(self._lent):
            each.after_forward()

    def release(self) -> None:
        """Disable torch's loss parallelism, if it is enabled."""
        self._ends.close()

    def _apply_foreign(self, model: torch.nn.Module, cuts: ModelSplit) -> set[torch.nn.Module]:
        """Apply torch's `ParallelStyle` objects in a plan, and return the modules whose parameters they converted."""
        for name, style in cuts.foreign.items():
            style.src_data_rank = None
            style._apply(model.get_submodule(name), self.axis.mesh)
        taken = set()
        for module in model.modules() if cuts.foreign else ():
            for parameter in module.parameters(recurse=False):
                if isinstance(parameter, tensor.DTensor):
                    taken.add(module)
                    if parameter.requires_grad:
                        parameter.register_post_accumulate_grad_hook(_complete_gradient)
        return taken

    def _hook_modules(
        self,
        model: torch.nn.Module,
        cuts: ModelSplit,
        stack: SequenceRegion,
        foreign: set[torch.nn.Module],
        head: SplitModule | None,
        other_stage_ids: Container[int],
    ) -> None:
        partial = {site.module for site in cuts.sites.values() if site.style.is_partial}
        partial |= {model.get_submodule(name) for name in stack.partial}
        sites = {
            site.module: site
            for site in cuts.sites.values()
            if not any(id(parameter) in other_stage_ids for parameter in site.module.parameters())
        }
        gathered = {model.get_submodule(name) for name in stack.gathered}
        blocks = {model.get_submodule(name): (name, names) for names in stack.stacks for name in names}
        rng_states = None if blocks else self._rng_states
        adapted = {model.get_submodule(name): style for name, style in cuts.adapted.items()}
        within = {inner for outer in adapted for inner in outer.modules()}
        scopes = _find_scopes(model, cuts)
        for module in model.modules():
            if module in blocks:
                name, names = blocks[module]
                self._register_hooks(
                    module, SequenceBlock(self.axis, self._rng_states, name == names[0], name == names[-1])
                )
            if module in gathered:
                self._register_hooks(module, GatheredInput(self.axis))
            if module in sites:
                keeps = self._keep_cut if head is not None and sites[module] is head else None
                is_known = any(module in scope.modules() for scope in scopes) and module not in within
                self._register_hooks(module, SplitCall(sites[module], rng_states if is_known else None, keeps))
            if module in adapted and rng_states is not None:
                self._register_hooks(module, AdaptedCall(adapted[module], rng_states))
            if module not in foreign and (module._parameters or isinstance(module, torch.nn.MultiheadAttention)):
                held = [*module.modules()] if isinstance(module, torch.nn.MultiheadAttention) else [module]
                self._register_hooks(module, LocalParameters(held, self.axis, module in partial))
            if module in scopes and rng_states is not None:
                module.register_forward_hook(lambda *_: self._rng_states.join(), always_call=True)
        rest = [module for module in model.modules() if module not in foreign and module not in partial]
        self._register_hooks(model, LocalParameters(rest, self.axis, only_whole=True))

    def _register_hooks(self, module: torch.nn.Module, call: Any) -> None:
        if isinstance(call, LocalParameters):
            self._lent.append(call)
        module.register_forward_pre_hook(call.before_forward, with_kwargs=True)
        if hasattr(call, "after_any"):
            module.register_forward_hook(call.after_any, always_call=True)
        if hasattr(call, "after_forward"):
            module.register_forward_hook(call.after_forward, always_call=isinstance(call, LocalParameters))

    def _keep_cut(self, module: torch.nn.Module, output: torch.Tensor) -> Any:
        shape = torch.Size((*output.shape[:-1], styles.num_outputs(module)))
        return dtensors.wrap_shard(output, self.axis.mesh, [tensor.Shard(output.dim() - 1)], shape)


def _complete_gradient(parameter: Any) -> None:
    """Redistribute a parameter's gradient to the parameter's placements, if a style of torch has left it `Partial`.

    Args:
        parameter: DTensor parameter with a gradient.
    """
    if isinstance(parameter.grad, tensor.DTensor) and parameter.grad.placements != parameter.placements:
        parameter.grad = parameter.grad.redistribute(placements=parameter.placements)


def _refuse_within_attention(model: torch.nn.Module, cuts: ModelSplit) -> None:
    for name in (*cuts.sites, *cuts.foreign, *cuts.parameters):
        for around in plans.list_ancestors(name):
            if isinstance(model.get_submodule(around), torch.nn.MultiheadAttention):
                raise PrepareError(
                    f"{name!r} is part of a torch.nn.MultiheadAttention, which uses the weights of its submodules but does not call "
                    "them, so it cannot be split; leave it out of the plan (it stays whole), or write attention with linear layers"
                )


def _refuse_packed_rows(model: torch.nn.Module, where: "Where") -> None:
    for name, parameter in model.named_parameters():
        if where.get(id(parameter), (1, 1))[0] == 0 and where[id(parameter)][1] > 1:
            raise PrepareError(
                f"{name!r} packs several matrices along its first dimension, along which the layout also shards it; use tensor "
                "parallelism alone or with ddp, or use 'colwise_gather_output' for it and for the next matrix 'rowwise_split_input'"
            )


def _find_head(model: torch.nn.Module, cuts: ModelSplit) -> SplitModule:
    gathered = [
        site for site in cuts.sites.values() if isinstance(site.style, styles.Colwise) and site.style.is_gathered
    ]
    own = plans.find_output_head(model)
    found = [site for site in gathered if own is None or site.module is own]
    if len(found) != 1:
        raise ConfigError(
            "loss_parallel=True needs one head whose plan is 'colwise_gather_output', so that its logits can stay split along the "
            f"vocabulary; the plan has {', '.join(site.name for site in found) or 'none'}"
        )
    return found[0]


def _find_scopes(model: torch.nn.Module, cuts: ModelSplit) -> list[torch.nn.Module]:
    """Return the innermost modules that contain both ends of a region in which activations are sharded.

    The region begins at a split module whose style has `opens`, and ends at one whose style has `closes`.
    """
    closing = [name for name, site in cuts.sites.items() if site.style.closes]
    found: dict[str, None] = {}
    for name, site in cuts.sites.items():
        if site.style.opens:
            for around in plans.list_ancestors(name):
                if any(close.startswith(f"{around}." if around else "") for close in closing):
                    found[around] = None
                    break
    return [model.get_submodule(name) for name in found]


Where = dict[int, tuple[int, int]]
"""Mapping from a parameter's `id` to a pair: the sharded dimension, and the number of matrices packed along it."""


Convert = Callable[[torch.nn.Module, ModelSplit, Where, SplitAxis], None]
"""Function that converts linear layers of a model that will be split."""


def _convert_layers(
    model: torch.nn.Module,
    cuts: ModelSplit,
    where: Where,
    axis: SplitAxis,
    options: Float8Options,
    ranks: Collectives,
) -> None:
    """Convert linear layers to float8 before their matrices are split, and point `cuts` to the new modules.

    Args:
        model: Model that will be split.
        cuts: Modules that the plan splits.
        where: Dimension along which each parameter will be split.
        axis: Mesh axis of tensor parallelism.
        options: Options of float8.
        ranks: Collectives over all ranks of the run.
    """
    from headway.layouts.tensor.float8 import LayerSplit  # imports torchao

    splits = {
        name: LayerSplit(where[id(module.weight)][0], axis.size, axis.group.group_name)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and id(module.weight) in where
    }
    extensions.load("feature", "float8").convert_model(model, options, ranks, splits)
    for name, site in cuts.sites.items():
        site.module = model.get_submodule(name)


def _find_dimensions(model: torch.nn.Module, cuts: ModelSplit, axis: SplitAxis) -> Where:
    where: Where = {}
    for parameter, owners in find_parameter_owners(model).values():
        asked = {f"{name}.{key}" if name else key: _find_split(cuts, name, key, parameter) for name, _, key in owners}
        wanted = {ask for ask in asked.values() if ask is not None}
        foreign = [
            name for name, *_ in owners if any(around in cuts.foreign for around in (name, *plans.list_ancestors(name)))
        ]
        if len(owners) > 1 and foreign:
            raise PrepareError(
                f"{' and '.join(asked)} are one parameter, which a ParallelStyle object would untie; give {foreign[0]!r} a style "
                "by name, such as 'colwise_gather_output'"
            )
        if len(wanted) > 1:
            raise ConfigError(
                f"{' and '.join(asked)} are one parameter, but the tensor-parallel plan splits it in two ways"
            )
        if not wanted:
            continue
        (dim, factor) = where[id(parameter)] = wanted.pop()
        _check_size(next(iter(asked)), parameter, dim, factor, axis)
        for (name, _, key), ask in zip(owners, asked.values()):
            if ask is None:
                cuts.sites[name] = _make_tied_site(model, name, key, dim, cuts, axis)
    return where


def _find_split(cuts: ModelSplit, name: str, key: str, parameter: torch.Tensor) -> tuple[int, int] | None:
    style = cuts.parameters.get(f"{name}.{key}" if name else key)
    if style is None and name in cuts.sites:
        style = cuts.sites[name].style
    if style is None or (dim := style.find_shard_dim(key, parameter)) is None:
        return None
    return dim, style.factor


def _check_size(name: str, parameter: torch.Tensor, dim: int, factor: int, axis: SplitAxis) -> None:
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


def _make_tied_site(
    model: torch.nn.Module, name: str, key: str, dim: int, cuts: ModelSplit, axis: SplitAxis
) -> SplitModule:
    """Return a `SplitModule` for a module that the plan omits but that shares a parameter with a split module.

    Args:
        model: Model that will be split.
        name: Name of the module.
        key: Name of the shared parameter in the module.
        dim: Dimension along which the parameter is split.
        cuts: Modules that the plan splits.
        axis: Mesh axis of tensor parallelism.

    Raises:
        PrepareError: If the module cannot be split along the dimension of the shared parameter.
    """
    module = model.get_submodule(name)
    style: styles.SplitStyle | None = None
    if name not in cuts.sites and key == "weight" and isinstance(module, torch.nn.Embedding):
        style = styles.EmbeddingRowwise() if dim == 0 else styles.EmbeddingColwise()
    elif name not in cuts.sites and key == "weight" and isinstance(getattr(module, "out_features", None), int):
        style = styles.Colwise(is_gathered=True) if dim == 0 else styles.Rowwise(is_split=True)
    reason = "the plan keeps it whole" if style is None else style.describe_misfit(module, axis.size)
    if style is None or reason is not None:
        raise PrepareError(
            f"{name!r} shares its {key} with a module that is split, but cannot be split in the same way: {reason}; give both a "
            "style, or neither"
        )
    return SplitModule(module, name, axis, style)


def _place_parameters(model: torch.nn.Module, where: Where, axis: SplitAxis, other_stage_ids: Container[int]) -> None:
    for parameter, owners in find_parameter_owners(model).values():
        if isinstance(parameter, tensor.DTensor) or id(parameter) in other_stage_ids:
            continue  # converted by a torch style, or on another stage of a pipeline
        placed = place_parameter(parameter, where.get(id(parameter)), axis)
        for _, module, key in owners:
            module._parameters[key] = placed


def place_parameter(
    parameter: torch.nn.Parameter, where: tuple[int, int] | None, axis: SplitAxis
) -> torch.nn.Parameter:
    """Return a DTensor parameter that replaces a full parameter.

    Args:
        parameter: Full parameter.
        where: Dimension to shard, and number of matrices packed along it. None: the parameter is replicated.
        axis: Mesh axis of tensor parallelism.
    """
    local, placement = parameter.detach(), tensor.Replicate()
    if where is not None:
        dim, factor = where
        local = take_packed_chunks(local, axis, dim, factor)
        placement = placements._StridedShard(dim, split_factor=factor) if factor > 1 else tensor.Shard(dim)
    stride = parameter.stride() if where is None else None
    found = dtensors.wrap_shard(local, axis.mesh, [placement], parameter.shape, stride)
    placed = torch.nn.Parameter(found, requires_grad=parameter.requires_grad)
    placed.__dict__.update(parameter.__dict__)
    return placed

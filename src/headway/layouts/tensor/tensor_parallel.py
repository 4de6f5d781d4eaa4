"""Tensor parallelism: split a model's matrices across the ranks of one mesh axis, in place.

All parameters become DTensors on that axis, either sharded or replicated. So an optimizer has only one kind of tensor,
and `fully_shard` can shard the parameters along other axes. Forward computes on plain local tensors (`calls`).
`crossings` contains the collectives that convert between replicated and sharded activations.

Gradients of replicated parameters must be equal on all ranks of tensor parallelism. `gradient_agreement` checks this
once, in the first optimizer step.
"""

from collections.abc import Callable, Container
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from headway.common.optional import LazyModule
from headway.core import extensions
from headway.core.config.float8 import Float8Options
from headway.core.config.parallelism import TensorParallelOptions
from headway.core.runtime.collectives.checked import Collectives
from headway.core.strategies.fully_sharded import dtensors
from headway.core.strategies.fully_sharded.axes import ModelAxis, SplitModel
from headway.errors import ConfigError, PrepareError
from headway.layouts.tensor import automatic, head_counts, options_of_model, plans, styles
from headway.layouts.tensor.calls import AdaptedCall, GatheredInput, LocalParameters, SequenceBlock, SplitCall
from headway.layouts.tensor.crossings import SplitAxis, SplitRNG
from headway.layouts.tensor.gradient_agreement import compare_gradients
from headway.layouts.tensor.parameter_splits import (
    SplitDimensions,
    check_packed_rows,
    find_dimensions,
    place_parameters,
)
from headway.layouts.tensor.plans import ModelSplit
from headway.layouts.tensor.sequence_split import SequenceSplit, arrange_sequences
from headway.layouts.tensor.styles import SplitModule

tensor = LazyModule("torch.distributed.tensor")
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
        own_options = options_of_model.select_options(model, options.tensor, self.announced)
        return TensorParallel(model, mesh["tp"], own_options, is_sharded, convert, other_stage_ids)


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
        head_counts.check_heads(model, model_split, self.axis.size, planned_options)
        sequences = arrange_sequences(model, model_split) if planned_options.sequence_parallel else SequenceSplit([])
        if planned_options is not options:
            automatic.check_blocks(model, model_split, sequences)
        head = _find_head(model, model_split) if planned_options.loss_parallel else None
        dimensions = find_dimensions(model, model_split, self.axis)
        if is_sharded:
            check_packed_rows(model, dimensions)
        # All checks are done. The model changes from here on.
        if convert is not None:
            convert(model, model_split, dimensions, self.axis)
        head_counts.divide_counts(model, model_split, self.axis.size, planned_options)
        converted = self._apply_torch_styles(model, model_split)
        place_parameters(model, dimensions, self.axis, other_stage_ids)
        self._hook_modules(model, model_split, sequences, converted, head, other_stage_ids)
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
        sequences: SequenceSplit,
        converted: set[torch.nn.Module],
        head: SplitModule | None,
        other_stage_ids: Container[int],
    ) -> None:
        """Register the forward hooks of all modules.

        torch runs the hooks of a module in the order in which they are registered. `SplitCall` must come before
        `LocalParameters`, which would not restore a bias that `SplitCall` replaces afterwards.

        Args:
            model: Model whose parameters are DTensors.
            model_split: Modules that the plan splits.
            sequences: Stacks of blocks whose activations are sharded along the sequence. Empty without sequence
                parallelism.
            converted: Modules that a `ParallelStyle` of torch has converted. They compute on DTensors.
            head: Output head whose logits stay sharded in training. None: logits are gathered.
            other_stage_ids: IDs of parameters and buffers that only other pipeline stages hold.
        """
        split_modules = {
            split_module.module: split_module
            for split_module in model_split.split_modules.values()
            if not any(id(parameter) in other_stage_ids for parameter in split_module.module.parameters())
        }
        partial_modules = {
            split_module.module for split_module in model_split.split_modules.values() if split_module.style.is_partial
        }
        partial_modules |= {model.get_submodule(name) for name in sequences.partial}
        gathered_modules = {model.get_submodule(name) for name in sequences.gathered}
        block_hooks = self._make_block_hooks(model, sequences)
        # Under sequence parallelism, only blocks switch RNG states.
        rng_switches = _find_rng_switches(model, model_split) if not block_hooks else _RNGSwitches()
        for module in model.modules():
            if module in block_hooks:
                self._register_hooks(module, block_hooks[module])
            if module in gathered_modules:
                self._register_hooks(module, GatheredInput(self.axis))
            if module in split_modules:
                wrap_logits = self._wrap_logits if split_modules[module] is head else None
                rng_states = self._rng_states if module in rng_switches.enclosed else None
                self._register_hooks(module, SplitCall(split_modules[module], rng_states, wrap_logits))
            if module in rng_switches.adapted_styles:
                self._register_hooks(module, AdaptedCall(rng_switches.adapted_styles[module], self._rng_states))
            if module not in converted:
                self._replace_parameters_in_calls(module, is_partial=module in partial_modules)
            if module in rng_switches.enclosing:
                module.register_forward_hook(lambda *_: self._rng_states.use_common_state(), always_call=True)
        # A module can read parameters of modules that it does not call. Replicated ones are replaced during the whole forward.
        readable = [m for m in model.modules() if m not in converted and m not in partial_modules]
        self._register_hooks(model, LocalParameters(readable, self.axis, only_replicated=True))

    def _make_block_hooks(
        self, model: torch.nn.Module, sequences: SequenceSplit
    ) -> dict[torch.nn.Module, SequenceBlock]:
        """Return the hooks of each block that computes on sequence shards, by block. The first block shards, the last one gathers."""
        hooks: dict[torch.nn.Module, SequenceBlock] = {}
        for block_names in sequences.stacks:
            for name in block_names:
                is_first, is_last = name == block_names[0], name == block_names[-1]
                hooks[model.get_submodule(name)] = SequenceBlock(self.axis, self._rng_states, is_first, is_last)
        return hooks

    def _replace_parameters_in_calls(self, module: torch.nn.Module, is_partial: bool) -> None:
        """Register hooks that replace a module's own DTensor parameters with local tensors during its forward.

        Args:
            module: Module, which may have no parameters. Then no hooks are registered.
            is_partial: Whether gradients of replicated parameters are terms that must be summed over the ranks.
        """
        if isinstance(module, torch.nn.MultiheadAttention):
            # It reads the parameters of its submodules without calling them.
            self._register_hooks(module, LocalParameters([*module.modules()], self.axis, is_partial))
        elif module._parameters:
            self._register_hooks(module, LocalParameters([module], self.axis, is_partial))

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
                    "them, so it cannot be split; leave it out of the plan (it stays replicated), or write attention with "
                    "linear layers"
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


@dataclass
class _RNGSwitches:
    """Modules whose forwards switch between the RNG state of all ranks and that of one rank. Empty by default.

    Activations are sharded from a split module whose style has `begins_split_region` to one with `ends_split_region`.

    Attributes:
        enclosing: Innermost modules that contain the beginning and the end of such a region. They end with the common RNG state.
        enclosed: Modules within these, which switch if they are split. Parts of layers with adapters are left out,
            because the whole layer switches.
        adapted_styles: Style of each split layer with adapters.
    """

    enclosing: list[torch.nn.Module] = field(default_factory=list)
    enclosed: set[torch.nn.Module] = field(default_factory=set)
    adapted_styles: dict[torch.nn.Module, styles.SplitStyle] = field(default_factory=dict)


def _find_rng_switches(model: torch.nn.Module, model_split: ModelSplit) -> _RNGSwitches:
    """Return the modules whose forwards switch RNG states, for a model without sequence parallelism."""
    enclosing = _find_enclosing_modules(model, model_split)
    enclosed = {part for module in enclosing for part in module.modules()}
    adapted_styles = {model.get_submodule(name): style for name, style in model_split.adapted_styles.items()}
    within_adapted = {part for layer in adapted_styles for part in layer.modules()}
    return _RNGSwitches(enclosing, enclosed - within_adapted, adapted_styles)


def _find_enclosing_modules(model: torch.nn.Module, model_split: ModelSplit) -> list[torch.nn.Module]:
    """Return the innermost modules that contain both ends of a region in which activations are sharded."""
    ends = [name for name, split_module in model_split.split_modules.items() if split_module.style.ends_split_region]
    names: dict[str, None] = {}  # a set of names in order
    for name, split_module in model_split.split_modules.items():
        if split_module.style.begins_split_region:
            for ancestor in plans.list_ancestors(name):
                if any(end.startswith(f"{ancestor}." if ancestor else "") for end in ends):
                    names[ancestor] = None
                    break
    return [model.get_submodule(name) for name in names]


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
        name: LayerSplit(dimensions[id(module.weight)].dim, axis.size, axis.group.group_name)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and id(module.weight) in dimensions
    }
    extensions.load("feature", "float8").convert_model(model, options, ranks, splits)
    for name, split_module in model_split.split_modules.items():
        split_module.module = model.get_submodule(name)

"""Split a model's blocks into pipeline stages, and export the state of a split model for checkpoints.

A stage is a sequence of consecutive repeated blocks of the model. A module outside of the blocks (embedding, norm,
head) is on the first stage if it precedes the blocks in the module tree. If it follows them, it is on the last stage.
PEFT's prompt encoders are an exception: they follow the base model in the module tree, but run before its blocks.
A parameter is on every stage whose modules contain it. So a head that is tied to an embedding is on both the first and
the last stage. All stages hold the parameters that belong directly to modules that contain blocks.

If several pipeline ranks hold a tensor, the first of them writes it into checkpoints.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from headway.core.config.mesh import Layout
from headway.core.config.parallelism import PipelineOptions
from headway.core.runtime.collectives.checked import Collectives
from headway.core.strategies.blocks import find_blocks, is_container
from headway.core.strategies.fully_sharded import dtensors
from headway.core.weights.pieces import ShardPiece, TensorBox, TensorSplit, is_dtensor, split_wrappers
from headway.core.weights.quantization_data import add_quantization_data, list_data_names
from headway.core.weights.shard_splitter import ShardSplitter
from headway.core.weights.tensor_bytes import TensorSpec
from headway.errors import ConfigError, PrepareError
from headway.layouts.low_bit.states import export_state

_PROMPTS = "prompt_encoder"
"""Name of the container of prompt encoders in PEFT's models."""


@dataclass(frozen=True)
class StageSplit:
    """Assignment of a model's blocks and other modules to pipeline stages.

    Attributes:
        blocks: Repeated blocks in the order in which they run.
        names: Names of the blocks.
        bounds: Index of each stage's first block, followed by the number of blocks.
        outer_modules: Indices of the stages that hold each module outside of the blocks, by the module's name. Modules
            without parameters are not included.
        common_tensors: Names of parameters and buffers that belong directly to modules that contain blocks. All stages
            hold them.
    """

    blocks: tuple[torch.nn.Module, ...]
    names: tuple[str, ...]
    bounds: tuple[int, ...]
    outer_modules: dict[str, frozenset[int]]
    common_tensors: tuple[str, ...]

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.bounds) - 1

    def find_stage(self, block: int) -> int:
        """Return the stage of a block, given the block's index."""
        return next(stage for stage in range(self.num_stages) if block < self.bounds[stage + 1])

    def map_stages(self, model: torch.nn.Module) -> dict[int, frozenset[int]]:
        """Return the indices of the stages that hold each parameter and buffer, by the tensor's `id`.

        All stages hold the `common_tensors`, and tensors that belong to no block and to no module in `outer_modules`.

        Args:
            model: Model that was split.
        """
        assigned_modules = [(block, frozenset((self.find_stage(index),))) for index, block in enumerate(self.blocks)]
        assigned_modules += [(model.get_submodule(name), stages) for name, stages in self.outer_modules.items()]
        stages_by_id = {id(tensor): frozenset[int]() for tensor in (*model.parameters(), *model.buffers())}
        for module, stages in assigned_modules:
            for tensor in (*module.parameters(), *module.buffers()):
                stages_by_id[id(tensor)] |= stages
        common_ids = {id(_get_tensor(model, name)) for name in self.common_tensors}
        for tensor_id, stages in stages_by_id.items():
            if tensor_id in common_ids or not stages:
                stages_by_id[tensor_id] = frozenset(range(self.num_stages))
        return stages_by_id

    def describe(self) -> str:
        """Return a text for the log that names the blocks and other modules of each stage."""
        texts = []
        for stage, (start, stop) in enumerate(zip(self.bounds, self.bounds[1:])):
            block_names = self.names[start:stop]
            blocks = block_names[0] if len(block_names) == 1 else f"{block_names[0]} to {block_names[-1]}"
            outer_names = [name for name, stages in self.outer_modules.items() if stage in stages]
            texts.append(f"{stage}: {', '.join([blocks, *outer_names])}")
        return "; ".join(texts)


def find_stages(model: torch.nn.Module, num_stages: int, options: PipelineOptions) -> StageSplit:
    """Return an assignment of a model's blocks to pipeline stages.

    Args:
        model: User's model.
        num_stages: Number of stages of the whole pipeline.
        options: Options that can name the blocks, the first block of each stage, and the stages of other modules.

    Raises:
        PrepareError: If the model has fewer blocks than stages.
        ConfigError: If the options name modules that do not exist, or if their `split` does not name one first block
            for each later stage, in order.
    """
    blocks = find_blocks(model, options.blocks)
    names_by_id = {id(module): name for name, module in model.named_modules()}
    names = [names_by_id[id(block)] for block in blocks]
    kind = type(model).__name__
    if len(blocks) < num_stages:
        count = f"{len(blocks)} repeated blocks ({', '.join(names)})" if blocks else "no repeated blocks"
        raise PrepareError(
            f"{kind} has {count}, too few for {num_stages} stages of a pipeline; use fewer ranks along pp, or name its blocks: "
            'kwargs_handlers=[PipelineOptions(blocks=["Block"])]'
        )
    bounds = _find_bounds(names, num_stages, options.split) if options.split else _split_evenly(len(blocks), num_stages)
    outer = _find_outer_modules(model, set(map(id, blocks)), num_stages)
    _apply_stage_options(outer, type(model).__name__, num_stages, options)
    return StageSplit(tuple(blocks), tuple(names), tuple(bounds), outer.stages_by_name, tuple(outer.common_tensors))


def _split_evenly(num_blocks: int, num_stages: int) -> list[int]:
    """Return the index of each stage's first block, followed by the number of blocks, for stages of equal size.

    If the blocks cannot be divided evenly, the middle stages get an additional block first, and then the first stage.
    The last stage, which has the head, never gets one.
    """
    size, num_larger = divmod(num_blocks, num_stages)
    # From the first to get an additional block to the last.
    order = sorted(range(num_stages), key=lambda stage: (stage == num_stages - 1, stage == 0, stage))
    larger_stages = order[:num_larger]
    return [0, *accumulate(size + (stage in larger_stages) for stage in range(num_stages))]


def _find_bounds(names: list[str], num_stages: int, split: tuple[str, ...]) -> list[int]:
    """Return the index of each stage's first block, followed by the number of blocks, from the names of first blocks.

    Args:
        names: Names of all blocks.
        num_stages: Number of stages.
        split: Name of the first block of each stage after the first.

    Raises:
        ConfigError: If a name is not that of a block, or if the names are not one for each later stage, in order.
    """
    unknown = [name for name in split if name not in names]
    if unknown:
        raise ConfigError(f"PipelineOptions(split=...) names {unknown[0]!r}; the blocks are {', '.join(names)}")
    begins = [names.index(name) for name in split]
    if begins != sorted(set(begins)) or 0 in begins or len(begins) != num_stages - 1:
        raise ConfigError(
            f"PipelineOptions(split={list(split)}) must name the first block of each of stages 2 to {num_stages}, in order; the "
            f"blocks are {', '.join(names)}"
        )
    return [0, *begins, len(names)]


@dataclass
class _OuterModules:
    """Parts of a model outside of its blocks.

    Attributes:
        stages_by_name: Indices of the stages that hold each module, by the module's name. Only the outermost modules with
            parameters have entries.
        containers: Names of containers that have no forward and no tensors. Their children have entries instead.
        common_tensors: Names of parameters and buffers that belong directly to modules that contain blocks.
    """

    stages_by_name: dict[str, frozenset[int]] = field(default_factory=dict)
    containers: set[str] = field(default_factory=set)
    common_tensors: list[str] = field(default_factory=list)


def _find_outer_modules(model: torch.nn.Module, block_ids: set[int], num_stages: int) -> _OuterModules:
    """Return the modules outside of the blocks: on the first stage if they precede the first block, else on the last.

    Args:
        model: User's model.
        block_ids: IDs of the blocks.
        num_stages: Number of stages of the whole pipeline.
    """
    ids_around_blocks = {
        id(module) for module in model.modules() if any(id(each) in block_ids for each in module.modules())
    } - block_ids
    outer = _OuterModules()
    default_stage = 0
    assigned: list[str] = []  # blocks and outer modules; their submodules are on the same stages
    for name, module in model.named_modules():  # a module comes before its submodules
        if id(module) in block_ids:
            default_stage = num_stages - 1
            assigned.append(name)
        elif any(name.startswith(f"{each}.") for each in assigned):
            continue
        elif id(module) in ids_around_blocks:
            tensors = {**module._parameters, **module._buffers}
            keys = [key for key, tensor in tensors.items() if tensor is not None]
            outer.common_tensors += [f"{name}.{key}" if name else key for key in keys]
        elif _is_bare_container(module):  # its children are called, and it is not
            outer.containers.add(name)
        else:
            assigned.append(name)
            if any(True for _ in module.parameters()):
                outer.stages_by_name[name] = frozenset((default_stage,))
                if hasattr(model, "peft_config") and name.startswith(f"{_PROMPTS}."):
                    outer.stages_by_name[name] = frozenset(range(num_stages))
    return outer


def _apply_stage_options(outer: _OuterModules, class_name: str, num_stages: int, options: PipelineOptions) -> None:
    """Move the modules that the options `first` and `last` name to these stages. A module that both name is on both.

    Args:
        outer: Modules outside of the blocks.
        class_name: Class of the model, for messages.
        num_stages: Number of stages of the whole pipeline.
        options: Options with the names of modules for the first and for the last stage.

    Raises:
        ConfigError: If a module that the options name is within a block, contains blocks, has no parameters, or does
            not exist.
    """
    chosen: dict[str, set[int]] = {}
    for option, stage, names in (("first", 0, options.first), ("last", num_stages - 1, options.last)):
        for name in _expand_containers(names, outer.containers, outer.stages_by_name):
            if name not in outer.stages_by_name:
                raise ConfigError(
                    f"PipelineOptions({option}=...) names {name!r}; the modules with parameters outside "
                    f"of the blocks of {class_name} are {', '.join(outer.stages_by_name) or 'none'}"
                )
            chosen.setdefault(name, set()).add(stage)
    for name, stages in chosen.items():
        outer.stages_by_name[name] = frozenset(stages)


def _is_bare_container(module: torch.nn.Module) -> bool:
    """Whether the module only contains other modules: it has neither a forward nor tensors of its own."""
    return is_container(module) and bool(module._modules) and not (module._parameters or module._buffers)


def _expand_containers(names: Iterable[str], containers: set[str], outer_names: Iterable[str]) -> list[str]:
    """Return names from the user's options, with each container's name replaced by the names of the modules in it.

    A container without such modules keeps its name.

    Args:
        names: Names from the user's options.
        containers: Names of containers that have no forward.
        outer_names: Names of the modules outside of the blocks.
    """
    expanded: list[str] = []
    for name in names:
        children = [each for each in outer_names if each.startswith(f"{name}.")] if name in containers else []
        expanded += children or [name]
    return expanded


def _get_tensor(model: torch.nn.Module, name: str) -> torch.Tensor:
    """Return a parameter or buffer of a model by its name."""
    path, _, key = name.rpartition(".")
    tensor: torch.Tensor = getattr(model.get_submodule(path), key)
    return tensor


class LayerData(NamedTuple):
    """Tensor that a layer exports although it is neither a parameter nor a buffer, such as the scales of 8-bit layers.

    Attributes:
        owner: Name of the weight of the layer.
        shape: Shape of the tensor.
        dtype: Dtype of the tensor.
    """

    owner: str
    shape: tuple[int, ...]
    dtype: torch.dtype


def list_layer_data(model: torch.nn.Module) -> dict[str, LayerData]:
    """Return the shapes and dtypes of tensors in a model's state dict that are neither parameters nor buffers, by name.

    Only tensors of layers that have a `weight` are listed, such as `SCB` and `weight_format` of bitsandbytes' 8-bit
    layers. Such a layer keeps these tensors in its weight. A rank that replaces the weight with a meta tensor loses them.
    Data of 4-bit layers is left out, because every rank keeps it.

    Args:
        model: Model before it is split, with all its weights.
    """
    parameter_names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    buffer_names = {name for name, _ in model.named_buffers(remove_duplicate=False)}
    known_names = parameter_names | buffer_names | list_data_names(model)
    found = {}
    for name, value in model.state_dict(keep_vars=True).items():
        owner = f"{name.rpartition('.')[0]}.weight"
        if isinstance(value, torch.Tensor) and name not in known_names and owner in parameter_names:
            found[name] = LayerData(owner, tuple(value.shape), value.dtype)
    return found


class PipelineState:
    """State of a model that is split into pipeline stages, as full tensors and `ShardPiece` objects for checkpoints.

    Args:
        model: User's model, which has been split.
        holders: Pipeline ranks that hold each parameter and buffer, by name.
        layer_data: Tensors that layers export beside parameters and buffers, by name.
        layout: Layout of the run.
        rank: Global rank of this process.

    Attributes:
        holders: Pipeline ranks that hold each parameter and buffer, by name.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        holders: Mapping[str, frozenset[int]],
        layer_data: Mapping[str, LayerData],
        layout: Layout,
        rank: int,
    ) -> None:
        self.holders = holders
        self._layer_data = layer_data
        self._model = model
        self._rank = rank
        # Global ranks of the first pipeline, whose ranks write unsharded tensors.
        self._writing_ranks = layout.list_groups("pp")[0]
        self._pipeline_rank = layout.find_coordinates(rank)["pp"]
        self._all_pipeline_ranks = frozenset(range(layout.pp))
        self._is_sharded = bool(layout.sizes.keys() - {"pp", "replicate"})

    def list_remote_ids(self) -> frozenset[int]:
        """Return the IDs of the parameters and buffers that only other pipeline ranks hold."""
        tensors = (*self._model.named_parameters(), *self._model.named_buffers())
        return frozenset(id(tensor) for name, tensor in tensors if self._pipeline_rank not in self.holders[name])

    # ---------------------------------------------------------------- shards of tensors

    def _make_piece(
        self, shape: tuple[int, ...], dtype: torch.dtype, holders: frozenset[int], tensor: torch.Tensor | None
    ) -> ShardPiece:
        """Return this rank's `ShardPiece` of a tensor. The first pipeline rank that holds the tensor writes it.

        Args:
            shape: Full shape of the tensor.
            dtype: Dtype of the tensor.
            holders: Pipeline ranks that hold the tensor.
            tensor: Tensor or DTensor on this rank. None: only other pipeline ranks hold it.
        """
        if tensor is not None and is_dtensor(tensor):
            piece = ShardSplitter().split_tensor(tensor)
            is_writer = self._pipeline_rank == min(holders)
            boxes = (replace(box, is_written=box.is_written and is_writer) for box in piece.boxes)
            return replace(piece, boxes=tuple(boxes), split=None)
        writer = self._writing_ranks[min(holders)]
        # Ranks of other stages do not know how a stage's parameters are sharded.
        split = None if self._is_sharded else TensorSplit(tuple((size,) for size in shape), (writer,))
        if tensor is None:
            return ShardPiece(shape, dtype, (), None, split)
        values = tensor.detach()
        box = TensorBox((0,) * len(shape), values, self._rank == writer)
        return ShardPiece(shape, dtype, (box,), values, split)

    def _export_tensor(self, name: str, tensor: torch.Tensor) -> Any:
        """Return a tensor if all pipeline ranks hold all of it, else this rank's `ShardPiece` of it.

        Tensors without elements are returned as new empty tensors.

        Args:
            name: Name of the tensor in the model.
            tensor: Tensor on this rank. A meta tensor if only other pipeline ranks hold it.
        """
        holders = self.holders[name]
        if holders == self._all_pipeline_ranks and not is_dtensor(tensor):
            return tensor.detach()
        if not tensor.numel():
            return torch.empty(tensor.shape, dtype=tensor.dtype)
        return self._make_piece(tuple(tensor.shape), tensor.dtype, holders, None if tensor.is_meta else tensor)

    def export_state(self) -> Iterator[tuple[str, Any]]:
        """Yield (name, tensor) for each entry of the model's state dict.

        A tensor that not all pipeline ranks hold completely is yielded as a `ShardPiece`, with this rank's values only.
        """
        exported: dict[int, Any] = {}
        state = self._model.state_dict(keep_vars=True)
        for name, data in self._layer_data.items():
            yield name, self._make_piece(data.shape, data.dtype, self.holders[data.owner], state.pop(name, None))
        for name, value in add_quantization_data(self._model, state.items()):
            # A tensor that consists of other tensors, such as a quantized weight, is exported as these.
            for inner_name, inner_value in split_wrappers([(name, value)]):
                if not isinstance(inner_value, torch.Tensor) or name not in self.holders:
                    yield inner_name, inner_value
                    continue
                if id(inner_value) not in exported:  # two names of a tied tensor must stay one object
                    exported[id(inner_value)] = self._export_tensor(name, inner_value)
                yield inner_name, exported[id(inner_value)]

    def get_part(self, parameter: torch.Tensor) -> Any:
        """Return this rank's part of a parameter: a `ShardPiece`, or a tensor if all pipeline ranks hold all of it.

        A parameter that does not belong to the model is returned unchanged.
        """
        name = self._map_names().get(id(parameter))
        return parameter if name is None else self._export_tensor(name, parameter)

    def _map_names(self) -> dict[int, str]:
        """Return the name of each parameter of the model, by the parameter's `id`."""
        return {id(parameter): name for name, parameter in self._model.named_parameters()}

    # ---------------------------------------------------------------- optimizers

    @contextmanager
    def expose_state(self, optimizer: torch.optim.Optimizer, group: Collectives) -> Iterator[None]:
        """Return a context in which the optimizer also holds entries for the states of parameters on other stages.

        These entries are `ShardPiece` objects without data. All ranks must enter the context, which runs a collective.

        Args:
            optimizer: Optimizer whose state is replaced until the context exits.
            group: Collectives over the ranks of one pipeline.
        """
        names = self._map_names()
        parameters = [p for param_group in optimizer.param_groups for p in param_group["params"] if id(p) in names]
        original_state = dict(optimizer.state)
        # Low-bit states are exported as float32 values.
        entries = {key: export_state(optimizer, entry) for key, entry in original_state.items()}
        # States of this stage's parameters, by name. Parameters of other stages are on the meta device.
        local_entries = {names[id(p)]: entries[p] for p in parameters if p in entries and not p.is_meta}
        descriptions = {
            name: {key: _describe_value(value) for key, value in entry.items()}
            for name, entry in local_entries.items()
            if isinstance(entry, dict)
        }
        descriptions_by_rank = group.gather_objects(descriptions)
        exposed_state: dict[Any, Any] = {}
        for parameter in parameters:
            name = names[id(parameter)]
            holders = self.holders[name]
            description = descriptions_by_rank[min(holders)].get(name)
            if description is not None:
                entry = local_entries.get(name, {})
                exposed_state[parameter] = {
                    key: self._export_value(value_description, holders, entry.get(key))
                    for key, value_description in description.items()
                }
        parameter_ids = {id(parameter) for parameter in parameters}
        exposed_state |= {key: value for key, value in original_state.items() if id(key) not in parameter_ids}
        try:
            optimizer.state.clear()
            optimizer.state.update(exposed_state)
            yield
        finally:
            optimizer.state.clear()
            optimizer.state.update(original_state)

    def _export_value(self, description: Any, holders: frozenset[int], value: Any) -> Any:
        """Return one value of a parameter's optimizer state for a checkpoint.

        Args:
            description: Description of the value, from the first pipeline rank that holds the parameter.
            holders: Pipeline ranks that hold the parameter.
            value: Value on this rank. None if only other pipeline ranks hold the parameter.

        Returns:
            A `ShardPiece`, or the value itself if it is a scalar or if all pipeline ranks hold all of it.
        """
        if not isinstance(description, TensorSpec):
            return description if value is None else value
        if holders == self._all_pipeline_ranks and not is_dtensor(value):
            return value
        if 0 in description.shape:
            return torch.empty(description.shape, dtype=description.dtype)
        return self._make_piece(description.shape, description.dtype, holders, value)

    def convert_loaded_states(self, optimizer: torch.optim.Optimizer) -> None:
        """Convert the `ShardPiece` objects in loaded optimizer states to tensors.

        States of parameters that only other ranks hold are deleted.
        """
        for parameter in list(optimizer.state):
            if not isinstance(parameter, torch.Tensor):
                continue
            if parameter.is_meta:
                del optimizer.state[parameter]
                continue
            state = optimizer.state[parameter]
            for key, value in state.items() if isinstance(state, dict) else ():
                if isinstance(value, ShardPiece):
                    state[key] = _join_state(value, parameter)


def _join_state(piece: ShardPiece, parameter: torch.Tensor) -> torch.Tensor:
    """Return a loaded optimizer state as a tensor that is sharded like the parameter to which it belongs.

    Args:
        piece: Loaded shard of the state.
        parameter: Parameter on this rank.
    """
    if is_dtensor(parameter):
        return dtensors.assemble_boxes(((box.offsets, box.values) for box in piece.boxes), piece.dtype, parameter)
    values = piece.boxes[0].values if piece.boxes else torch.empty(piece.shape, dtype=piece.dtype)
    return values.to(parameter.device)


def _describe_value(value: Any) -> Any:
    """Return a description of one value in an optimizer state, for ranks of other stages.

    For a tensor with dimensions, it contains only the shape and dtype. Scalars are returned as they are.
    """
    if isinstance(value, torch.Tensor):
        return TensorSpec(tuple(value.shape), value.dtype) if value.ndim else value.detach().cpu()
    return value

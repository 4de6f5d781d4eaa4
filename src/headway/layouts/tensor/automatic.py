"""Derive a tensor-parallel plan from a model's structure, and test it before anything is split.

Modules are visited innermost first, and their linear layers in the order in which they are called. A group consists of
some layers that are split by columns, followed by one that is split by rows. A group is used only if a test on a copy
of the module (`ModuleTrial`) shows that the split module computes the same result. The tests also determine whether
head counts must be divided, and whether tables with a column per head (relative positions) must be split. Layers for
which no test succeeds are not split.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain, combinations, product
from typing import Any, NamedTuple

import torch

from headway.core.config.parallelism import TensorParallelOptions
from headway.core.strategies.blocks import find_parameter_owners
from headway.errors import PrepareError
from headway.layouts.tensor import plans, styles
from headway.layouts.tensor._torch import is_fake
from headway.layouts.tensor.head_counts import COUNTS
from headway.layouts.tensor.module_trial import ModuleRun, ModuleTrial
from headway.layouts.tensor.sequence_split import SequenceSplit
from headway.layouts.tensor.styles import BoundaryLayout
from headway.log import get_logger

_MAX_LINEARS = 16
"""Largest number of linear layers in a module in which groups are searched."""
_MAX_CHOICES = 6
"""Largest number of attributes and parameters of which all combinations are tested."""
_COLUMN_STYLES = {1: "colwise", 2: "packed_colwise", 3: "packed_qkv_colwise"}
"""Style for a layer that is split by columns. The key is the number of matrices that are packed in the layer."""
log = get_logger(__name__)


@dataclass
class SplitGroups:
    """Part of a tensor-parallel plan that covers one or more groups of matrices.

    A group consists of matrices that are split by columns and the matrix after them, which is split by rows.

    Attributes:
        plan: Style of each module or parameter to split, by name.
        divide: Names of attributes, such as head counts, that must be divided by the number of ranks.
        keep: Names of attributes that count heads. Those that are not in `divide` keep their value.
    """

    plan: dict[str, str] = field(default_factory=dict)
    divide: list[str] = field(default_factory=list)
    keep: list[str] = field(default_factory=list)

    def add(self, other: "SplitGroups", prefix: str = "") -> None:
        """Add other groups, with a prefix before all of their names.

        Args:
            other: Groups to add, such as those of a submodule.
            prefix: Prefix of the names, such as "attn." for the groups of the submodule `attn`. Default: "".
        """
        self.plan |= {prefix + name: style for name, style in other.plan.items()}
        self.divide += [name for each in other.divide if (name := prefix + each) not in self.divide]
        self.keep += [name for each in other.keep if (name := prefix + each) not in self.keep]


def complete_plan(
    model: torch.nn.Module, options: TensorParallelOptions, size: int, is_sharded: bool = False
) -> TensorParallelOptions:
    """Return tensor-parallel options with a plan, which is derived from the model's structure if there is none.

    The options are returned unchanged if they or the model have a plan. They are also returned unchanged if a derived
    plan would split less than half of the elements of the model's matrices.

    Args:
        model: Model to split; its parameters may be meta tensors.
        options: User's options.
        size: Number of ranks.
        is_sharded: Whether parameters are afterwards also sharded along their first dimension. Default: False.
    """
    if options.plan is not None or plans.get_model_plan(model):
        return options
    linears = dict(_iterate_linears(model))
    groups, groups_by_key = SplitGroups(), dict[str, SplitGroups]()
    # `_iterate_candidates` reads the plan while it grows, so a layer is only in one group.
    for name, linear_names in _iterate_candidates(model, linears, groups.plan):
        module = model.get_submodule(name)
        if (key := _make_likeness_key(module, linear_names)) not in groups_by_key:
            groups_by_key[key] = _find_groups(module, linear_names, size, is_sharded)
        groups.add(groups_by_key[key], f"{name}." if name else "")
    if not _splits_most_elements(model, linears, groups.plan):
        return options
    if (head := _find_head(model)) is not None:
        groups.plan[head] = "colwise_gather_output"
    names = [*dict(model.named_modules()), *(name for name, _ in model.named_parameters(remove_duplicate=False))]
    attributes = [f"{name}.{key}" if name else key for name, module in model.named_modules() for key in vars(module)]
    kept_counts = [name for name in groups.keep if name not in groups.divide]
    unsplit_linears = [name for name in linears if name not in groups.plan]
    plan = plans.generalize_names(groups.plan, names)
    divide = plans.generalize_names(dict.fromkeys(groups.divide, ""), attributes)
    keep = plans.generalize_names(dict.fromkeys(kept_counts, ""), attributes)
    rest = ", ".join(plans.generalize_names(dict.fromkeys(unsplit_linears, ""), names))
    log.info_once(
        "%s defines no tensor-parallel plan; the plan derived from its structure shards (tp=%d) %s. The rest stays replicated%s",
        type(model).__name__, size, ", ".join(plan), f", including {rest}" if rest else "",
    )  # fmt: skip
    return replace(options, plan=plan, divide=(*options.divide, *divide), keep=(*options.keep, *keep))


def check_blocks(model: torch.nn.Module, model_split: plans.ModelSplit, sequences: SequenceSplit) -> None:
    """Raise an error if a block mixes tokens outside of the modules that get the full sequence.

    This function is called only for plans that `complete_plan` has derived.

    Args:
        model: Model to split.
        model_split: Modules that the plan splits.
        sequences: Stacks of blocks whose activations are sharded along the sequence.

    Raises:
        PrepareError: If a block mixes tokens outside of these modules, or if a copy of the block cannot be called to
            test this.
    """
    tested_keys = set[str]()
    for name in chain.from_iterable(sequences.stacks):
        block, prefix = model.get_submodule(name), f"{name}."
        split_modules = {
            path.removeprefix(prefix): split_module
            for path, split_module in model_split.split_modules.items()
            if path.startswith(prefix)
        }
        colwise = [path for path, each in split_modules.items() if isinstance(each.style, styles.Colwise)]
        key = _make_likeness_key(block, colwise)
        if key in tested_keys:
            continue
        tested_keys.add(key)
        with_shard = [path for path, each in split_modules.items() if each.boundary is BoundaryLayout.SEQUENCE]
        gathered = [path.removeprefix(prefix) for path in sequences.gathered if path.startswith(prefix)]
        trial = ModuleTrial(block, dict.fromkeys([*colwise, *with_shard]), 1)
        if not trial.is_tokenwise(gathered, with_shard):
            raise PrepareError(
                f"sequence_parallel=True: {name!r} ({type(block).__name__}) could not be shown to compute each token by itself "
                "outside its split attention and MLPs; leave the option out, or give a plan"
            )


def _make_likeness_key(module: torch.nn.Module, linear_names: list[str]) -> str:
    """Return a key that is equal for two modules if they differ only in the values of their weights and buffers.

    The positions of the two modules in the model do not matter.

    Args:
        module: Module to describe.
        linear_names: Names of the module's linear layers.
    """
    shapes = [(name, tuple(each.shape)) for name, each in (*module.named_parameters(), *module.named_buffers())]
    settings = [
        (name, key, value) for name, part in module.named_modules() for key, value in vars(part).items()
        if isinstance(value, int | float | str | tuple) and not key.endswith(("idx", "index", "_id"))
    ]  # fmt: skip
    return repr((type(module), linear_names, shapes, settings, [type(part) for part in module.modules()]))


def _iterate_linears(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield (name, module) for each linear layer that tensor parallelism can split.

    Linear layers are `torch.nn.Linear` and transformers' `Conv1D`. For a layer with adapters, the module is the wrapper
    that contains the adapters. These layers are left out: those whose weight is quantized, not floating-point, or shared
    with other modules, those with adapters that cannot be split, and those within a `torch.nn.MultiheadAttention`.
    """
    shared_ids = {id(p) for p, owners in find_parameter_owners(model).values() if len(owners) > 1}
    closed_names: list[str] = []  # modules whose submodules are not visited
    for name, module in model.named_modules():
        if any(name.startswith(f"{closed}.") for closed in closed_names):
            continue
        layer, is_adapted = plans.get_base_layer(module), plans.is_adapted(module)
        # MultiheadAttention reads the weights of its submodules without calling them, so they cannot be split.
        if isinstance(module, torch.nn.MultiheadAttention) or _is_linear(layer) or is_adapted:
            closed_names.append(name)
        if not _is_linear(layer) or (is_adapted and plans.describe_misfit(module, styles.Colwise()) is not None):
            continue
        weight = layer._parameters.get("weight")
        is_plain = type(weight) is torch.nn.Parameter or (weight is not None and is_fake(weight))  # not quantized
        if is_plain and weight.is_floating_point() and id(weight) not in shared_ids:
            yield name, module


def _iterate_candidates(
    model: torch.nn.Module, linears: Mapping[str, torch.nn.Module], plan: Mapping[str, str]
) -> Iterator[tuple[str, list[str]]]:
    """Yield modules whose linear layers might form a group, innermost modules first.

    A group consists of layers that are split by columns and the layer after them, which is split by rows. The modules
    have 2 to 16 linear layers that belong to no group yet. Modules that contain a non-empty `ModuleList` are skipped.

    Args:
        model: Model to split.
        linears: Linear layers by name.
        plan: Plan derived so far, which may grow meanwhile. The layers that it names already belong to a group.

    Yields:
        Pairs of (name of the module, names of its linear layers relative to it).
    """
    for name, module in reversed(list(model.named_modules())):
        prefix = f"{name}." if name else ""
        linear_names = [path for path in linears if path.startswith(prefix) and path not in plan and path != name]
        is_stack = any(isinstance(part, torch.nn.ModuleList) and len(part) for part in module.modules())
        if not is_stack and 2 <= len(linear_names) <= _MAX_LINEARS:
            yield name, [path.removeprefix(prefix) for path in linear_names]


def _find_groups(module: torch.nn.Module, linear_names: list[str], size: int, is_sharded: bool) -> SplitGroups:
    """Return the groups of a module's linear layers that can be split. Names are relative to the module.

    Args:
        module: Module whose layers are tried, in the order in which they are called.
        linear_names: Names of the linear layers.
        size: Number of ranks.
        is_sharded: Whether parameters are afterwards also sharded along their first dimension.
    """
    groups, trial = SplitGroups(), ModuleTrial(module, linear_names, size)
    if not trial.reference_runs:
        return groups
    _, reference = trial.reference_runs[0]
    called_names = [name for name in reference.outputs if name in linear_names]
    start = 0
    while start < len(called_names) - 1:
        for end in range(start + 1, len(called_names)):
            group = _try_group(trial, reference, called_names[start:end], called_names[end], size, is_sharded)
            if group is not None:
                groups.add(group)
                start = end  # the next group begins after this one
                break
        start += 1
    return groups


def _try_group(
    trial: ModuleTrial, reference: ModuleRun, colwise: list[str], rowwise: str, size: int, is_sharded: bool
) -> SplitGroups | None:
    """Return a plan that splits a group of matrices without changing the module's result, or None if there is none.

    Args:
        trial: Copy of the module on which splits are tested.
        reference: Record of a call of the unsplit copy.
        colwise: Names of the matrices to split by columns.
        rowwise: Name of the matrix to split by rows.
        size: Number of ranks.
        is_sharded: Whether parameters are afterwards also sharded along their first dimension.
    """
    layers = {name: plans.get_base_layer(trial.module.get_submodule(name)) for name in (*colwise, rowwise)}
    if any(reference.inputs[rowwise] is reference.inputs[name] for name in colwise):
        return None  # the last matrix does not follow the others, because it has the same input
    inner = styles.num_inputs(layers[rowwise])
    widths = [styles.num_outputs(layers[name]) for name in colwise]
    if any(width % size for width in (inner, *widths)):
        return None
    nums_packed = [_count_packed(width, inner) for width in widths]
    if not any(nums_packed):
        return None
    choices = _list_choices(trial.module, inner, size)
    divisible_counts = [name for name, count in choices.head_counts.items() if count % size == 0]
    # A layer whose width is a multiple of `inner` might pack several matrices, or be one wide matrix. Both are tested.
    for factors in product(*([number, 1] if number > 1 else [1] for number in nums_packed)):
        column_styles = {name: _COLUMN_STYLES[factor] for name, factor in zip(colwise, factors)}
        for chosen in _iterate_subsets([*divisible_counts, *choices.head_tables], choices.other_attributes):
            divide = [name for name in chosen if name not in choices.head_tables]
            tables = [name for name in chosen if name in choices.head_tables]
            plan = column_styles | {rowwise: "rowwise"} | dict.fromkeys(tables, "rowwise")
            with_sharded_input = trial.test_split(plan, divide, rowwise)
            if with_sharded_input is None:
                continue
            keep = list(choices.head_counts)
            if is_sharded and max(factors) > 1 and not styles.is_transposed(layers[colwise[0]]):
                # A packed matrix cannot be split along a dimension that is also sharded. So its outputs are gathered instead.
                gathered = dict.fromkeys(colwise, "colwise_gather_output")
                return SplitGroups({**gathered, rowwise: "rowwise_split_input"}, [], keep)
            plan |= dict.fromkeys(with_sharded_input, "replicated_with_grad_allreduce")
            return SplitGroups(plan, divide, keep)
    return None


def _count_packed(width: int, inner: int) -> int:
    """Return the number of matrices that a layer packs if each of them has `inner` outputs: 1, 2 or 3.

    Return 0 if the layer's width is no such multiple of `inner`.
    """
    return next((number for number in _COLUMN_STYLES if width == number * inner), 0)


class _DivisionChoices(NamedTuple):
    """Attributes and parameters of a module that might have to be divided by the tensor-parallel size.

    Attributes:
        head_counts: Values of attributes that count heads, by name.
        head_tables: Names of parameters with one column per head.
        other_attributes: Names of other integer attributes whose value is the width between the split matrices.
    """

    head_counts: dict[str, int]
    head_tables: list[str]
    other_attributes: list[str]


def _list_choices(module: torch.nn.Module, inner: int, size: int) -> _DivisionChoices:
    """Return a module's attributes and parameters that might have to be divided by the tensor-parallel size.

    Args:
        module: Module with column-parallel linear layers that are followed by a row-parallel one.
        inner: Number of features between the column-parallel layers and the row-parallel layer.
        size: Number of ranks.
    """
    linears: set[str] = set()
    head_counts: dict[str, int] = {}
    other_attributes: list[str] = []
    for name, part in module.named_modules():
        if _is_linear(part):
            linears.add(name)
            continue
        if type(part).__module__.startswith("torch.nn."):  # torch's own modules count no heads
            continue
        for key, value in vars(part).items():
            path = f"{name}.{key}" if name else key
            if not isinstance(value, int) or value <= 1:
                continue
            if COUNTS.fullmatch(key):
                head_counts[path] = value
            elif value == inner:
                other_attributes.append(path)
    divisible_counts = {count for count in head_counts.values() if count % size == 0}
    head_tables = [
        name
        for name, parameter in module.named_parameters()
        if name.rpartition(".")[0] not in linears and parameter.dim() == 2 and parameter.shape[1] in divisible_counts
    ]
    return _DivisionChoices(head_counts, head_tables, other_attributes)


def _iterate_subsets(first: list[str], others: list[str]) -> Iterator[tuple[str, ...]]:
    """Yield combinations of names to divide by the number of ranks, in the order in which to test them.

    Each name belongs to an attribute or a parameter. The first combination contains all names that refer to attention
    heads. The others are all combinations of the first six names in `[*first, *others]`, smallest first.

    Args:
        first: Names that refer to attention heads.
        others: Other names.
    """
    yield tuple(first)
    names = [*first, *others][:_MAX_CHOICES]
    for number in range(len(names) + 1):
        yield from (chosen for chosen in combinations(names, number) if chosen != tuple(first))


def _is_linear(module: torch.nn.Module) -> bool:
    """Whether a module is a `torch.nn.Linear` or transformers' `Conv1D`."""
    return isinstance(module, torch.nn.Linear) or styles.is_transposed(module)


def _splits_most_elements(model: torch.nn.Module, linears: Mapping[str, Any], plan: Mapping[str, str]) -> bool:
    """Whether a plan splits at least half of the elements of the model's matrices.

    Embeddings and matrices tied to them are not counted.

    Args:
        model: Model to split.
        linears: Linear layers by name.
        plan: Style of each linear layer to split, by name.
    """
    embedding_ids = {
        id(p) for module in model.modules() if isinstance(module, torch.nn.Embedding) for p in module.parameters()
    }
    num_all = sum(p.numel() for p in model.parameters() if p.dim() > 1 and id(p) not in embedding_ids)
    num_split = sum(
        p.numel() for name, layer in linears.items() if name in plan for p in layer.parameters() if p.dim() > 1
    )
    return bool(num_split) and 2 * num_split >= num_all


def _find_head(model: torch.nn.Module) -> str | None:
    """Return the name of the model's output head, or None if tensor parallelism cannot split the head.

    The head must be a linear layer whose weight is shared with nothing but plain embeddings.
    """
    head = plans.find_output_head(model)
    if not isinstance(head, torch.nn.Linear):
        return None
    owners_by_parameter = [{module for _, module, _ in owners} for _, owners in find_parameter_owners(model).values()]
    owners_of_head = set().union(*(owners for owners in owners_by_parameter if head in owners))
    for module in owners_of_head - {head}:
        is_plain_embedding = isinstance(module, torch.nn.Embedding) and not module.max_norm and not module.sparse
        if not is_plain_embedding:
            return None
    return next(str(name) for name, module in model.named_modules() if module is head)

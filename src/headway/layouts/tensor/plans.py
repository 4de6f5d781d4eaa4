"""Find the modules, LoRA adapters and sequence regions of a tensor-parallel plan, and check them before any change.

Low-rank adapters (PEFT's LoRA) around split matrices are split with them::

    matrix                 colwise                      rowwise
    input                  replicated                   split
    lora_A                 replicated                   rowwise
    lora_B                 colwise                      replicated
    output                 split (or gathered)          replicated

Dropout on a replicated input draws equal numbers on all ranks. On a split input each rank draws different numbers.

With sequence parallelism, each rank computes on its sequence shard between the split matrices of a stack of blocks.
The first block shards the sequence and the last one gathers it. Within a block, modules with split matrices get the
full sequence and return one term of a sum. Norms and dropouts between these modules compute on shards.
"""

import difflib
import fnmatch
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from headway.core.config.parallelism import STYLES, TensorParallelOptions, describe_unknown_style
from headway.errors import ConfigError, PrepareError
from headway.layouts.adapters import check_adapters, check_added_keys
from headway.layouts.tensor import styles
from headway.layouts.tensor.crossings import SplitAxis, SplitRNG
from headway.layouts.tensor.styles import BoundaryLayout, Colwise, PartialGradients, Rowwise, SplitModule, SplitStyle

_VARIANTS = ("lora_magnitude_vector", "lora_variant", "lora_embedding_A")
"""Attributes of a LoRA layer that have entries only if the layer uses a variant that cannot be split, such as DoRA."""

_WHOLE_ADAPTERS = (
    "Use LoRA or rsLoRA, or one of the layouts fsdp, ddp, ep and pp, which do not split adapters. Or leave the layer out of the "
    "plan (TensorParallelOptions(plan={...})): it stays whole"
)
_PROMPTS = ("prompt_encoder.", "word_embeddings.")
"""Prefixes of the names of parameters that PEFT's prompt tuning adds: the prompts, and an alias of the embeddings."""


def is_adapted(module: torch.nn.Module) -> bool:
    """Whether the module is a PEFT adapter layer that wraps another layer."""
    return isinstance(getattr(module, "base_layer", None), torch.nn.Module)


def get_base_layer(module: torch.nn.Module) -> Any:
    """Return the base layer of a module with LoRA adapters, or the module itself if it has none."""
    return module.base_layer if is_adapted(module) else module


def find_output_head(model: torch.nn.Module) -> Any:
    """Return the layer that computes the logits, or None if the model has no `get_output_embeddings()` method.

    transformers' models define this method. The method can also return None.
    """
    ask: Any = getattr(model, "get_output_embeddings", None)
    return ask() if callable(ask) else None


def list_split_parts(module: torch.nn.Module, style: SplitStyle) -> list[str]:
    """Return the names of the submodules that are split if a layer with LoRA adapters is split.

    These are the base layer and one of the two matrices of each adapter. The names are relative to the layer.

    Args:
        module: Layer with adapters.
        style: Tensor-parallel style of the layer.
    """
    inner = "lora_B" if isinstance(style, Colwise) else "lora_A"
    return ["base_layer", *(f"{inner}.{name}" for name in module.get_submodule(inner)._modules)]


def describe_misfit(module: torch.nn.Module, style: SplitStyle) -> str | None:
    """Return the reason why a style cannot split a layer together with its adapters, or None if it can.

    Args:
        module: Layer with adapters.
        style: Tensor-parallel style of the layer.
    """
    if not isinstance(module._modules.get("lora_A"), torch.nn.ModuleDict):
        return f"tensor parallelism splits no adapters but LoRA and rsLoRA of linear layers. {_WHOLE_ADAPTERS}"
    special = next((name for name in _VARIANTS if len(getattr(module, name, ()))), None)
    if special is not None:
        return f"its adapters are no plain LoRA ({special}). {_WHOLE_ADAPTERS}"
    if hasattr(module, "parameter_name"):
        return f"tensor parallelism does not split LoRA of stacked experts (target_parameters). {_WHOLE_ADAPTERS}"
    if isinstance(style, Colwise | Rowwise):
        return None
    return f"LoRA is split with colwise and rowwise matrices only. {_WHOLE_ADAPTERS}"


class AdaptedCall:
    """Forward hooks that switch RNG states before and after the forward of a split layer with adapters.

    Args:
        style: Style of the layer.
        rng_states: RNG states for replicated and sharded activations.
    """

    def __init__(self, style: SplitStyle, rng_states: SplitRNG) -> None:
        self._style = style
        self._rng_states = rng_states

    def before_forward(self, *_: Any) -> None:
        """Switch to the common RNG state of all ranks if the layer's input is replicated."""
        if self._style.opens:
            self._rng_states.join()

    def after_any(self, module: torch.nn.Module, *_: Any) -> None:
        """Switch to the RNG state that fits the layer's output, which is either sharded or replicated.

        In evaluation mode, the state for sharded outputs is not used. The hook also runs if the forward raised an
        error.
        """
        if self._style.closes:
            self._rng_states.join()
        elif self._style.opens and module.training:
            self._rng_states.part()


@dataclass
class ModelSplit:
    """Modules and parameters that a plan splits, with their styles.

    Attributes:
        sites: Split modules by name.
        parameters: Style of each parameter that the plan names directly, by name.
        foreign: torch's `ParallelStyle` objects, by the name of the module to which each applies.
        adapted: Style of each layer whose adapters are split with it, by the layer's name.
    """

    sites: dict[str, SplitModule] = field(default_factory=dict)
    parameters: dict[str, SplitStyle] = field(default_factory=dict)
    foreign: dict[str, Any] = field(default_factory=dict)
    adapted: dict[str, SplitStyle] = field(default_factory=dict)


def read_plan(model: torch.nn.Module, axis: SplitAxis, options: TensorParallelOptions) -> ModelSplit:
    """Return the modules and parameters that a tensor-parallel plan splits.

    The plan is the one in the options. If they have none, it is the one that the model defines. If the model defines
    none either, the plans of the models inside it are merged.

    Args:
        model: Model to split.
        axis: Mesh axis of tensor parallelism.
        options: User's options.

    Raises:
        ConfigError: If there is no plan, a style is unknown, or the plan names a module twice. Also if a name in the
            options' plan matches nothing, or if no name in the model's own plan matches anything.
        PrepareError: If a style does not fit its module, or if the model has adapters that cannot be split.
    """
    check_adapters(model, "tensor parallelism")
    modules = dict(model.named_modules())
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    plan = options.plan if options.plan is not None else _own_plan(model)
    plan = _rename_below_wrappers(plan, [*modules, *parameters], parameters)
    cuts, chosen = ModelSplit(), dict[str, str]()
    for pattern, style in plan.items():
        found = [name for name in (*modules, *sorted(parameters)) if name and is_match(pattern, name)]
        if not found and options.plan is not None:
            _refuse_pattern(pattern, [*modules, *parameters], model)
        for name in found:
            if name in chosen:
                raise ConfigError(
                    f"the tensor-parallel plan names {name!r} twice, by {chosen[name]!r} and by {pattern!r}; leave one out"
                )
            chosen[name] = pattern
            if not isinstance(style, str):
                _check_foreign(name, style, modules)
                cuts.foreign[name] = style
            elif name in modules:
                _add_sites(cuts, model, name, modules[name], style, axis)
            else:
                cuts.parameters[name] = _parameter_style(name, style)
    if not chosen:
        _check_adapted(model)
        raise ConfigError(
            f"the plan of {type(model).__name__} names only modules that the model does not have: {', '.join(plan)}"
        )
    _check_nesting(cuts)
    check_added_keys(
        model, "Under tensor parallelism, each rank computes only some of the heads, but they are for all heads"
    )
    return cuts


def is_match(pattern: str, name: str) -> bool:
    """Whether the pattern matches the name. A `*` in the pattern matches text within one component, between dots."""
    wanted, parts = pattern.split("."), name.split(".")
    return len(wanted) == len(parts) and all(fnmatch.fnmatchcase(part, want) for part, want in zip(parts, wanted))


def generalize_names(found: Mapping[str, str], known: Iterable[str]) -> dict[str, str]:
    """Merge entries of a dict whose keys differ only in their numbers, by replacing these numbers with `*`.

    For example, "blocks.0.q" becomes "blocks.*.q". The numbers in a key are replaced only if all known names that match
    the resulting pattern have the value of this key.

    Args:
        found: Dict to merge. Its keys are names in a model.
        known: All names of the same sort (modules, parameters or attributes) in the model.
    """
    made: dict[str, str] = {}
    patterns = {name: re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name) for name in found}
    fitting = {pattern: {n for n in known if is_match(pattern, n)} for pattern in dict.fromkeys(patterns.values())}
    for name, value in found.items():
        is_alike = all(found.get(each) == value for each in fitting[patterns[name]])
        made[patterns[name] if is_alike else name] = value
    return made


def list_ancestors(name: str) -> Iterator[str]:
    """Yield the names of the modules that contain the named module, innermost first. The last is "", for the model."""
    while name:
        name = name.rpartition(".")[0]
        yield name


def _rename_below_wrappers(plan: Mapping[str, Any], names: list[str], parameters: Iterable[str]) -> Mapping[str, Any]:
    """Return a plan whose names have the prefix that a wrapper, such as PEFT's, has added to the model's names.

    The plan is returned unchanged if no prefix makes its names match.

    Args:
        plan: Plan whose names have no prefix.
        names: Names of the model's modules and parameters.
        parameters: Names of the model's parameters.
    """
    parameters = [name for name in parameters if not name.startswith(_PROMPTS)]
    prefix, sample = "", next(iter(parameters), "")
    while parameters and all(name.startswith(prefix) for name in parameters):
        moved = {prefix + pattern: style for pattern, style in plan.items()}
        if any(is_match(pattern, name) for pattern in moved for name in names):
            return moved
        prefix += f"{sample.removeprefix(prefix).partition('.')[0]}."
    return plan


def get_model_plan(model: torch.nn.Module) -> Mapping[str, Any]:
    """Return the tensor-parallel plan that the model itself defines, or an empty one if it defines none.

    The plan is in the attribute `tp_plan`, or `_tp_plan` if the first is missing or empty.
    """
    plan = getattr(model, "tp_plan", None) or getattr(model, "_tp_plan", None)
    return plan if isinstance(plan, Mapping) else {}


def _join_plans(model: torch.nn.Module) -> dict[str, Any]:
    """Merge the tensor-parallel plans of the models inside a model, for example of a base model under a custom head.

    A plan inside a model that has a plan itself is ignored.

    Args:
        model: Model that has no plan of its own.

    Returns:
        Style by name. Each name in an inner model's plan gets the prefix of that model's name. Empty if no inner model
        has a plan.
    """
    joined: dict[str, Any] = {}
    owners: list[str] = []
    for name, module in model.named_modules():  # a module comes before its submodules
        if any(name.startswith(f"{owner}.") for owner in owners) or not (plan := get_model_plan(module)):
            continue
        owners.append(name)
        joined |= {f"{name}.{pattern}": style for pattern, style in plan.items()}
    return joined


def _own_plan(model: torch.nn.Module) -> Mapping[str, Any]:
    if not (plan := get_model_plan(model) or _join_plans(model)):
        _check_adapted(model)
        raise ConfigError(
            f"{type(model).__name__} has no tensor-parallel plan of its own, and its structure gives none that splits half of its "
            "matrices (linear layers that follow each other in attention and MLPs); give one by module names, as in "
            'TensorParallelOptions(plan={"blocks.*.attn.q": "colwise", "blocks.*.attn.out": "rowwise"})'
        )
    if packed := list_faults(plan):
        raise PrepareError(
            f"the plan of {type(model).__name__} splits {packed[0]!r} as one matrix ('colwise'), but it packs two, gate and up, and "
            "each rank would compute with mismatched halves; correct it: "
            'TensorParallelOptions(plan={**model.tp_plan, name: "packed_colwise"})'
        )
    return plan


def _check_adapted(model: torch.nn.Module) -> None:
    """Raise an error if the model has adapters that tensor parallelism cannot split.

    Raises:
        PrepareError: If such adapters exist. The message names a layer that has them.
    """
    adapted = (
        (name, describe_misfit(module, Colwise())) for name, module in model.named_modules() if is_adapted(module)
    )
    name, reason = next(((name, reason) for name, reason in adapted if reason is not None), ("", None))
    if reason is not None:
        raise PrepareError(f"tensor parallelism cannot split {name!r} of {type(model).__name__}: {reason}")


def list_faults(plan: Mapping[str, Any]) -> list[str]:
    """Return the names of parameters to which a model's own plan is known to give a wrong style.

    The wrong style is "colwise" for `gate_up_proj` of stacked experts. transformers 5.23 has two models with such plans
    (Inkling).
    """
    return [name for name, style in plan.items() if style == "colwise" and name.endswith("experts.gate_up_proj")]


def _refuse_pattern(pattern: str, names: list[str], model: torch.nn.Module) -> None:
    near = difflib.get_close_matches(pattern, [name for name in names if name], n=3, cutoff=0.4)
    raise ConfigError(
        f"the tensor-parallel plan names {pattern!r}, but {type(model).__name__} has no such module or parameter"
        + (f"; similar names: {', '.join(near)}" if near else "")
        + ". '*' matches one component of a name, between dots"
    )


def _check_foreign(name: str, style: Any, modules: Mapping[str, torch.nn.Module]) -> None:
    if not callable(getattr(style, "_apply", None)):
        raise ConfigError(
            f"the tensor-parallel plan gives {name!r} a {type(style).__name__}; allowed: the names {', '.join(STYLES)}, or a "
            "ParallelStyle object of torch.distributed.tensor.parallel"
        )
    if name not in modules:
        raise ConfigError(f"the plan gives the parameter {name!r} a ParallelStyle object; those are for modules")


def _add_sites(
    cuts: ModelSplit, model: torch.nn.Module, name: str, module: torch.nn.Module, style: str, axis: SplitAxis
) -> None:
    """Add a module to the modules that a plan splits.

    If the module has LoRA adapters, or copies that PEFT trains (`modules_to_save`), add its split submodules instead.

    Args:
        cuts: Split modules, to which the module is added.
        model: Model to split.
        name: Name of the module.
        module: Module to add.
        style: Name of the module's tensor-parallel style.
        axis: Mesh axis of tensor parallelism.
    """
    copies = getattr(module, "modules_to_save", None)
    if isinstance(copies, torch.nn.ModuleDict):  # PEFT trains a copy of the module, and keeps the original
        for part in ("original_module", *(f"modules_to_save.{key}" for key in copies)):
            cuts.sites[f"{name}.{part}"] = _make_site(model, name, module.get_submodule(part), style, axis)
        return
    if not is_adapted(module):
        cuts.sites[name] = _make_site(model, name, module, style, axis)
        return
    made = styles.make_style(style)
    if (reason := describe_misfit(module, made)) is not None:
        raise PrepareError(f"tensor parallelism cannot split {name!r} ({type(module).__name__}): {reason}")
    cuts.adapted[name] = made
    for part in list_split_parts(module, made):
        cuts.sites[f"{name}.{part}"] = _make_site(model, name, module.get_submodule(part), style, axis)


def _make_site(model: torch.nn.Module, name: str, module: torch.nn.Module, style: str, axis: SplitAxis) -> SplitModule:
    if style not in STYLES:
        raise ConfigError(describe_unknown_style(name, style))
    if styles.is_quantized(module):
        raise PrepareError(
            f"tensor parallelism cannot split {name!r} ({type(module).__name__}), because its weight is quantized. For a quantized "
            "base, use one of the layouts fsdp, ddp and pp. Or leave the layer out of the plan (TensorParallelOptions(plan={...})): "
            "it stays whole"
        )
    site = SplitModule(module, name, axis, styles.make_style(style, module))
    if (reason := site.style.describe_misfit(module, axis.size)) is not None:
        raise PrepareError(
            f"the tensor-parallel style {style!r} does not fit {name!r} ({type(module).__name__}): {reason}. Choose another style, "
            "or leave the module out of the plan, so that it stays whole"
        )
    if style == "mla_kv_a_proj":
        site.facts["qk_rope_head_dim"] = _find_integer(model, name, "qk_rope_head_dim")
    return site


def _find_integer(model: torch.nn.Module, name: str, fact: str) -> int:
    for around in list_ancestors(name):
        module = model.get_submodule(around)
        for holder in (module, getattr(module, "config", None)):
            if isinstance(value := getattr(holder, fact, None), int):
                return value
    raise PrepareError(
        f"the style of {name!r} needs {fact}, which neither the modules around it nor its configuration have"
    )


def _parameter_style(name: str, style: str) -> SplitStyle:
    if style not in STYLES:
        raise ConfigError(describe_unknown_style(name, style))
    made = styles.make_style(style)
    if name.endswith("bias") and isinstance(made, styles.Rowwise):
        raise PrepareError(
            f"the plan gives the bias {name!r} the style {style!r}: each rank would add it, so it would count as many "
            "times as there are ranks; leave it out of the plan"
        )
    return made


def _check_nesting(cuts: ModelSplit) -> None:
    """Raise an error if a plan splits a parameter twice, directly or through a `ParallelStyle` of an enclosing module.

    Raises:
        ConfigError: If the plan splits a module or parameter twice.
    """
    for name in cuts.parameters:
        owner, _, key = name.rpartition(".")
        site = cuts.sites.get(owner)
        if owner in cuts.foreign or (
            site is not None and site.style.find_shard_dim(key, torch.empty(0, 0)) is not None
        ):
            raise ConfigError(
                f"the tensor-parallel plan splits {name!r} twice: by its own name and by that of {owner!r}"
            )
    for name in (*cuts.sites, *cuts.foreign):
        for around in list_ancestors(name):
            # PrepareModuleInput and PrepareModuleOutput change only activations; other styles split parameters.
            if around in cuts.foreign and not type(cuts.foreign[around]).__name__.startswith("PrepareModule"):
                raise ConfigError(
                    f"the tensor-parallel plan splits {name!r} twice: a ParallelStyle splits {around!r} around it"
                )


@dataclass
class SequenceRegion:
    """Part of a model whose activations are sharded along the sequence.

    Attributes:
        stacks: For each stack of blocks, the names of its blocks in order. An encoder and a decoder are two stacks.
        gathered: Names of modules within the blocks that get the full sequence.
        partial: Names of modules whose parameters act only on a sequence shard.
    """

    stacks: list[list[str]]
    gathered: list[str] = field(default_factory=list)
    partial: set[str] = field(default_factory=set)


def arrange_sequences(model: torch.nn.Module, cuts: ModelSplit) -> SequenceRegion:
    """Return the part of a model whose activations sequence parallelism shards, and configure its split modules.

    The `crossing` of each split module in a block is set to the layout of the activations at its input and output.

    Args:
        model: Model to split.
        cuts: Modules that the plan splits.

    Raises:
        PrepareError: If the model has no stack of blocks with split matrices, or if a block contains a module that
            cannot compute on sequence shards. Also if the plan contains `ParallelStyle` objects.
    """
    if cuts.foreign:
        raise PrepareError(
            "sequence_parallel=True works only with styles that are given by name. In a plan of ParallelStyle objects, torch's "
            "SequenceParallel and PrepareModuleInput split the sequences. Leave the option out"
        )
    region = SequenceRegion(_find_stacks(model, cuts))
    for name in (name for stack in region.stacks for name in stack):
        _arrange_within(name, model.get_submodule(name), cuts, region)
        rows = [
            path for path, site in cuts.sites.items() if path.startswith(f"{name}.") and isinstance(site.style, Rowwise)
        ]
        inside = [path for path in region.gathered if path.startswith(f"{name}.")]
        alone = [path for path in inside if not any(row.startswith(f"{path}.") for row in rows)]
        if alone and all(any(row.startswith(f"{path}.") for path in inside) for row in rows):
            raise PrepareError(
                f"sequence_parallel=True: {alone[0]!r} has colwise matrices, but no rowwise matrix after them"
            )
    return region


def _arrange_within(name: str, module: torch.nn.Module, cuts: ModelSplit, region: SequenceRegion) -> None:
    """Add a module and its children to a sequence region. The module's input must be a sequence shard.

    Args:
        name: Name of the module.
        module: Block, or module within a block, to add.
        cuts: Modules that the plan splits.
        region: Region to which the module is added.

    Raises:
        PrepareError: If the module cannot compute on sequence shards.
    """
    region.partial.add(name)
    for child_name, child in module.named_children():
        _arrange_child(f"{name}.{child_name}", child, cuts, region)


def _find_stacks(model: torch.nn.Module, cuts: ModelSplit) -> list[list[str]]:
    rows = [name for name, site in cuts.sites.items() if isinstance(site.style, Rowwise)]
    found: list[list[str]] = []
    for name, module in model.named_modules():
        if not isinstance(module, torch.nn.ModuleList) or len(module) == 0:
            continue
        blocks = [f"{name}.{index}" for index in range(len(module))]
        is_within = any(block.startswith(f"{outer}.") for outers in found for outer in outers for block in blocks)
        if not is_within and all(any(row.startswith(f"{block}.") for row in rows) for block in blocks):
            found.append(blocks)
    if not found:
        raise PrepareError(
            f"sequence_parallel=True needs a ModuleList of blocks that each have a rowwise matrix, but {type(model).__name__} "
            "has none with this plan; leave the option out, or give torch's ParallelStyle objects"
        )
    return found


def _arrange_child(name: str, child: torch.nn.Module, cuts: ModelSplit, region: SequenceRegion) -> None:
    inside = {path: site for path, site in cuts.sites.items() if path == name or path.startswith(f"{name}.")}
    odd = [path for path, site in inside.items() if not _is_known(site)]
    for path in (path for path in cuts.parameters if path.startswith(f"{name}.")):
        owner = child.get_submodule(path.rpartition(".")[0].removeprefix(name).removeprefix("."))
        odd += [] if isinstance(owner, torch.nn.Embedding) else [path]  # a table with a column per head
    if odd:
        raise PrepareError(
            f"sequence_parallel=True supports the styles colwise, packed_colwise, rowwise and replicated_with_grad_allreduce within "
            f"blocks, but the plan gives {odd[0]!r} another; leave the option out"
        )
    cutting = {path: site for path, site in inside.items() if not isinstance(site.style, PartialGradients)}
    if name in cutting:
        cutting[name].crossing = BoundaryLayout.SEQUENCE
        return
    if not cutting:
        region.partial.update(f"{name}.{path}" if path else name for path, _ in child.named_modules())
        return
    whole = [
        (full, type(module).__name__)
        for path, module in child.named_modules()
        for full in [f"{name}.{path}" if path else name]
        if full not in inside
        and any(f"{full}.{key}" not in cuts.parameters for key, _ in module.named_parameters(recurse=False))
    ]
    columns = [path for path, site in cutting.items() if isinstance(site.style, Colwise)]
    calls_them = any(path.rpartition(".")[0] == name for path in columns)
    if not calls_them and (whole or not columns or isinstance(child, torch.nn.ModuleList)):
        _arrange_within(name, child, cuts, region)
        return
    if whole:
        raise PrepareError(
            f"sequence_parallel=True: {whole[0][0]!r} ({whole[0][1]}) stays whole among split matrices of {name!r}, where its "
            "gradient would be counted once for each rank; split it, or leave the option out"
        )
    region.gathered.append(name)
    for site in cutting.values():
        site.crossing = BoundaryLayout.SEQUENCE if isinstance(site.style, Rowwise) else BoundaryLayout.GATHERED


def _is_known(site: SplitModule) -> bool:
    style = site.style
    if isinstance(style, Colwise):
        return not style.is_gathered
    return isinstance(style, PartialGradients) or (isinstance(style, Rowwise) and not style.is_split)

"""From a tensor-parallel plan to what it names, adapters and the regions of sequence parallelism; checked before any change.

Low-rank adapters (peft's LoRA) around matrices that are split: which of their own matrices are split with these.

::

    matrix                 colwise                      rowwise
    input                  whole                        cut
    lora_A                 whole                        rowwise
    lora_B                 colwise                      whole
    output                 cut (or gathered)            whole

Dropout on the input draws as the input is: the same numbers on all ranks where it is whole.

Sequence parallelism: between the matrices of a stack of blocks, each rank computes its part of the sequence.

The first block cuts the sequence and the last one joins it. Within a block, what holds cut matrices gets the whole
sequence and gives back a part of the sum; norms and dropouts between work on parts.
"""

import difflib
import fnmatch
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from headway.config.parallelism import STYLES, TensorParallelOptions, unknown_style
from headway.errors import ConfigError, PrepareError
from headway.strategies.tensor import styles
from headway.strategies.tensor.crossings import SplitAxis, SplitRNG
from headway.strategies.tensor.styles import BoundaryLayout, Colwise, PartialGradients, Rowwise, SplitModule, SplitStyle

_VARIANTS = ("lora_magnitude_vector", "lora_variant", "lora_embedding_A")


def is_adapted(module: torch.nn.Module) -> bool:
    """Is it a layer of peft's around another one?"""
    return isinstance(getattr(module, "base_layer", None), torch.nn.Module)


def layer_of(module: torch.nn.Module) -> Any:
    """The layer itself, where it has adapters around it."""
    return module.base_layer if is_adapted(module) else module


def output_head(model: torch.nn.Module) -> Any:
    """The layer that makes the logits, as transformers' models tell it; None where they tell of none."""
    ask: Any = getattr(model, "get_output_embeddings", None)
    return ask() if callable(ask) else None


def parts(module: torch.nn.Module, style: SplitStyle) -> list[str]:
    """The modules within that are split as the layer is: names below it."""
    inner = "lora_B" if isinstance(style, Colwise) else "lora_A"
    return ["base_layer", *(f"{inner}.{name}" for name in module.get_submodule(inner)._modules)]


def misfit(module: torch.nn.Module, style: SplitStyle) -> str | None:
    """Why the layer and its adapters cannot be split so; None: they can."""
    if not isinstance(module._modules.get("lora_A"), torch.nn.ModuleDict):
        return "of peft's adapters, only LoRA can be split"
    special = next((name for name in _VARIANTS if len(getattr(module, name, ()))), None)
    if special is not None:
        return f"its adapters are no plain LoRA ({special})"
    return None if isinstance(style, Colwise | Rowwise) else "LoRA is split with colwise and rowwise matrices only"


class AdaptedCall:
    """Generators around a layer with adapters.

    Args:
        style: of the layer.
        rng_states: of random numbers.
    """

    def __init__(self, style: SplitStyle, rng_states: SplitRNG) -> None:
        self._style, self._rng_states = style, rng_states

    def before(self, *_: Any) -> None:
        """Its input is whole, unless the style says otherwise."""
        if self._style.opens:
            self._rng_states.join()

    def after_any(self, module: torch.nn.Module, *_: Any) -> None:
        """However the forward has ended."""
        if self._style.closes:
            self._rng_states.join()
        elif self._style.opens and module.training:
            self._rng_states.part()


@dataclass
class ModelSplit:
    """What a plan does to a model.

    Attributes:
        sites: modules by name.
        parameters: styles of bare parameters by name.
        foreign: torch's own ParallelStyle objects by the name of their module.
        adapted: layers with adapters around modules that are cut, by name.
    """

    sites: dict[str, SplitModule] = field(default_factory=dict)
    parameters: dict[str, SplitStyle] = field(default_factory=dict)
    foreign: dict[str, Any] = field(default_factory=dict)
    adapted: dict[str, SplitStyle] = field(default_factory=dict)


def read(model: torch.nn.Module, axis: SplitAxis, options: TensorParallelOptions) -> ModelSplit:
    """What the options, or the model's own plan, do to the model.

    Raises:
        ConfigError: no plan; names that fit nothing; unknown styles; a module named twice.
        PrepareError: a style that does not fit its module.
    """
    modules = dict(model.named_modules())
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    plan = options.plan if options.plan is not None else _own_plan(model)
    plan = _below_wrappers(plan, [*modules, *parameters], parameters)
    cuts, chosen = ModelSplit(), dict[str, str]()
    for pattern, style in plan.items():
        found = [name for name in (*modules, *sorted(parameters)) if name and fits(pattern, name)]
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
        raise ConfigError(
            f"the plan of {type(model).__name__} names only modules that the model does not have: {', '.join(plan)}"
        )
    _check_nesting(cuts)
    return cuts


def fits(pattern: str, name: str) -> bool:
    """Does the pattern name this? `*` stands for one part between dots."""
    wanted, parts = pattern.split("."), name.split(".")
    return len(wanted) == len(parts) and all(fnmatch.fnmatchcase(part, want) for part, want in zip(parts, wanted))


def starred(found: Mapping[str, str], known: Iterable[str]) -> dict[str, str]:
    """The same with `*` for numbers in names, where all known names that fit have the same value."""
    made: dict[str, str] = {}
    patterns = {name: re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name) for name in found}
    fitting = {pattern: {n for n in known if fits(pattern, n)} for pattern in dict.fromkeys(patterns.values())}
    for name, value in found.items():
        is_alike = all(found.get(each) == value for each in fitting[patterns[name]])
        made[patterns[name] if is_alike else name] = value
    return made


def ancestors(name: str) -> Iterator[str]:
    """The names of the modules around this one, the nearest first."""
    while name:
        name = name.rpartition(".")[0]
        yield name


def _below_wrappers(plan: Mapping[str, Any], names: list[str], parameters: Iterable[str]) -> Mapping[str, Any]:
    """The plan by the model's names, where it was written for a model that something else, such as peft, wraps by now."""
    prefix, sample = "", next(iter(parameters), "")
    while all(name.startswith(prefix) for name in parameters):
        moved = {prefix + pattern: style for pattern, style in plan.items()}
        if any(fits(pattern, name) for pattern in moved for name in names):
            return moved
        prefix += f"{sample.removeprefix(prefix).partition('.')[0]}."
    return plan


def own(model: torch.nn.Module) -> Mapping[str, Any]:
    """The plan that the model has itself; empty: none."""
    plan = getattr(model, "tp_plan", None) or getattr(model, "_tp_plan", None)
    return plan if isinstance(plan, Mapping) else {}


def _own_plan(model: torch.nn.Module) -> Mapping[str, Any]:
    if not (plan := own(model)):
        raise ConfigError(
            f"{type(model).__name__} has no tensor-parallel plan of its own, and its structure gives none that splits half of its "
            "matrices (linear layers that follow each other in attention and MLPs); give one by module names, as in "
            'TensorParallelOptions(plan={"blocks.*.attn.q": "colwise", "blocks.*.attn.out": "rowwise"})'
        )
    if packed := faults(plan):
        raise PrepareError(
            f"the plan of {type(model).__name__} splits {packed[0]!r} as one matrix ('colwise'), but it packs two, gate and up, and "
            "each rank would compute with mismatched halves; correct it: "
            'TensorParallelOptions(plan={**model.tp_plan, name: "packed_colwise"})'
        )
    return plan


def faults(plan: Mapping[str, Any]) -> list[str]:
    """Names in a model's own plan that would compute something else: transformers 5.23 has two such plans (Inkling)."""
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
    """The module, or what takes its place where it has adapters."""
    if not is_adapted(module):
        cuts.sites[name] = _site(model, name, module, style, axis)
        return
    made = styles.make(style)
    if (reason := misfit(module, made)) is not None:
        raise PrepareError(
            f"tensor parallelism cannot split {name!r} ({type(module).__name__}): {reason}; leave it out of the plan"
        )
    cuts.adapted[name] = made
    for part in parts(module, made):
        cuts.sites[f"{name}.{part}"] = _site(model, name, module.get_submodule(part), style, axis)


def _site(model: torch.nn.Module, name: str, module: torch.nn.Module, style: str, axis: SplitAxis) -> SplitModule:
    if style not in STYLES:
        raise ConfigError(unknown_style(name, style))
    site = SplitModule(module, name, axis, styles.make(style, module))
    if (reason := site.style.misfit(module, axis.size)) is not None:
        raise PrepareError(
            f"the tensor-parallel style {style!r} does not fit {name!r} ({type(module).__name__}): {reason}; choose another "
            "style, or leave the module out of the plan: it stays whole"
        )
    if style == "mla_kv_a_proj":
        site.facts["qk_rope_head_dim"] = _fact(model, name, "qk_rope_head_dim")
    return site


def _fact(model: torch.nn.Module, name: str, fact: str) -> int:
    for around in ancestors(name):
        module = model.get_submodule(around)
        for holder in (module, getattr(module, "config", None)):
            if isinstance(value := getattr(holder, fact, None), int):
                return value
    raise PrepareError(
        f"the style of {name!r} needs {fact}, which neither the modules around it nor its configuration have"
    )


def _parameter_style(name: str, style: str) -> SplitStyle:
    if style not in STYLES:
        raise ConfigError(unknown_style(name, style))
    made = styles.make(style)
    if name.endswith("bias") and isinstance(made, styles.Rowwise):
        raise PrepareError(
            f"the plan gives the bias {name!r} the style {style!r}: each rank would add it, so it would count as many "
            "times as there are ranks; leave it out of the plan"
        )
    return made


def _check_nesting(cuts: ModelSplit) -> None:
    """A module within one that torch's style cuts is torch's; two styles on one parameter contradict each other."""
    for name in cuts.parameters:
        owner, _, key = name.rpartition(".")
        site = cuts.sites.get(owner)
        if owner in cuts.foreign or (site is not None and site.style.dim(key, torch.empty(0, 0)) is not None):
            raise ConfigError(
                f"the tensor-parallel plan splits {name!r} twice: by its own name and by that of {owner!r}"
            )
    for name in (*cuts.sites, *cuts.foreign):
        for around in ancestors(name):
            # PrepareModuleInput and its like change arguments alone; others cut what they are given.
            if around in cuts.foreign and not type(cuts.foreign[around]).__name__.startswith("PrepareModule"):
                raise ConfigError(
                    f"the tensor-parallel plan splits {name!r} twice: a ParallelStyle splits {around!r} around it"
                )


@dataclass
class SequenceRegion:
    """Where the sequence is cut.

    Attributes:
        stacks: the names of blocks, in order; an encoder and a decoder are two stacks.
        gathered: modules within them that get the whole sequence.
        partial: modules whose parameters see a part of it.
    """

    stacks: list[list[str]]
    gathered: list[str] = field(default_factory=list)
    partial: set[str] = field(default_factory=set)


def arrange(model: torch.nn.Module, cuts: ModelSplit) -> SequenceRegion:
    """Find the stacks of blocks, and tell their sites what they are given.

    Raises:
        PrepareError: there is no stack, or one holds something that cannot compute so.
    """
    if cuts.foreign:
        raise PrepareError(
            "sequence_parallel=True works with styles given by name; a plan of ParallelStyle objects says itself where "
            "sequences are split (torch's SequenceParallel and PrepareModuleInput): leave the option out"
        )
    region = SequenceRegion(_stacks(model, cuts))
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
    """A module that is given a part of the sequence, and what it holds."""
    region.partial.add(name)
    for child_name, child in module.named_children():
        _arrange_child(f"{name}.{child_name}", child, cuts, region)


def _stacks(model: torch.nn.Module, cuts: ModelSplit) -> list[list[str]]:
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
        odd += [] if isinstance(owner, torch.nn.Embedding) else [path]  # a table of heads, within an attention
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

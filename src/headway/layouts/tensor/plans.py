"""Find the modules and LoRA adapters that a tensor-parallel plan splits, and check them before any change.

Low-rank adapters (PEFT's LoRA) around split matrices are split with them::

    matrix                 colwise                      rowwise
    input                  replicated                   split
    lora_A                 replicated                   rowwise
    lora_B                 colwise                      replicated
    output                 split (or gathered)          replicated

Dropout on a replicated input draws equal numbers on all ranks. On a split input each rank draws different numbers.
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
from headway.layouts.tensor.crossings import SplitAxis
from headway.layouts.tensor.styles import Colwise, Rowwise, SplitModule, SplitStyle

_VARIANTS = ("lora_magnitude_vector", "lora_variant", "lora_embedding_A")
"""Attributes of a LoRA layer that have entries only if the layer uses a variant that cannot be split, such as DoRA."""

_ADAPTER_ADVICE = (
    "Use LoRA or rsLoRA, or one of the layouts fsdp, ddp, ep and pp, which do not split adapters. Or leave the layer out of the "
    "plan (TensorParallelOptions(plan={...})): it stays replicated"
)
_PROMPTS = ("prompt_encoder.", "word_embeddings.")
"""Prefixes of the names of parameters that PEFT's prompt tuning adds: the prompts, and an alias of the embeddings."""


@dataclass
class ModelSplit:
    """Modules and parameters that a plan splits, with their styles.

    Attributes:
        split_modules: Split modules by name. For a layer with adapters, these are its split submodules.
        parameters: Style of each parameter that the plan names directly, by name.
        torch_styles: torch's `ParallelStyle` objects, by the name of the module to which each applies.
        adapted_styles: Style of each layer whose adapters are split with it, by the layer's name.
    """

    split_modules: dict[str, SplitModule] = field(default_factory=dict)
    parameters: dict[str, SplitStyle] = field(default_factory=dict)
    torch_styles: dict[str, Any] = field(default_factory=dict)
    adapted_styles: dict[str, SplitStyle] = field(default_factory=dict)


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
    unprefixed_plan = options.plan if options.plan is not None else _find_own_plan(model)
    plan = _rename_below_wrappers(unprefixed_plan, [*modules, *parameters], parameters)
    model_split, pattern_by_name = ModelSplit(), dict[str, str]()
    for pattern, style in plan.items():
        names = [name for name in (*modules, *sorted(parameters)) if name and is_match(pattern, name)]
        if not names and options.plan is not None:
            _raise_without_match(pattern, [*modules, *parameters], model)
        for name in names:
            if name in pattern_by_name:
                raise ConfigError(
                    f"the tensor-parallel plan names {name!r} twice, by {pattern_by_name[name]!r} and by {pattern!r}; leave one out"
                )
            pattern_by_name[name] = pattern
            if not isinstance(style, str):
                _check_torch_style(name, style, modules)
                model_split.torch_styles[name] = style
            elif style not in STYLES:
                raise ConfigError(describe_unknown_style(name, style))
            elif name in modules:
                _add_split_modules(model_split, model, name, modules[name], style, axis)
            else:
                model_split.parameters[name] = _make_parameter_style(name, style)
    if not pattern_by_name:
        _check_adapted(model)
        raise ConfigError(
            f"the plan of {type(model).__name__} names only modules that the model does not have: {', '.join(plan)}"
        )
    _check_nesting(model_split)
    check_added_keys(
        model, "Under tensor parallelism, each rank computes only some of the heads, but they are for all heads"
    )
    return model_split


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
    get_output_embeddings: Any = getattr(model, "get_output_embeddings", None)
    return get_output_embeddings() if callable(get_output_embeddings) else None


def list_split_parts(module: torch.nn.Module, style: SplitStyle) -> list[str]:
    """Return the names of the submodules that are split if a layer with LoRA adapters is split.

    These are the base layer and one of the two matrices of each adapter. The names are relative to the layer.

    Args:
        module: Layer with adapters.
        style: Tensor-parallel style of the layer.
    """
    matrix = "lora_B" if isinstance(style, Colwise) else "lora_A"
    return ["base_layer", *(f"{matrix}.{adapter}" for adapter in module.get_submodule(matrix)._modules)]


def describe_misfit(module: torch.nn.Module, style: SplitStyle) -> str | None:
    """Return the reason why a style cannot split a layer together with its adapters, or None if it can.

    Args:
        module: Layer with adapters.
        style: Tensor-parallel style of the layer.
    """
    if not isinstance(module._modules.get("lora_A"), torch.nn.ModuleDict):
        return f"tensor parallelism splits no adapters but LoRA and rsLoRA of linear layers. {_ADAPTER_ADVICE}"
    variant = next((name for name in _VARIANTS if len(getattr(module, name, ()))), None)
    if variant is not None:
        return f"its adapters are no plain LoRA ({variant}). {_ADAPTER_ADVICE}"
    if hasattr(module, "parameter_name"):
        return f"tensor parallelism does not split LoRA of stacked experts (target_parameters). {_ADAPTER_ADVICE}"
    if isinstance(style, Colwise | Rowwise):
        return None
    return f"LoRA is split with colwise and rowwise matrices only. {_ADAPTER_ADVICE}"


def list_matching_patterns(model: torch.nn.Module, plan: Mapping[str, Any]) -> set[str]:
    """Return the names and patterns of a plan that match a module or parameter of a model.

    Args:
        model: Model, which may be wrapped, for example by PEFT.
        plan: Plan of the user's options.
    """
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    names = [name for name in (*dict(model.named_modules()), *parameters) if name]
    prefixed_patterns = _rename_below_wrappers(plan, names, parameters)
    return {
        pattern
        for pattern, prefixed in zip(plan, prefixed_patterns, strict=True)
        if any(is_match(prefixed, name) for name in names)
    }


def is_match(pattern: str, name: str) -> bool:
    """Whether the pattern matches the name. A `*` in the pattern matches text within one component, between dots."""
    patterns, components = pattern.split("."), name.split(".")
    return len(patterns) == len(components) and all(map(fnmatch.fnmatchcase, components, patterns))


def generalize_names(values: Mapping[str, str], all_names: Iterable[str]) -> dict[str, str]:
    """Merge entries of a dict whose keys differ only in their numbers, by replacing these numbers with `*`.

    For example, "blocks.0.q" becomes "blocks.*.q". The numbers in a key are replaced only if all known names that match
    the resulting pattern have the value of this key.

    Args:
        values: Dict to merge. Its keys are names in a model.
        all_names: All names of the same sort (modules, parameters or attributes) in the model.
    """
    merged: dict[str, str] = {}
    patterns = {name: re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name) for name in values}
    matches = {
        pattern: {name for name in all_names if is_match(pattern, name)} for pattern in dict.fromkeys(patterns.values())
    }
    for name, value in values.items():
        pattern = patterns[name]
        has_equal_values = all(values.get(match) == value for match in matches[pattern])
        merged[pattern if has_equal_values else name] = value
    return merged


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
    wrapped_parameters = [name for name in parameters if not name.startswith(_PROMPTS)]
    prefix, sample = "", next(iter(wrapped_parameters), "")
    # Extend the prefix by one component of the names at a time, as long as all parameters have it.
    while wrapped_parameters and all(name.startswith(prefix) for name in wrapped_parameters):
        prefixed_plan = {prefix + pattern: style for pattern, style in plan.items()}
        if any(is_match(pattern, name) for pattern in prefixed_plan for name in names):
            return prefixed_plan
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


def _find_own_plan(model: torch.nn.Module) -> Mapping[str, Any]:
    """Return the plan that the model defines, or else the merged plans of the models inside it.

    Raises:
        ConfigError: If no plan is defined.
        PrepareError: If the model has adapters that cannot be split, or if its plan is known to be wrong.
    """
    if not (plan := get_model_plan(model) or _join_plans(model)):
        _check_adapted(model)
        raise ConfigError(
            f"{type(model).__name__} has no tensor-parallel plan of its own, and its structure gives none that splits half of its "
            "matrices (linear layers that follow each other in attention and MLPs); give one by module names, as in "
            'TensorParallelOptions(plan={"blocks.*.attn.q": "colwise", "blocks.*.attn.out": "rowwise"})'
        )
    if faulty := list_faults(plan):
        raise PrepareError(
            f"the plan of {type(model).__name__} splits {faulty[0]!r} as one matrix ('colwise'), but it packs two, gate and up, and "
            "each rank would compute with mismatched halves; correct it: "
            'TensorParallelOptions(plan={**model.tp_plan, name: "packed_colwise"})'
        )
    return plan


def _check_adapted(model: torch.nn.Module) -> None:
    """Raise an error if the model has adapters that tensor parallelism cannot split.

    Raises:
        PrepareError: If such adapters exist. The message names a layer that has them.
    """
    for name, module in model.named_modules():
        if is_adapted(module) and (reason := describe_misfit(module, Colwise())) is not None:
            raise PrepareError(f"tensor parallelism cannot split {name!r} of {type(model).__name__}: {reason}")


def list_faults(plan: Mapping[str, Any]) -> list[str]:
    """Return the names of parameters to which a model's own plan is known to give a wrong style.

    The wrong style is "colwise" for `gate_up_proj` of stacked experts. transformers 5.23 has two models with such plans
    (Inkling).
    """
    return [name for name, style in plan.items() if style == "colwise" and name.endswith("experts.gate_up_proj")]


def _raise_without_match(pattern: str, names: list[str], model: torch.nn.Module) -> None:
    """Raise `ConfigError` for a pattern of the user's plan that matches no name. The message suggests similar names."""
    similar = difflib.get_close_matches(pattern, [name for name in names if name], n=3, cutoff=0.4)
    raise ConfigError(
        f"the tensor-parallel plan names {pattern!r}, but {type(model).__name__} has no such module or parameter"
        + (f"; similar names: {', '.join(similar)}" if similar else "")
        + ". '*' matches one component of a name, between dots. If another model has it, pass both models to one prepare() call"
    )


def _check_torch_style(name: str, style: Any, modules: Mapping[str, torch.nn.Module]) -> None:
    """Raise `ConfigError` unless a style that is not a string is a `ParallelStyle` of torch, and its name a module's."""
    if not callable(getattr(style, "_apply", None)):
        raise ConfigError(
            f"the tensor-parallel plan gives {name!r} a {type(style).__name__}; allowed: the names {', '.join(STYLES)}, or a "
            "ParallelStyle object of torch.distributed.tensor.parallel"
        )
    if name not in modules:
        raise ConfigError(f"the plan gives the parameter {name!r} a ParallelStyle object; those are for modules")


def _add_split_modules(
    model_split: ModelSplit, model: torch.nn.Module, name: str, module: torch.nn.Module, style: str, axis: SplitAxis
) -> None:
    """Add a module to the modules that a plan splits.

    If the module has LoRA adapters, or copies that PEFT trains (`modules_to_save`), add its split submodules instead.

    Args:
        model_split: Split modules, to which the module is added.
        model: Model to split.
        name: Name of the module.
        module: Module to add.
        style: Name of the module's tensor-parallel style, one of `STYLES`.
        axis: Mesh axis of tensor parallelism.

    Raises:
        PrepareError: If the style does not fit the module or its adapters, or if the weight is quantized.
    """
    copies = getattr(module, "modules_to_save", None)
    if isinstance(copies, torch.nn.ModuleDict):  # PEFT trains a copy of the module, and keeps the original
        for part in ("original_module", *(f"modules_to_save.{key}" for key in copies)):
            model_split.split_modules[f"{name}.{part}"] = _make_split_module(
                model, name, module.get_submodule(part), style, axis
            )
        return
    if not is_adapted(module):
        model_split.split_modules[name] = _make_split_module(model, name, module, style, axis)
        return
    layer_style = styles.make_style(style)
    if (reason := describe_misfit(module, layer_style)) is not None:
        raise PrepareError(f"tensor parallelism cannot split {name!r} ({type(module).__name__}): {reason}")
    model_split.adapted_styles[name] = layer_style
    for part in list_split_parts(module, layer_style):
        model_split.split_modules[f"{name}.{part}"] = _make_split_module(
            model, name, module.get_submodule(part), style, axis
        )


def _make_split_module(
    model: torch.nn.Module, name: str, module: torch.nn.Module, style: str, axis: SplitAxis
) -> SplitModule:
    """Return a `SplitModule` for a module, and check that its style fits.

    Args:
        model: Model to split.
        name: Name in the plan, which can be that of a layer around `module`.
        module: Module that is split.
        style: Name of its style, one of `STYLES`.
        axis: Mesh axis of tensor parallelism.

    Raises:
        PrepareError: If the style does not fit the module, or if its weight is quantized. Also if the style needs a value
            of the model's configuration that is missing.
    """
    if styles.is_quantized(module):
        raise PrepareError(
            f"tensor parallelism cannot split {name!r} ({type(module).__name__}), because its weight is quantized. For a quantized "
            "base, use one of the layouts fsdp, ddp and pp. Or leave the layer out of the plan (TensorParallelOptions(plan={...})): "
            "it stays replicated"
        )
    split_module = SplitModule(module, name, axis, styles.make_style(style, module))
    if (reason := split_module.style.describe_misfit(module, axis.size)) is not None:
        raise PrepareError(
            f"the tensor-parallel style {style!r} does not fit {name!r} ({type(module).__name__}): {reason}. Choose another style, "
            "or leave the module out of the plan, so that it stays replicated"
        )
    if style == "mla_kv_a_proj":
        split_module.config_values["qk_rope_head_dim"] = _find_integer(model, name, "qk_rope_head_dim")
    return split_module


def _find_integer(model: torch.nn.Module, name: str, attribute: str) -> int:
    """Return an integer attribute of the innermost module around a module that has it, itself or in its `config`.

    Raises:
        PrepareError: If no module around it has the attribute.
    """
    for ancestor in list_ancestors(name):
        module = model.get_submodule(ancestor)
        for holder in (module, getattr(module, "config", None)):
            if isinstance(value := getattr(holder, attribute, None), int):
                return value
    raise PrepareError(
        f"the style of {name!r} needs {attribute}, which neither the modules around it nor its configuration have"
    )


def _make_parameter_style(name: str, style: str) -> SplitStyle:
    """Return the style object for a parameter that the plan names directly.

    Args:
        name: Name of the parameter in the model.
        style: Name of its style, one of `STYLES`.

    Raises:
        PrepareError: If the parameter is a bias and the style is rowwise.
    """
    parameter_style = styles.make_style(style)
    if name.endswith("bias") and isinstance(parameter_style, styles.Rowwise):
        raise PrepareError(
            f"the plan gives the bias {name!r} the style {style!r}: each rank would add it, so it would count as many "
            "times as there are ranks; leave it out of the plan"
        )
    return parameter_style


def _check_nesting(model_split: ModelSplit) -> None:
    """Raise an error if a plan splits a parameter twice, directly or through a `ParallelStyle` of an enclosing module.

    Raises:
        ConfigError: If the plan splits a module or parameter twice.
    """
    for name in model_split.parameters:
        owner, _, key = name.rpartition(".")
        split_module = model_split.split_modules.get(owner)
        if owner in model_split.torch_styles or (
            split_module is not None and split_module.style.find_shard_dim(key, torch.empty(0, 0)) is not None
        ):
            raise ConfigError(
                f"the tensor-parallel plan splits {name!r} twice: by its own name and by that of {owner!r}"
            )
    for name in (*model_split.split_modules, *model_split.torch_styles):
        for ancestor in list_ancestors(name):
            # PrepareModuleInput and PrepareModuleOutput change only activations; other styles split parameters.
            torch_style = model_split.torch_styles.get(ancestor)
            if torch_style is not None and not type(torch_style).__name__.startswith("PrepareModule"):
                raise ConfigError(
                    f"the tensor-parallel plan splits {name!r} twice: a ParallelStyle splits {ancestor!r} around it"
                )

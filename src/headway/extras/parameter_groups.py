"""`parameter_groups`: parameter groups for optimizers, chosen by module type, dimension, name and depth."""

import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, overload

import torch
from torch import nn

from headway.common.text import format_ranges, join_names
from headway.core.strategies.blocks import find_blocks, find_parameter_owners, get_class_name
from headway.core.weights.compiled import remove_compiled_levels
from headway.errors import ConfigError
from headway.extras.parameter_kinds import BIASES, EMBEDDINGS, KINDS, NORMS, find_kinds, list_blocks, number_layers
from headway.log import get_logger

log = get_logger(__name__)

_RESERVED = ("params", "name", "param_names")
"""Keys of a parameter group that are no options of the optimizer."""


@dataclass(frozen=True)
class _GroupedParameter:
    """Trainable parameter and its settings.

    Attributes:
        names: All names of the parameter in the model. A tied parameter has several.
        parameter: The parameter.
        group_name: Name of its parameter group. Parameters with the same group name have the same options.
        options: Options of its group, such as "lr" and "weight_decay".
        overridden: Names of the options that `overrides` has set.
        lr_scale: Learning-rate factor of the parameter's layer. 1 without layer decay.
        is_in_block: Whether the parameter belongs to a repeated block of the model.
        kinds: Kinds of the parameter, out of `KINDS`.
    """

    names: tuple[str, ...]
    parameter: nn.Parameter
    group_name: str
    options: dict[str, Any]
    overridden: frozenset[str]
    lr_scale: float
    is_in_block: bool
    kinds: frozenset[str]


class ParameterGroups(Sequence[dict[str, Any]]):
    """Sequence of parameter groups for an optimizer, with a summary: `print(groups)`.

    Each item is a new dict, so one object can build several optimizers. To change a group, change the result of
    `list(groups)`.

    Args:
        entries: Trainable parameters with their settings.
        frozen: Names of the parameters that were left out because their `requires_grad` is False. Default: none.
    """

    def __init__(self, entries: Iterable[_GroupedParameter], frozen: Sequence[str] = ()) -> None:
        self._frozen = list(frozen)
        self._members: dict[str, list[_GroupedParameter]] = {}
        for entry in entries:
            self._members.setdefault(entry.group_name, []).append(entry)

    def __len__(self) -> int:
        return len(self._members)

    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...

    @overload
    def __getitem__(self, index: slice) -> list[dict[str, Any]]: ...

    def __getitem__(self, index: int | slice) -> dict[str, Any] | list[dict[str, Any]]:
        names = list(self._members)
        if isinstance(index, slice):
            return [self._build_group(name) for name in names[index]]
        return self._build_group(names[index])

    def _build_group(self, name: str) -> dict[str, Any]:
        entries = self._members[name]
        return {"params": [entry.parameter for entry in entries], "name": name, **entries[0].options}

    @property
    def options(self) -> dict[str, dict[str, Any]]:
        """Options of each trainable parameter, by its name in the model."""
        return {entry.names[0]: dict(entry.options) for entry in self._list_entries()}

    def _list_entries(self) -> list[_GroupedParameter]:
        return [entry for entries in self._members.values() for entry in entries]

    def split_matrices(
        self, *patterns: str, max_ndim: int = 2, **options: Any
    ) -> tuple["ParameterGroups", "ParameterGroups"]:
        """Split into groups of hidden matrices, for an optimizer such as Muon, and groups of the other parameters.

        Args:
            *patterns: Names or name patterns of parameters or modules, as in `overrides`. Their parameters with 2 to
                `max_ndim` dimensions are hidden matrices, except biases, norms and embeddings. Default: the model's repeated
                blocks, so that the matrices of embeddings and of a head are not selected.
            max_ndim: Largest number of dimensions of a hidden matrix. Default: 2, as `torch.optim.Muon` requires.
                Parameters with more dimensions belong to the other groups. For fused experts or convolutions, pass 3 or 4
                and use `MatrixOptimizer`.
            **options: Options of the hidden matrices, such as `lr=0.02`. Options in `overrides` take precedence, and layer
                decay scales the `lr`.

        Returns:
            Pair of (groups of hidden matrices, groups of the other parameters). Each parameter is in exactly one
            of the two.

        Raises:
            ConfigError: If a pattern selects no trainable parameter, if there is no hidden matrix, if `max_ndim` is below 2,
                or if the groups have learning rates and `lr` is not passed.
        """
        if max_ndim < 2:
            raise ConfigError(f"max_ndim={max_ndim}; give 2, or more for fused experts and convolutions")
        entries = self._list_entries()
        _check_patterns(patterns, [entry.names for entry in entries], "split_matrices()")
        _check_options(options, "split_matrices()")
        matrices: list[_GroupedParameter] = []
        others: list[_GroupedParameter] = []
        for entry in entries:
            is_in_place = _is_selected(entry.names, patterns) if patterns else entry.is_in_block
            has_shape = 2 <= entry.parameter.ndim <= max_ndim
            is_matrix = is_in_place and has_shape and not entry.kinds & {BIASES, NORMS, EMBEDDINGS}
            (matrices if is_matrix else others).append(entry)
        if not matrices:
            dimensions = "2" if max_ndim == 2 else f"2 to {max_ndim}"
            raise ConfigError(
                f"split_matrices({', '.join(map(repr, patterns))}) found no matrix with {dimensions} dimensions"
                f"{'' if patterns else ' in repeated blocks'}; give names of modules whose matrices are meant, such as 'layers.*'"
            )
        if "lr" not in options and any("lr" in entry.options and "lr" not in entry.overridden for entry in matrices):
            raise ConfigError(
                "the groups have learning rates, which would replace the one of an optimizer for matrices; pass lr= to "
                "split_matrices(), as in split_matrices(lr=0.02)"
            )
        changed = []
        for entry in matrices:
            own = {name: value for name, value in options.items() if name not in entry.overridden}
            if "lr" in own:
                own["lr"] = own["lr"] * entry.lr_scale
            changed.append(replace(entry, options=entry.options | own))
        return ParameterGroups(changed, self._frozen), ParameterGroups(others, self._frozen)

    def __str__(self) -> str:
        lines = []
        for group_name, entries in self._members.items():
            options = ", ".join(f"{name} {_format_value(value)}" for name, value in entries[0].options.items())
            num_values = sum(entry.parameter.numel() for entry in entries)
            plural = "" if len(entries) == 1 else "s"
            lines.append(f"{group_name}: {options}; {len(entries)} tensor{plural}, {num_values:,} values")
            lines += [f"    {line}" for line in _merge_names([" = ".join(entry.names) for entry in entries])]
        if self._frozen:
            plural = "" if len(self._frozen) == 1 else "s"
            lines.append(f"left out, because requires_grad is False: {len(self._frozen)} tensor{plural}")
            lines += [f"    {line}" for line in _merge_names(self._frozen)]
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<ParameterGroups: {', '.join(self._members)}>"


def parameter_groups(
    model: nn.Module,
    weight_decay: float = 0.1,
    *,
    no_decay: str | Collection[str] = KINDS,
    lr: float | None = None,
    layer_decay: float | None = None,
    layers: str | Sequence[str] | Callable[[str], int] | None = None,
    overrides: Mapping[str, Mapping[str, Any]] | None = None,
) -> ParameterGroups:
    """Return parameter groups for an optimizer. Each trainable parameter is in exactly one group.

    Call it before or after `prepare`. The model may be on the meta device. A tied parameter is listed once, and a frozen one is
    left out. `print(groups)` shows which tensors got which settings.

    In `no_decay` and `overrides`, a name pattern selects parameters by their full name, such as "*.gamma", or all parameters of
    a module by the module's name, such as "head" or "blocks.*.attn". `*` also matches dots, as in `fnmatch`.

    Args:
        model: Model with the parameters.
        weight_decay: Weight decay of all parameters that `no_decay` does not select. Default: 0.1.
        no_decay: Parameters without weight decay: name patterns, and kinds of parameters. The kinds are "biases", "norms",
            "embeddings" (including parameters such as `pos_embed` and `cls_token`) and "vectors" (with fewer than two
            dimensions). A tied parameter is selected if one of its names or modules is. Default: all kinds.
        lr: Learning rate. Default: None, which leaves it to the optimizer. `layer_decay` requires it.
        layer_decay: Factor by which the learning rate falls from each layer to the one before it, above 0 and at most 1. The
            last layer has the learning rate `lr`. Default: None, for equal rates.
        layers: Where the layers are, for `layer_decay`: the name of the module that contains the blocks, such as
            "model.layers", or several such names from input to output. Or a function that returns the layer number, from 0,
            of a parameter's name. Default: None, which finds the model's repeated blocks. Parameters before the blocks are layer
            0, and those after the blocks are the last layer. Norms directly after the blocks belong to the last block.
        overrides: Options for name patterns, such as `{"head": {"lr": 1e-3}}`. They replace the options that the other arguments
            give, without layer decay. If several patterns select a parameter, the later ones take precedence.
            A pattern that selects only frozen parameters causes a warning. None (the default): no overrides.

    Returns:
        Sequence of parameter groups. Each has a "name", which checkpoints contain.

    Raises:
        ConfigError: If a name pattern selects no parameter, if the value of an argument is not allowed, if no parameter is
            trainable, or if the layers are not found.

    Example::

        groups = headway.parameter_groups(model, weight_decay=0.1, lr=1e-3, layer_decay=0.75)
        print(groups)
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(groups))
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"parameter_groups() got a {type(model).__name__}; give the model, not its parameters")
    optional = {"lr": lr, "layer_decay": layer_decay}
    _check_numbers({"weight_decay": weight_decay} | {name: each for name, each in optional.items() if each is not None})
    if no_decay is None:
        raise ConfigError("no_decay=None; give kinds and name patterns, or () for weight decay of all parameters")
    overrides = {} if overrides is None else overrides
    if not isinstance(overrides, Mapping):
        raise ConfigError(
            f"overrides={overrides!r}; give a dict from name patterns to options, such as {{'head': {{'lr': 1e-3}}}}"
        )
    exempt = [no_decay] if isinstance(no_decay, str) else list(no_decay)
    exempt_kinds = set(exempt).intersection(KINDS)
    exempt_patterns = [each for each in exempt if each not in KINDS]
    names_by_id: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names_by_id.setdefault(id(parameter), []).append(remove_compiled_levels(name))
    all_names = list(names_by_id.values())
    _check_patterns(exempt_patterns, all_names, "no_decay", f", or a kind: {', '.join(KINDS)}")
    _check_patterns(overrides, all_names, "overrides")
    for pattern, options in overrides.items():
        _check_options(options, f"overrides[{pattern!r}]")

    owners = find_parameter_owners(model)
    kinds_by_id = {key: frozenset(find_kinds(parameter, modules)) for key, (parameter, modules) in owners.items()}
    scales = _find_lr_scales(model, lr, layer_decay, layers, names_by_id, kinds_by_id)
    # For layers given by a function, and for models without layer decay, hidden matrices are in the repeated blocks.
    blocks = find_blocks(model) if layers is None or callable(layers) else list_blocks(model, layers)
    block_ids = {id(parameter) for block in blocks for parameter in block.parameters()}
    entries, frozen = [], []
    for key, names in names_by_id.items():
        parameter, kinds = owners[key][0], kinds_by_id[key]
        if not parameter.requires_grad:
            frozen.append(names[0])
            continue
        is_exempt = bool(kinds & exempt_kinds) or _is_selected(names, exempt_patterns)
        options = {} if lr is None else {"lr": lr * scales[key].factor}
        options["weight_decay"] = 0.0 if is_exempt else weight_decay
        patterns = [pattern for pattern in overrides if _is_selected(names, [pattern])]
        overridden: dict[str, Any] = {}
        for pattern in patterns:
            overridden |= overrides[pattern]
        options |= overridden
        decay = "decay" if options["weight_decay"] else "no_decay"
        entries.append(
            _GroupedParameter(
                names=tuple(names),
                parameter=parameter,
                group_name="/".join([*scales[key].labels, decay, *patterns]),
                options=options,
                overridden=frozenset(overridden),
                lr_scale=scales[key].factor,
                is_in_block=key in block_ids,
                kinds=kinds,
            )
        )
    if not entries:
        raise ConfigError(
            f"{get_class_name(model)} has no parameters with requires_grad=True: nothing would be trained"
        )
    unused = [pattern for pattern in overrides if not any(_is_selected(entry.names, [pattern]) for entry in entries)]
    if unused:
        log.warning(
            "overrides[%r] of parameter_groups() has no effect, because requires_grad is False for all parameters that it selects. "
            "If you unfreeze them later, build the groups before you freeze them",
            unused[0],
        )
    return ParameterGroups(entries, frozen)


# ---------------------------------------------------------------- layers


@dataclass(frozen=True)
class _LayerScale:
    """Factor of a parameter's learning rate.

    Attributes:
        factor: The factor. 1 without layer decay.
        labels: Parts of the group's name, such as ("layer_3",). Empty without layer decay.
    """

    factor: float = 1.0
    labels: tuple[str, ...] = ()


def _find_lr_scales(
    model: nn.Module,
    lr: float | None,
    layer_decay: float | None,
    layers: str | Sequence[str] | Callable[[str], int] | None,
    names_by_id: Mapping[int, Sequence[str]],
    kinds_by_id: Mapping[int, Collection[str]],
) -> dict[int, _LayerScale]:
    """Return the factor of each parameter's learning rate, by the parameter's ID.

    Args:
        model: Model with the parameters.
        lr: Learning rate of the last layer, or None.
        layer_decay: Argument of `parameter_groups`. None: all factors are 1.
        layers: Argument of `parameter_groups`. None: the repeated blocks of the model are its layers.
        names_by_id: All names of each parameter.
        kinds_by_id: Kinds of each parameter.

    Raises:
        ConfigError: If the arguments are not allowed, or if the layers are not found.
    """
    if layer_decay is None:
        if layers is not None:
            raise ConfigError(
                "layers= has no effect without layer_decay=; pass layer_decay, such as 0.75, or leave layers out"
            )
        return dict.fromkeys(names_by_id, _LayerScale())
    if not 0 < layer_decay <= 1:
        raise ConfigError(f"layer_decay={layer_decay!r}; give a factor above 0 and at most 1, such as 0.75")
    if lr is None:
        raise ConfigError(
            "layer_decay= needs lr=, the learning rate of the last layer, because groups contain their own rates"
        )
    if callable(layers):
        numbers = {key: layers(names[0]) for key, names in names_by_id.items()}
        wrong = [names_by_id[key][0] for key, number in numbers.items() if not _is_layer_number(number)]
        if wrong:
            raise ConfigError(
                f"layers= returned {layers(wrong[0])!r} for {wrong[0]!r}; it must return the layer number, an int from 0"
            )
    else:
        blocks = list_blocks(model, layers)
        numbers = number_layers(model, blocks, lambda parameter: NORMS in kinds_by_id[id(parameter)])
    last = max(numbers.values())
    return {key: _LayerScale(layer_decay ** (last - number), (f"layer_{number}",)) for key, number in numbers.items()}


def _is_layer_number(value: Any) -> bool:
    """Whether a value is an int from 0."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


# ---------------------------------------------------------------- names


def _is_selected(names: Iterable[str], patterns: Iterable[str]) -> bool:
    """Whether a name pattern matches one of a parameter's names, or the name of a module that contains it."""
    return any(
        fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*") for pattern in patterns for name in names
    )


def _check_patterns(
    patterns: Iterable[str], all_names: Sequence[Sequence[str]], argument: str, alternative: str = ""
) -> None:
    """Raise `ConfigError` if a name pattern selects no parameter.

    Args:
        patterns: Name patterns.
        all_names: For each parameter, its names.
        argument: Argument with the patterns, for the message.
        alternative: What else the argument may contain, for the message. Empty (the default): nothing else.
    """
    for pattern in patterns:
        if not any(_is_selected(names, [pattern]) for names in all_names):
            examples = join_names([names[0] for names in all_names], 3)
            raise ConfigError(
                f"{argument} has the name pattern {pattern!r}, which selects no parameter. Give the name of a parameter or module, "
                f"with * for any part of it{alternative}. The parameters are {examples}"
            )


def _check_numbers(arguments: Mapping[str, Any]) -> None:
    """Raise `ConfigError` unless each argument is a tensor or a finite number from 0.

    torch checks only the defaults of an optimizer, and not the options of its groups.

    Args:
        arguments: Arguments by name. A learning rate can be a tensor.
    """
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor):
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
            raise ConfigError(f"{name}={value!r}; give a finite number from 0")


def _check_options(options: Any, argument: str) -> None:
    """Raise `ConfigError` unless `options` is a mapping of options that a parameter group may have.

    Args:
        options: Options to check.
        argument: Argument with the options, for the message.
    """
    if not isinstance(options, Mapping):
        raise ConfigError(f"{argument} is {options!r}; give a dict of options, such as {{'lr': 1e-3}}")
    reserved = [name for name in options if name in _RESERVED]
    if reserved:
        raise ConfigError(f"{argument} sets {reserved[0]!r}, which is no option; give options such as 'lr'")


# ---------------------------------------------------------------- summary


def _format_value(value: Any) -> str:
    """Return an option's value for the summary. Numbers have at most six digits."""
    is_number = isinstance(value, float) or (isinstance(value, torch.Tensor) and value.numel() == 1)
    return f"{float(value):g}" if is_number else str(value)


def _merge_names(names: Sequence[str]) -> list[str]:
    """Return names, with those that differ only in numbers merged, such as "blocks.{0-11}.norm.weight".

    Names are merged only if all combinations of their numbers occur.
    """
    numbers_by_template: dict[str, list[tuple[int, ...]]] = {}
    names_by_template: dict[str, list[str]] = {}
    for name in names:
        # A template has "{}" in place of each name component that is a number.
        template = re.sub(r"(?<![^.])\d+(?![^.])", "{}", name)
        numbers = tuple(int(part) for part in re.findall(r"(?<![^.])\d+(?![^.])", name))
        numbers_by_template.setdefault(template, []).append(numbers)
        names_by_template.setdefault(template, []).append(name)
    lines: list[str] = []
    for template, tuples in numbers_by_template.items():
        values = [sorted(set(column)) for column in zip(*tuples)]
        if len(tuples) == 1 or len(tuples) != math.prod(map(len, values)):
            lines += names_by_template[template]
            continue
        texts = [f"{{{format_ranges(column)}}}" if len(column) > 1 else str(column[0]) for column in values]
        lines.append(template.format(*texts))
    return lines

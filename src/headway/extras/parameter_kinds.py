"""Kinds of parameters (biases, norms, embeddings, vectors) and the depth of a parameter in its model.

Both are read from module types, dimensions and names, so a model on the meta device or a sharded model has equal results.
"""

import re
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn

from headway.core.strategies.blocks import ParameterOwner, find_blocks, get_class_name, get_original_class
from headway.core.weights.compiled import remove_compiled_levels
from headway.errors import ConfigError

BIASES, NORMS, EMBEDDINGS, VECTORS = "biases", "norms", "embeddings", "vectors"
KINDS = (BIASES, NORMS, EMBEDDINGS, VECTORS)

_BIAS = re.compile(r"(?:^|[._])bias(?:$|[._])")
"""Pattern for names of biases, such as "attn.q_bias", "lstm.bias_ih_l0" and "relative_attention_bias.weight"."""
_EMBEDDING = re.compile(r"embed|token")
"""Pattern for names of embeddings that are parameters and not modules, such as "pos_embed" and "cls_token"."""
_NORMS_OF_ANY_SHAPE = (nn.LayerNorm, nn.RMSNorm)
"""Norms whose weight can have several dimensions."""
_WEIGHTED_SUMS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
"""Modules that are no embeddings, even if the name of their class says so, as in `class PatchEmbedding(nn.Conv2d)`."""


def find_kinds(parameter: torch.Tensor, owners: Iterable[ParameterOwner]) -> set[str]:
    """Return the kinds of a parameter, out of `KINDS`. A tied parameter has the kinds of all its modules.

    - "biases": "bias" is a word of the parameter's full name.
    - "norms": The name of the module's class, or of a base class, contains "norm". Parameters with several dimensions
      count only if the module is torch's LayerNorm or RMSNorm, because a `NormalizedLinear` is no norm.
    - "embeddings": The name of the module's class, or of a base class, contains "embedding", unless it is a Linear or
      a convolution. Also parameters whose own name contains "embed" or "token".
    - "vectors": The parameter has fewer than two dimensions.

    Args:
        parameter: Parameter of a model.
        owners: Modules that directly contain it.
    """
    kinds = {VECTORS} if parameter.ndim < 2 else set()
    for module_name, module, own_name in owners:
        class_names = " ".join(base.__name__ for base in get_original_class(module).__mro__).lower()
        if _BIAS.search(f"{module_name}.{own_name}".lower()):
            kinds.add(BIASES)
        if "norm" in class_names and (parameter.ndim < 2 or isinstance(module, _NORMS_OF_ANY_SHAPE)):
            kinds.add(NORMS)
        if isinstance(module, _WEIGHTED_SUMS):
            continue
        if "embedding" in class_names or _EMBEDDING.search(own_name.lower()):
            kinds.add(EMBEDDINGS)
    return kinds


def number_layers(
    model: nn.Module, blocks: Sequence[nn.Module], is_norm: Callable[[nn.Parameter], bool]
) -> dict[int, int]:
    """Return the layer number of each parameter, by the parameter's ID.

    - Layer 0 has the parameters that the model lists before its first block.
    - Layer `i` has the i-th block, counted from 1, and parameters that the model lists between it and the next block.
      Blocks without parameters of their own, such as activations and repeated uses of a block, are not counted.
    - Norms after the last block belong to the layer of this block, as in timm.
    - The last layer has all other parameters after the last block, such as a head.

    Args:
        model: Model with the parameters.
        blocks: Blocks from input to output.
        is_norm: Function that returns whether a parameter belongs to a norm.

    Raises:
        ConfigError: If no block has parameters.
    """
    num_blocks = 0
    layer_of_block_parameter: dict[int, int] = {}
    for block in blocks:
        new_ids = {id(parameter) for parameter in block.parameters()} - layer_of_block_parameter.keys()
        if new_ids:
            num_blocks += 1
            layer_of_block_parameter |= dict.fromkeys(new_ids, num_blocks)
    if not num_blocks:
        raise ConfigError(
            f"none of the {len(blocks)} blocks of {get_class_name(model)} has parameters, so the model has no layers. Pass layers= "
            "with the name of the module that contains the blocks, such as 'model.layers'"
        )
    layers: dict[int, int] = {}
    current = 0
    for _, parameter in model.named_parameters():
        if id(parameter) in layer_of_block_parameter:
            current = layer_of_block_parameter[id(parameter)]
            layers[id(parameter)] = current
        elif current == num_blocks and not is_norm(parameter):
            layers[id(parameter)] = num_blocks + 1
        else:
            layers[id(parameter)] = current
    return layers


def list_blocks(model: nn.Module, lists: str | Sequence[str] | None) -> list[nn.Module]:
    """Return the blocks of a model, from input to output.

    Args:
        model: Model to search.
        lists: Name of the module that contains the blocks, such as "model.layers", or several such names from input to
            output. None: the model's repeated modules, which must have one parent.

    Raises:
        ConfigError: If there is no module with such a name, or if it has no children. Without a name, if there are no
            repeated modules, or if they have several parents.
    """
    if lists is not None:
        names = [lists] if isinstance(lists, str) else list(lists)
        return [block for name in names for block in _list_children(model, name)]
    blocks = find_blocks(model)
    block_ids = {id(block) for block in blocks}
    parents = [
        name for name, module in model.named_modules() if any(id(each) in block_ids for each in module.children())
    ]
    if len(parents) != 1:
        found = f"in {', '.join(map(repr, parents))}" if parents else "in no module"
        raise ConfigError(
            f"{get_class_name(model)} has repeated blocks {found}, so the order of its layers is not known. Pass layers= with the "
            "name of the module that contains the blocks, such as 'model.layers', or several names from input to output, or a "
            "function from a parameter's name to its layer number"
        )
    return blocks


def _list_children(model: nn.Module, name: str) -> list[nn.Module]:
    """Return the children of the submodule with this name.

    Raises:
        ConfigError: If there is no such module, or if it has no children.
    """
    modules = {remove_compiled_levels(each): module for each, module in model.named_modules()}
    module = modules.get(name)
    children = [] if module is None else list(module.children())
    if not children:
        problem = "does not contain" if module is None else "contains without children"
        raise ConfigError(
            f"layers names {name!r}, which {get_class_name(model)} {problem}; give the name of the module whose children are the "
            "blocks, such as 'model.layers'"
        )
    return children

"""Activation checkpointing: blocks keep only their inputs, and recompute activations in backward.

A block remains the same Python object. Its class is replaced by a subclass whose `forward` runs through torch's
(non-reentrant) checkpoint, so state dict names, isinstance and the module tree do not change. Hooks on a block are not
checkpointed and run once. For transformers models, their own method for enabling checkpointing is used, because it also
handles their caches.

Source of the idea: Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from types import FunctionType
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from headway.core.config.activation_checkpointing import ActivationCheckpointing
from headway.core.strategies.blocks import (
    ORIGINAL_CLASS,
    find_blocks,
    find_outermost,
    get_class_name,
    get_unsharded_class,
    replace_class,
)
from headway.core.training.prepared.model import reduce_to_bare
from headway.errors import ConfigError, StateError, UnsupportedError
from headway.extras.activation_offload import offload_saved_tensors
from headway.log import get_logger

log = get_logger(__name__)

_BLOCK_FUNCTION = "_headway_checkpoint"
"""Attribute of a checkpointed block: the function that calls its forward with checkpointing or offloading."""
_OWN_FLAG = "gradient_checkpointing"
"""Attribute of transformers' modules: whether checkpointing is on."""
_OWN_FUNCTION = "_gradient_checkpointing_func"
"""Attribute of transformers' modules: the function that calls a layer's forward with checkpointing."""

# Names of aten operations whose results the policies "keep_attention" and "keep_matmul" store.
_ATTENTION = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
    "_flash_attention_forward",
    "_efficient_attention_forward",
    "_cudnn_attention_forward",
)
_MATMUL = ("mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "convolution")


class CheckpointedBlock:
    """Mixin whose `forward` runs a block of a model with activation checkpointing.

    To checkpoint a block, its class is replaced by a new class that inherits from this mixin and the original class.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block's own forward.

        If gradients are enabled, its activations are not stored but recomputed in backward.
        """
        run = super().forward  # type: ignore[misc]
        if not torch.is_grad_enabled():
            return run(*args, **kwargs)
        return self._headway_checkpoint(run, *args, **kwargs)  # type: ignore[attr-defined]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle or copy the block as an object of its original class, without checkpointing."""
        return reduce_to_bare(
            self, super().__reduce_ex__(protocol), self.__dict__[ORIGINAL_CLASS], (_BLOCK_FUNCTION, ORIGINAL_CLASS)
        )


def checkpoint_activations(model: torch.nn.Module, plan: ActivationCheckpointing, device: torch.device) -> int:
    """Enable activation checkpointing for the model's blocks, in place. An earlier call is undone first.

    Args:
        model: Model, prepared or not.
        plan: Settings: which blocks are checkpointed, which tensors they keep, and whether these tensors are offloaded.
        device: Device that the model computes on. On the CPU, nothing is offloaded, and a warning is logged once if
            `plan` requests offloading.

    Returns:
        Number of checkpointed blocks. 0 if nothing is recomputed and, on this device, nothing is offloaded.

    Raises:
        ConfigError: If no blocks are found, a block's class cannot be extended, a block's `forward` was replaced on the
            instance (compiled or patched), or `plan.every` cannot be applied.
        StateError: If a checkpointed block was prepared by itself, so that an earlier call cannot be undone.
    """
    keep_activations(model)
    offload = plan.offload and device.type != "cpu"
    if plan.offload and not offload:
        log.warning_once(
            "activations are not offloaded: the model computes on the CPU, so they are in host memory already"
        )
    function = _make_block_function(plan, offload)
    if function is None:
        return 0
    # A model's own checkpointing can neither be limited to named blocks nor only offload.
    uses_own = not plan.blocks and plan.policy != "keep_all"
    own_models = list(find_outermost([model], _has_own_checkpointing)) if uses_own else []
    count = sum(_enable_own_checkpointing(own_model, plan, function) for own_model in own_models)
    done_ids = {id(module) for own_model in own_models for module in own_model.modules()}
    blocks = [block for block in find_blocks(model, plan.blocks) if id(block) not in done_ids]
    if not blocks and not count:
        raise ConfigError(
            f"no repeated blocks were found in {get_class_name(model)}: its ModuleLists, Sequentials and ModuleDicts contain no two "
            "modules of the same class with submodules. Name the blocks: blocks=[BlockClass] or blocks=['layers.0', ...]"
        )
    checkpointed = blocks[:: plan.every]
    for block in checkpointed:
        _attach_function(block, function)
    return count + len(checkpointed)


def keep_activations(model: torch.nn.Module) -> None:
    """Undo `checkpoint_activations` for this model. A model without such checkpointing is left unchanged.

    Raises:
        StateError: If a block was prepared by itself after its activations were checkpointed.
    """
    for part in find_outermost([model], _has_own_checkpointing):
        if any(getattr(module, _OWN_FLAG, False) is True for module in part.modules()):
            disable = getattr(part, "activation_checkpointing_disable", None) or part.gradient_checkpointing_disable
            disable()  # type: ignore[operator]
    for module in model.modules():
        if _BLOCK_FUNCTION not in module.__dict__:
            continue
        if get_unsharded_class(type(module)).__mro__[1] is not CheckpointedBlock:
            raise StateError(
                f"a block of class {get_class_name(module)} was prepared by itself after its activations were checkpointed; "
                "call accelerator.free_memory() first"
            )
        replace_class(module, module.__dict__.pop(ORIGINAL_CLASS))
        del module.__dict__[_BLOCK_FUNCTION]


def repeat_checkpointing(
    model: torch.nn.Module,
    copy: torch.nn.Module,
    plan: ActivationCheckpointing | None,
    prepared_models: Sequence[torch.nn.Module],
) -> None:
    """Enable activation checkpointing in a copy of a model, because copying removes it.

    A prepared model's checkpointed blocks are checkpointed in the copy. If the model is still to be prepared, the copy
    gets the checkpointing that prepare() will apply.

    Args:
        model: Model, checkpointed or not.
        copy: Copy of `model`, with the same module structure.
        plan: Settings of activation checkpointing that prepare() applies to models, or None.
        prepared_models: Models that have been prepared.

    Raises:
        UnsupportedError: If the model's activations are or will be offloaded.
    """
    is_prepared = any(model is each for each in prepared_models)
    planned = None if is_prepared else plan  # prepare() has already applied the plan to prepared models
    functions = [module.__dict__.get(key) for module in model.modules() for key in (_BLOCK_FUNCTION, _OWN_FUNCTION)]
    if (planned is not None and planned.offload) or any(map(_is_offload_function, functions)):
        raise UnsupportedError(
            "activations are offloaded to host memory, which cannot be forecast yet; leave offload out"
        )
    if planned is not None:
        checkpoint_activations(copy, planned, torch.device("cpu"))
        return
    for module, copied_module in zip(model.modules(), copy.modules(), strict=True):
        if _BLOCK_FUNCTION in module.__dict__:
            _attach_function(copied_module, module.__dict__[_BLOCK_FUNCTION])


def _is_offload_function(function: Any) -> bool:
    """Whether a block is called through a function of `_make_block_function` that offloads its activations."""
    if _get_offload_function.cache_info().currsize == 0:
        # Nothing is offloaded yet. Creating the function for the comparison would import torch's compiler.
        return False
    return isinstance(function, partial) and function.func is _get_offload_function()


# ---------------------------------------------------------------- functions that call a block


def _make_block_function(plan: ActivationCheckpointing, offload: bool) -> Callable[..., Any] | None:
    """Return the function that calls a block's forward with checkpointing, offloading or both.

    Return None if neither is needed.

    Args:
        plan: Settings of activation checkpointing.
        offload: Whether saved activations are moved to host memory.
    """
    if plan.policy == "keep_all":
        return partial(_get_offload_function(), _call_forward) if offload else None
    if plan.policy == "keep_matmul":
        policy: Any = _make_selective_policy(_MATMUL + _ATTENTION)
    elif plan.policy == "keep_attention":
        policy = _make_selective_policy(_ATTENTION)
    else:
        policy = plan.policy
    options: dict[str, Any] = {"use_reentrant": False}
    if callable(policy):
        # torch.compile supports selective checkpointing only if `context_fn` is a partial of this function.
        options["context_fn"] = partial(create_selective_checkpoint_contexts, policy)
    function = partial(checkpoint, **options)
    return partial(_get_offload_function(), function) if offload else function


def _make_selective_policy(names: tuple[str, ...]) -> Callable[..., CheckpointPolicy]:
    """Return a policy for torch's selective checkpointing that stores only the results of some aten operations.

    Args:
        names: Names of the operations, without overload. Names that this version of torch does not have are ignored.
    """
    packets = [getattr(torch.ops.aten, name) for name in names if hasattr(torch.ops.aten, name)]
    saved_operations = {getattr(packet, overload) for packet in packets for overload in packet.overloads()}

    def choose_policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if operation in saved_operations else CheckpointPolicy.PREFER_RECOMPUTE

    return choose_policy


def _call_forward(run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return run(*args, **kwargs)


@cache
def _get_offload_function() -> Callable[..., Any]:
    """Return `_call_offloaded`, wrapped so that torch.compile does not include it in a graph.

    It must stay outside of graphs, because its copies run on a separate stream.
    """
    # Not a decorator: it imports torch's compiler, which takes as long as importing torch.
    disabled: Callable[..., Any] = torch.compiler.disable(_call_offloaded)  # type: ignore[no-untyped-call]
    return disabled


def _call_offloaded(function: Callable[..., Any], run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a block's forward, and move the tensors that autograd saves during it to host memory.

    With activation checkpointing, the saved tensors are the block's inputs.

    Args:
        function: Function that calls `run`, such as `checkpoint`.
        run: The block's forward.
        args: Arguments of the forward.
        kwargs: Keyword arguments of the forward.
    """
    with offload_saved_tensors(block=_find_block(run)):
        return function(run, *args, **kwargs)


def _find_block(run: Any) -> torch.nn.Module | None:
    """Return the module to which a forward function belongs, or None if it is unknown.

    Args:
        run: Bound method, or a `partial` made by transformers.
    """
    while isinstance(run, partial):
        if run.args and isinstance(run.args[0], torch.nn.Module):
            return run.args[0]
        run = run.func
    owner = getattr(run, "__self__", None)
    return owner if isinstance(owner, torch.nn.Module) else None


@cache
def _get_checkpointed_class(bare: Any) -> type:
    """Return the subclass of a block's class whose forward is checkpointed.

    All blocks of a class use one subclass, so that they are compiled once.
    """
    run: Any = CheckpointedBlock.forward
    # torch caches compilations by code and limits their number, so each class gets its own code object.
    forward = FunctionType(run.__code__.replace(), run.__globals__, run.__name__, run.__defaults__, run.__closure__)
    added = {"__module__": bare.__module__, "__doc__": bare.__doc__, "forward": forward}
    return type(bare.__name__, (CheckpointedBlock, bare), added)


def _attach_function(block: torch.nn.Module, function: Callable[..., Any]) -> None:
    """Make a block run its forward through `function`, by giving it a subclass of its class.

    Args:
        block: Block of the model, changed in place.
        function: Function that gets the block's forward and its arguments, and runs it with checkpointing.

    Raises:
        ConfigError: If the block has its own `forward` on the object, or its class cannot be extended.
    """
    bare: Any = type(block)
    if "forward" in block.__dict__:
        raise ConfigError(
            f"a block of class {bare.__name__} has its own forward on the object (compiled or patched), which would bypass the "
            "checkpoint; checkpoint activations before that, or remove that forward"
        )
    try:
        block.__class__ = _get_checkpointed_class(bare)
    except TypeError as error:
        raise ConfigError(f"the class {bare.__qualname__} cannot be extended: {error}; name other blocks") from error
    block.__dict__[_BLOCK_FUNCTION] = function
    block.__dict__[ORIGINAL_CLASS] = bare


# ---------------------------------------------------------------- models with their own checkpointing


def _has_own_checkpointing(module: torch.nn.Module) -> bool:
    """Whether a module has transformers' methods for activation checkpointing."""
    return bool(getattr(module, "supports_gradient_checkpointing", False)) and hasattr(
        module, "gradient_checkpointing_enable"
    )


def _enable_own_checkpointing(
    model: torch.nn.Module, plan: ActivationCheckpointing, function: Callable[..., Any]
) -> int:
    """Enable checkpointing with the model's own method, then keep it for every `plan.every`-th layer only.

    Args:
        model: transformers model.
        plan: Settings of activation checkpointing.
        function: Function through which each checkpointed layer is called.

    Returns:
        Number of checkpointed layers.

    Raises:
        ConfigError: If `plan.every` cannot be applied, because the model checkpoints all layers at once.
    """
    enable: Any = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})
    flagged = [module for module in model.modules() if hasattr(module, _OWN_FLAG)]
    # Outer modules, such as the decoder, have the flag too. Only the innermost ones are layers.
    layers = []
    for module in flagged:
        submodules = [each for each in module.modules() if each is not module]
        if not any(hasattr(each, _OWN_FLAG) for each in submodules):
            layers.append(module)
    if plan.every > 1 and len(layers) < 2:
        keep_activations(model)
        raise ConfigError(
            f"{get_class_name(model)} switches checkpointing for all its layers at once, so every={plan.every} cannot be kept; "
            "name its blocks with blocks=[LayerClass], or leave every at 1"
        )
    for module in flagged:
        if hasattr(module, _OWN_FUNCTION):
            setattr(module, _OWN_FUNCTION, function)
    for index, layer in enumerate(layers):
        setattr(layer, _OWN_FLAG, index % plan.every == 0)
    return len(layers[:: plan.every])

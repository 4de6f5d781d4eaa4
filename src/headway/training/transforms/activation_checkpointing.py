"""Activation checkpointing: blocks of a model keep only their inputs, and compute the rest again in backward.

A block stays the object it was: its class is exchanged for a subclass whose `forward` runs through torch's (non-reentrant)
checkpoint, so names in the state dict, isinstance and the module tree do not change. Hooks on a block stay outside and run
once. Models with a switch of their own (transformers) are switched by it, because it also looks after their caches.

Source of the idea: Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from types import FunctionType
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from headway.config.engines import ActivationCheckpointing
from headway.errors import ConfigError, StateError, UnsupportedError
from headway.log import get_logger
from headway.strategies.parts import BARE_CLASS, find_blocks, outermost
from headway.training.prepared.model import reduce_to_bare
from headway.training.transforms.activation_offload import offloading

log = get_logger(__name__)

_KEY = "_headway_checkpoint"
_FLAG = "gradient_checkpointing"  # what transformers' modules call their part of the switch
_FUNCTION = "_gradient_checkpointing_func"

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
    """Mixed in before a block's class."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The block's own forward; where gradients are wanted, without keeping what it computes."""
        run = super().forward  # type: ignore[misc]
        if not torch.is_grad_enabled():
            return run(*args, **kwargs)
        return self._headway_checkpoint(run, *args, **kwargs)  # type: ignore[attr-defined]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle and deepcopy give the bare class, without checkpointing."""
        return reduce_to_bare(self, super().__reduce_ex__(protocol), self.__dict__[BARE_CLASS], (_KEY, BARE_CLASS))


def checkpoint_activations(model: torch.nn.Module, plan: ActivationCheckpointing, device: torch.device) -> int:
    """Let the model's blocks drop their activations, in place; what an earlier call did is undone first.

    Args:
        model: prepared or not.
        plan: which blocks, what they keep, and where.
        device: what the model computes on; on a CPU nothing is offloaded, which is said once.

    Returns:
        How many blocks are checkpointed.

    Raises:
        ConfigError: no blocks are found, or a block cannot be extended.
    """
    keep_activations(model)
    offload = plan.offload and device.type != "cpu"
    if plan.offload and not offload:
        log.warning_once(
            "activations are not offloaded: the model computes on the CPU, where they are in host memory already"
        )
    function = _function(plan, offload)
    if function is None:
        return 0
    switches = [] if plan.blocks or plan.policy == "keep_all" else list(outermost([model], _has_switch))
    count = sum(_switch(part, plan, function) for part in switches)
    inside = {id(module) for part in switches for module in part.modules()}
    blocks = [block for block in find_blocks(model, plan.blocks) if id(block) not in inside]
    if not blocks and not count:
        raise ConfigError(
            f"no repeated blocks were found in {type(model).__name__}: its ModuleLists, Sequentials and ModuleDicts hold no two "
            "modules of one class that have parts of their own. Name the blocks: blocks=[BlockClass] or blocks=['layers.0', ...]"
        )
    chosen = blocks[:: plan.every]
    for block in chosen:
        _attach(block, function)
    return count + len(chosen)


def keep_activations(model: torch.nn.Module) -> None:
    """Undo `checkpoint_activations`; a model without checkpointing is left alone."""
    for part in outermost([model], _has_switch):
        if any(getattr(module, _FLAG, False) is True for module in part.modules()):
            disable = getattr(part, "activation_checkpointing_disable", None) or part.gradient_checkpointing_disable
            disable()  # type: ignore[operator]
    for module in model.modules():
        if _KEY not in module.__dict__:
            continue
        if type(module).__mro__[1] is not CheckpointedBlock:
            raise StateError(
                f"a block of class {type(module).__name__} was prepared by itself after its activations were checkpointed; "
                "call accelerator.free_memory() first"
            )
        module.__class__ = module.__dict__.pop(BARE_CLASS)
        del module.__dict__[_KEY]


def repeat_checkpointing(
    model: torch.nn.Module,
    copy: torch.nn.Module,
    plan: ActivationCheckpointing | None,
    prepared: Sequence[torch.nn.Module],
) -> None:
    """Let the blocks of a copy recompute as the model's do, or will once it is prepared: copies are made without it.

    Args:
        model: checkpointed or not.
        copy: of it, with the same modules.
        plan: what prepare() does to models.
        prepared: the models that went through it.

    Raises:
        UnsupportedError: activations are also offloaded.
    """
    is_planned = plan is not None and all(model is not known for known in prepared)
    functions = [module.__dict__.get(key) for module in model.modules() for key in (_KEY, _FUNCTION)]
    if (is_planned and plan is not None and plan.offload) or any(map(_is_offloading, functions)):
        raise UnsupportedError(
            "activations are offloaded to host memory, which cannot be forecast yet; leave offload out"
        )
    if is_planned and plan is not None:
        checkpoint_activations(copy, plan, torch.device("cpu"))
        return
    for module, twin in zip(model.modules(), copy.modules(), strict=True):
        if _KEY in module.__dict__:
            _attach(twin, module.__dict__[_KEY])


def _is_offloading(function: Any) -> bool:
    return isinstance(function, partial) and _offload.cache_info().currsize > 0 and function.func is _offload()


# ---------------------------------------------------------------- what a block runs through


def _function(plan: ActivationCheckpointing, offload: bool) -> Callable[..., Any] | None:
    """What calls a block's forward; None where nothing is left to do."""
    if plan.policy == "keep_all":
        return partial(_offload(), _call) if offload else None
    options: dict[str, Any] = {"use_reentrant": False}
    policy = _keeper(_MATMUL + _ATTENTION) if plan.policy == "keep_matmul" else plan.policy
    policy = _keeper(_ATTENTION) if policy == "keep_attention" else policy
    if callable(policy):
        # Under torch.compile only this form is understood.
        options["context_fn"] = partial(create_selective_checkpoint_contexts, policy)
    function = partial(checkpoint, **options)
    return partial(_offload(), function) if offload else function


def _keeper(names: tuple[str, ...]) -> Callable[..., CheckpointPolicy]:
    packets = [getattr(torch.ops.aten, name) for name in names if hasattr(torch.ops.aten, name)]
    kept = {getattr(packet, overload) for packet in packets for overload in packet.overloads()}

    def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if operation in kept else CheckpointPolicy.PREFER_RECOMPUTE

    return policy


def _call(run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return run(*args, **kwargs)


@cache
def _offload() -> Callable[..., Any]:
    """`_offloaded`, which no compiled graph can hold: the copies have a stream of their own."""
    # Not a decorator: it imports torch's compiler, which takes as long as importing torch.
    disabled: Callable[..., Any] = torch.compiler.disable(_offloaded)  # type: ignore[no-untyped-call]
    return disabled


def _offloaded(function: Callable[..., Any], run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call with everything that autograd saves moved to host memory; under `checkpoint` those are the block's inputs."""
    with offloading(block=_block_of(run)):
        return function(run, *args, **kwargs)


def _block_of(run: Any) -> torch.nn.Module | None:
    """Whose forward this is: a module's method, or what models with a switch of their own make of one by `partial`."""
    while isinstance(run, partial):
        if run.args and isinstance(run.args[0], torch.nn.Module):
            return run.args[0]
        run = run.func
    owner = getattr(run, "__self__", None)
    return owner if isinstance(owner, torch.nn.Module) else None


@cache
def _checkpointed(bare: Any) -> type:
    """The subclass of a block's class; one for all its blocks, so that they are compiled once, and not each by itself."""
    run: Any = CheckpointedBlock.forward
    # torch keeps compilations by code, of which blocks of other classes use up none.
    forward = FunctionType(run.__code__.replace(), run.__globals__, run.__name__, run.__defaults__, run.__closure__)
    added = {"__module__": bare.__module__, "__doc__": bare.__doc__, "forward": forward}
    return type(bare.__name__, (CheckpointedBlock, bare), added)


def _attach(block: torch.nn.Module, function: Callable[..., Any]) -> None:
    bare: Any = type(block)
    if "forward" in block.__dict__:
        raise ConfigError(
            f"a block of class {bare.__name__} has a forward of its own on the object (compiled or patched), which would "
            "run past the checkpoint; checkpoint activations before that, or take it off"
        )
    try:
        block.__class__ = _checkpointed(bare)
    except TypeError as error:
        raise ConfigError(f"the class {bare.__qualname__} cannot be extended: {error}; name other blocks") from error
    block.__dict__[_KEY] = function
    block.__dict__[BARE_CLASS] = bare


# ---------------------------------------------------------------- models with a switch of their own


def _has_switch(module: torch.nn.Module) -> bool:
    return bool(getattr(module, "supports_gradient_checkpointing", False)) and hasattr(
        module, "gradient_checkpointing_enable"
    )


def _switch(model: torch.nn.Module, plan: ActivationCheckpointing, function: Callable[..., Any]) -> int:
    """Use the model's own switch, then see to `every` and to our function; returns how many layers it means."""
    enable: Any = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})
    flagged = [module for module in model.modules() if hasattr(module, _FLAG)]
    layers = [
        module for module in flagged if not any(hasattr(part, _FLAG) for part in module.modules() if part is not module)
    ]
    if plan.every > 1 and len(layers) < 2:
        keep_activations(model)
        raise ConfigError(
            f"{type(model).__name__} switches checkpointing for all its layers at once, so every={plan.every} cannot be kept; "
            "name its blocks with blocks=[LayerClass], or leave every at 1"
        )
    for module in flagged:
        if hasattr(module, _FUNCTION):
            setattr(module, _FUNCTION, function)
    for index, layer in enumerate(layers):
        setattr(layer, _FLAG, index % plan.every == 0)
    return len(layers[:: plan.every])

"""Methods of PEFT and transformers models that need whole tensors, adapted to sharded models.

`save_pretrained` gathers the tensors that it writes. Methods that add, remove or merge adapters raise an error, because
they would change only this rank's shards or add parameters whose gradients no strategy reduces. `get_peft_model` of a
sharded model raises an error, too.
"""

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.modules.module import register_module_module_registration_hook

from headway.core.runtime import process
from headway.core.runtime.process import ProcessRuntime
from headway.core.strategies.base import Strategy
from headway.core.strategies.blocks import get_class_name
from headway.core.strategies.fully_sharded.dtensors import copy_full_values
from headway.core.training.full_weights import FullWeights
from headway.core.training.prepared.model import PreparedShard
from headway.core.weights.module_copy import copy_with_tensors
from headway.errors import UnsupportedError
from headway.extras.adapter_tensors import (
    PROMPT_ENCODERS,
    gather_written_tensors,
    is_peft_model,
    replace_encoders,
    run_on_rank_0,
)

_ADD_REFUSAL = (
    "{call}: {name} is prepared, and the layout {layout} has sharded the adapters that it had then. A new one would get no gradients "
    "of the other ranks. Add all adapters before prepare(), and choose one with model.set_adapter(name). load_adapter(folder, name) "
    "loads values into an adapter that exists"
)
_MERGE_REFUSAL = (
    "{call}: {name} is prepared, and each rank of the layout {layout} has a part of its matrices. For merged weights, use "
    "accelerator.stream_weights(model, merge_adapters=True). Or save the adapter with model.save_pretrained(folder), and merge it "
    "in one process: PeftModel.from_pretrained(base, folder).merge_and_unload()"
)
_REFUSALS = {
    "add_adapter": _ADD_REFUSAL,
    "add_weighted_adapter": _ADD_REFUSAL,
    "delete_adapter": "{call}: {name} is prepared, and the layout {layout} has sharded its adapters. Choose another one with "
    "model.set_adapter(name), or save only some: model.save_pretrained(folder, selected_adapters=[name])",
    "merge_adapter": _MERGE_REFUSAL,
    "merge_and_unload": _MERGE_REFUSAL,
    "unmerge_adapter": _MERGE_REFUSAL,
    "unload": _MERGE_REFUSAL,
}
"""Error messages of the PeftModel methods that cannot be called on a sharded model, by method name."""


class LateAdapterCheck:
    """Hook that raises an error if PEFT adds adapters to a sharded model. There is one per process runtime."""

    def __init__(self) -> None:
        self._hook: Any = None

    def register_hook(self) -> None:
        """Register the hook with torch. Later calls do nothing."""
        if self._hook is None:
            self._hook = register_module_module_registration_hook(_refuse_tuner)
            process.release_at_end(self.release)

    def release(self) -> None:
        """Remove the hook."""
        self._hook.remove()
        self._hook = None


def _refuse_tuner(module: torch.nn.Module, name: str, submodule: torch.nn.Module | None) -> None:
    """Raise an error if a module that adds PEFT's adapters gets a sharded model as its submodule.

    torch calls this hook for each submodule that any module registers.

    Args:
        module: Module that registers a submodule.
        name: Name of the submodule.
        submodule: Submodule that is registered, or None.

    Raises:
        UnsupportedError: If the submodule is a sharded model, and the module is one of PEFT's tuners.
    """
    if not isinstance(submodule, PreparedShard) or (peft := sys.modules.get("peft")) is None:
        return
    if isinstance(module, peft.tuners.tuners_utils.BaseTuner):
        raise UnsupportedError(
            f"{type(submodule).__name__} is prepared, and its layout has sharded it, so PEFT cannot add adapters to it. Call "
            "get_peft_model(model, config) or model.add_adapter(config) before prepare()"
        )


def adapt_methods(model: torch.nn.Module, strategy: Strategy, runtime: ProcessRuntime) -> dict[str, Any]:
    """Return replacements, by name, for the methods of a user's model that do not work on a sharded model.

    Args:
        model: User's model, which has a `save_pretrained` method.
        strategy: Strategy that has sharded the model.
        runtime: Runtime of this process.
    """
    runtime.scope.get_or_create(LateAdapterCheck).register_hook()
    replacements: dict[str, Any] = {"save_pretrained": wrap_save(type(model).save_pretrained, strategy, runtime)}  # type: ignore[attr-defined]
    if is_peft_model(model):
        replacements |= {method: _make_refusal(method, text, strategy.name) for method, text in _REFUSALS.items()}
        replacements["load_adapter"] = _wrap_load(type(model).load_adapter, strategy.name)  # type: ignore[attr-defined]
    return replacements


def _make_refusal(method: str, text: str, layout: str) -> Callable[..., Any]:
    """Return a method that only raises UnsupportedError.

    Args:
        method: Name of the method.
        text: Error message with the placeholders `call`, `name` (of the model's class) and `layout`.
        layout: Name of the layout.
    """

    def raise_refusal(model: Any, *args: Any, **kwargs: Any) -> Any:
        raise UnsupportedError(text.format(call=f"{method}()", name=get_class_name(model), layout=layout))

    raise_refusal.__name__ = method
    return raise_refusal


# ---------------------------------------------------------------- loading


def _wrap_load(load: Callable[..., Any], layout: str) -> Callable[..., Any]:
    """Return a class's `load_adapter` method, wrapped so that it loads values into the shards of an existing adapter.

    The wrapped method raises UnsupportedError if the model has no adapter of the given name.

    Args:
        load: Method to wrap.
        layout: Name of the layout, for messages.
    """
    signature = inspect.signature(load)

    @functools.wraps(load)
    def load_adapter(model: Any, *args: Any, **kwargs: Any) -> Any:
        adapter = signature.bind(model, *args, **kwargs).arguments["adapter_name"]
        if adapter not in model.peft_config:
            call = f"load_adapter(..., {adapter!r})"
            raise UnsupportedError(_ADD_REFUSAL.format(call=call, name=get_class_name(model), layout=layout))
        with _load_encoders(model):
            return load(model, *args, **kwargs)

    return load_adapter


@contextmanager
def _load_encoders(model: Any) -> Iterator[None]:
    """Return a context in which prompt encoders can load full tensors, whose values are copied into this rank's shards.

    PEFT loads the encoders of prompt tuning without the model's `load_state_dict`.

    Args:
        model: Sharded PeftModel.
    """
    shards = {name: each for name, each in model.named_parameters() if name.startswith(f"{PROMPT_ENCODERS}.")}
    zeros = {name: torch.zeros(each.shape, dtype=each.dtype) for name, each in shards.items()}
    with replace_encoders(model, zeros):
        full_tensors = dict(getattr(model, PROMPT_ENCODERS).named_parameters(prefix=PROMPT_ENCODERS)) if shards else {}
        versions = {name: tensor._version for name, tensor in full_tensors.items()}
        yield
    with torch.no_grad():
        for name, tensor in full_tensors.items():
            if tensor._version != versions[name]:  # values were copied into it
                copy_full_values(shards[name].detach(), tensor.detach())


# ---------------------------------------------------------------- saving


def wrap_save(save: Callable[..., Any], strategy: Strategy, runtime: ProcessRuntime) -> Callable[..., Any]:
    """Return a class's `save_pretrained` method, wrapped so that only rank 0 writes, and writes whole tensors.

    If the caller passes no `state_dict`, all ranks gather the tensors that the method writes. If the caller passes one,
    ranks with an empty state dict write nothing: `get_state_dict()` returns all tensors on rank 0 and none on the other
    ranks. A method that takes no state dict, such as that of sentence-transformers, is called on a copy of the model with
    whole tensors, because the modules in it read their own tensors.

    Args:
        save: Method to wrap.
        strategy: Strategy that has sharded the model.
        runtime: Runtime of this process.
    """
    signature = inspect.signature(save)
    weights = FullWeights(strategy, runtime)

    @functools.wraps(save)
    def save_pretrained(model: Any, *args: Any, **kwargs: Any) -> Any:
        bound = signature.bind_partial(model, *args, **kwargs)
        # `bound` nests the keyword arguments that a method accepts as **kwargs, so they are added by name.
        arguments = {**kwargs, **bound.arguments}
        state = arguments.get("state_dict")
        if isinstance(state, Mapping):
            return _save_gathered(save, model, state, args, kwargs) if state else None
        if "state_dict" not in signature.parameters and not is_peft_model(model):
            return _gather_and_save(
                model,
                arguments,
                weights,
                strategy,
                lambda gathered: save(copy_with_tensors(model, gathered), *args, **kwargs),
            )

        def write_files(gathered: Mapping[str, torch.Tensor]) -> Any:
            if "state_dict" not in signature.parameters:  # PEFT passes its keyword arguments on
                return _save_gathered(save, model, gathered, args, {**kwargs, "state_dict": gathered})
            bound.arguments["state_dict"] = gathered
            return _save_gathered(save, model, gathered, bound.args[1:], bound.kwargs)

        return _gather_and_save(model, arguments, weights, strategy, write_files)

    return save_pretrained


def _save_gathered(
    save: Callable[..., Any], model: Any, state: Mapping[str, torch.Tensor], args: Any, kwargs: Mapping[str, Any]
) -> Any:
    with replace_encoders(model, state):
        return save(model, *args, **kwargs)


def _gather_and_save(
    model: Any,
    arguments: Mapping[str, Any],
    weights: FullWeights,
    strategy: Strategy,
    write: Callable[[Mapping[str, torch.Tensor]], Any],
) -> Any:
    """Gather the tensors that a call of `save_pretrained` writes, and write them on rank 0. Every rank calls it.

    Args:
        model: Sharded model.
        arguments: Arguments of the call by name.
        weights: Access to the model's full tensors.
        strategy: Strategy that has sharded the model.
        write: Function that writes a state dict.

    Returns:
        Return value of `write` on rank 0, None on the other ranks.

    Raises:
        CheckpointError: On the other ranks, if rank 0 fails.
    """
    tensors = weights.export(model, "save_pretrained", is_safe=False)
    state = gather_written_tensors(model, tensors, strategy.everyone, arguments)
    return run_on_rank_0(lambda: write(state), strategy.everyone)

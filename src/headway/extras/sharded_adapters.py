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
from headway.core.runtime.collectives.checked import Collectives
from headway.core.runtime.process import ProcessRuntime
from headway.core.strategies.base import Strategy
from headway.core.strategies.fully_sharded.dtensors import put_whole
from headway.core.training.prepared.model import PreparedShard
from headway.core.training.weights import WholeWeights, gather_state
from headway.core.weights.pieces import is_spread
from headway.core.weights.twin import make_twin
from headway.errors import CheckpointError, UnsupportedError

_ENCODERS = "prompt_encoder"
"""Name of a PeftModel's attribute for its prompt encoders, the modules whose output it saves for prompt tuning."""
_ADD = (
    "{call}: {name} is prepared, and the layout {layout} has sharded the adapters that it had then. A new one would get no gradients "
    "of the other ranks. Add all adapters before prepare(), and choose one with model.set_adapter(name). load_adapter(folder, name) "
    "loads values into an adapter that exists"
)
_MERGE = (
    "{call}: {name} is prepared, and each rank of the layout {layout} has a part of its matrices. For merged weights, use "
    "accelerator.stream_weights(model, merge_adapters=True). Or save the adapter with model.save_pretrained(folder), and merge it "
    "in one process: PeftModel.from_pretrained(base, folder).merge_and_unload()"
)
_REFUSED = {
    "add_adapter": _ADD,
    "add_weighted_adapter": _ADD,
    "delete_adapter": "{call}: {name} is prepared, and the layout {layout} has sharded its adapters. Choose another one with "
    "model.set_adapter(name), or save only some: model.save_pretrained(folder, selected_adapters=[name])",
    "merge_adapter": _MERGE,
    "merge_and_unload": _MERGE,
    "unmerge_adapter": _MERGE,
    "unload": _MERGE,
}
"""Error messages of the PeftModel methods that cannot be called on a sharded model, by method name."""


class LateAdapters:
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
    runtime.scope.get_or_create(LateAdapters).register_hook()
    made: dict[str, Any] = {"save_pretrained": _wrap_save(type(model).save_pretrained, strategy, runtime)}  # type: ignore[attr-defined]
    if _is_peft_model(model):
        made |= {method: _make_refusal(method, text, strategy.name) for method, text in _REFUSED.items()}
        made["load_adapter"] = _wrap_load(type(model).load_adapter, strategy.name)  # type: ignore[attr-defined]
    return made


def _is_peft_model(model: Any) -> bool:
    """Whether the model is a PeftModel. False if PEFT has not been imported. This function does not import it."""
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(model, peft.PeftModel)


def _saves_only_adapters(model: Any) -> bool:
    """Whether the model's `save_pretrained` writes its adapters without the base.

    True for a PeftModel, and for a transformers model with adapters (`model.add_adapter`). Other libraries, such as
    diffusers, set the same attributes, but write the base, too.
    """
    transformers = sys.modules.get("transformers")
    is_transformers_model = transformers is not None and isinstance(model, transformers.PreTrainedModel)
    return _is_peft_model(model) or (is_transformers_model and getattr(model, "_hf_peft_config_loaded", False))


def _make_refusal(method: str, text: str, layout: str) -> Callable[..., Any]:
    def raise_refusal(model: Any, *args: Any, **kwargs: Any) -> Any:
        raise UnsupportedError(text.format(call=f"{method}()", name=type(model).__name__, layout=layout))

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
            raise UnsupportedError(_ADD.format(call=call, name=type(model).__name__, layout=layout))
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
    own = {name: each for name, each in model.named_parameters() if name.startswith(f"{_ENCODERS}.")}
    empty = {name: torch.zeros(each.shape, dtype=each.dtype) for name, each in own.items()}
    with _replace_encoders(model, empty):
        twins = dict(getattr(model, _ENCODERS).named_parameters(prefix=_ENCODERS)) if own else {}
        before = {name: twin._version for name, twin in twins.items()}
        yield
    with torch.no_grad():
        for name, twin in twins.items():
            if twin._version != before[name]:  # values were copied into it
                put_whole(own[name].detach(), twin.detach())


# ---------------------------------------------------------------- saving


def _wrap_save(save: Callable[..., Any], strategy: Strategy, runtime: ProcessRuntime) -> Callable[..., Any]:
    """Return a class's `save_pretrained` method, wrapped so that only rank 0 writes, and writes whole tensors.

    If the caller passes no `state_dict`, all ranks gather the tensors that the method writes. If the caller passes one,
    ranks with an empty state dict write nothing: `get_state_dict()` returns all tensors on rank 0 and none on the other
    ranks. A method that takes no state dict is called unchanged.

    Args:
        save: Method to wrap.
        strategy: Strategy that has sharded the model.
        runtime: Runtime of this process.
    """
    signature = inspect.signature(save)
    weights = WholeWeights(strategy, runtime)

    @functools.wraps(save)
    def save_pretrained(model: Any, *args: Any, **kwargs: Any) -> Any:
        bound = signature.bind_partial(model, *args, **kwargs)
        given = {**kwargs, **bound.arguments}
        state = given.get("state_dict")
        if isinstance(state, Mapping):
            return _save_gathered(save, model, state, args, kwargs) if state else None
        if "state_dict" not in signature.parameters and not _is_peft_model(model):
            return save(model, *args, **kwargs)

        def write_files(state: Mapping[str, torch.Tensor]) -> Any:
            if "state_dict" not in signature.parameters:  # PEFT passes its keyword arguments on
                return _save_gathered(save, model, state, args, {**kwargs, "state_dict": state})
            bound.arguments["state_dict"] = state
            return _save_gathered(save, model, state, bound.args[1:], bound.kwargs)

        return _gather_and_save(model, given, weights, strategy, write_files)

    return save_pretrained


def _save_gathered(
    save: Callable[..., Any], model: Any, state: Mapping[str, torch.Tensor], args: Any, kwargs: Mapping[str, Any]
) -> Any:
    with _replace_encoders(model, state):
        return save(model, *args, **kwargs)


def _gather_and_save(
    model: Any,
    given: Mapping[str, Any],
    weights: WholeWeights,
    strategy: Strategy,
    write: Callable[[Mapping[str, torch.Tensor]], Any],
) -> Any:
    """Gather the tensors that a call of `save_pretrained` writes, and write them on rank 0. Every rank calls it.

    Args:
        model: Sharded model.
        given: Arguments of the call by name.
        weights: Access to the model's full tensors.
        strategy: Strategy that has sharded the model.
        write: Function that writes a state dict.

    Returns:
        Return value of `write` on rank 0, None on the other ranks.

    Raises:
        CheckpointError: On the other ranks, if rank 0 fails.
    """
    tensors = weights.export(model, "save_pretrained", is_safe=False)
    state = gather_written_tensors(model, tensors, strategy.everyone, given)
    return _run_on_main(lambda: write(state), strategy.everyone)


def gather_written_tensors(
    model: Any, tensors: Mapping[str, Any], everyone: Collectives, given: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Gather the tensors of a sharded model that its `save_pretrained` writes. Every rank must call this function.

    If only adapters are written, only they are gathered, because the base may be larger than the memory of one machine.

    Args:
        model: Sharded model.
        tensors: Tensors of the model by name, with sharded ones as shards.
        everyone: Collectives over all ranks.
        given: Arguments of `save_pretrained` by name. Default: None, only the folder is given.

    Returns:
        State dict for the argument `state_dict` of `save_pretrained`. On rank 0, gathered tensors are on the CPU, and
        sharded tensors that are not written are meta tensors. On other ranks, all sharded tensors are meta tensors.

    Raises:
        CheckpointError: On every rank, if ranks hold different tensors. If rank 0 fails to choose or gather the
            tensors, it raises its own error, and the other ranks raise CheckpointError.
    """
    placeholders = {
        name: torch.empty(each.shape, dtype=each.dtype, device="meta")
        for name, each in tensors.items()
        if is_spread(each)
    }
    chosen = set(tensors)
    if _saves_only_adapters(model):
        chosen = _run_on_main(
            lambda: _choose_adapter_tensors(model, {**tensors, **placeholders}, given or {}), everyone, is_shared=True
        )
    gathered = gather_state(((name, each) for name, each in tensors.items() if name in chosen), everyone)
    return {**tensors, **placeholders, **gathered}


def _run_on_main(act: Callable[[], Any], everyone: Any, is_shared: bool = False) -> Any:
    """Run a function on rank 0 while the other ranks wait for it. Return its result.

    Args:
        act: Function to run.
        everyone: Collectives over all ranks.
        is_shared: Whether all ranks return the result. If False, the other ranks return None. Default: False.

    Raises:
        CheckpointError: On the other ranks, if the function raises an exception on rank 0.
    """
    result: Any = None
    failure: Exception | None = None
    if everyone.rank == 0:
        try:
            result = act()
        except Exception as error:
            failure = error
    told, shared = everyone.broadcast_object(
        (None if failure is None else f"{type(failure).__name__}: {failure}", result if is_shared else None)
    )
    if failure is not None:
        raise failure
    if told is not None:
        raise CheckpointError(f"save_pretrained() failed on rank 0: {told}")
    return shared if is_shared else result


def _choose_adapter_tensors(model: Any, state: Mapping[str, torch.Tensor], given: Mapping[str, Any]) -> set[str]:
    """Return the names of the tensors that PEFT writes for the adapters, so that the base model is not gathered.

    A PeftModel writes all its adapters unless `selected_adapters` is given. A transformers model with adapters writes
    the active one.

    Args:
        model: PeftModel, or transformers model with adapters of its own.
        state: State dict of the model, in which sharded tensors have no values.
        given: Arguments of `save_pretrained` by name.
    """
    from peft import get_peft_model_state_dict

    found: set[str] = set()
    names = {id(tensor): name for name, tensor in state.items()}
    own = {name: each for name, each in state.items() if name.startswith(f"{_ENCODERS}.")}
    encoders = {name: torch.zeros(each.shape, dtype=each.dtype) for name, each in own.items()}
    if _is_peft_model(model):
        adapters = given.get("selected_adapters") or model.peft_config
    else:
        adapters = model.active_adapters()
    for adapter in adapters:
        with _replace_encoders(model, encoders):
            written = get_peft_model_state_dict(
                model,
                state_dict=dict(state),
                adapter_name=adapter,
                save_embedding_layers=given.get("save_embedding_layers", "auto"),
            )
        found |= {names[id(tensor)] for tensor in written.values() if id(tensor) in names}
    return found | encoders.keys()


@contextmanager
def _replace_encoders(model: Any, state: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Return a context in which prompt encoders have full tensors.

    PEFT runs the encoders on this rank to save their output.

    Args:
        model: Model, with or without prompt encoders.
        state: Full tensors by name.
    """
    encoders = getattr(model, _ENCODERS, None)
    if not isinstance(encoders, torch.nn.ModuleDict):
        yield
        return
    before = dict(encoders._modules)
    try:
        for name, module in before.items():
            if module is not None:
                prefix = f"{_ENCODERS}.{name}."
                values = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
                encoders._modules[name] = make_twin(module, values)
        yield
    finally:
        encoders._modules.update(before)

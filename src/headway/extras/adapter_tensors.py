"""Tensors that `save_pretrained` of a sharded model writes, gathered on rank 0: of adapters, without their base."""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from headway.core.runtime.collectives.checked import Collectives
from headway.core.training.gathered_tensors import gather_state_dict
from headway.core.weights.module_copy import copy_with_tensors
from headway.core.weights.pieces import is_sharded
from headway.errors import CheckpointError

PROMPT_ENCODERS = "prompt_encoder"
"""Name of a PeftModel's attribute for its prompt encoders, the modules whose output it saves for prompt tuning."""


def is_peft_model(model: Any) -> bool:
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
    return is_peft_model(model) or (is_transformers_model and getattr(model, "_hf_peft_config_loaded", False))


def gather_written_tensors(
    model: Any, tensors: Mapping[str, Any], everyone: Collectives, arguments: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Gather the tensors of a sharded model that its `save_pretrained` writes. Every rank must call this function.

    If only adapters are written, only they are gathered, because the base may be larger than the memory of one machine.

    Args:
        model: Sharded model.
        tensors: Tensors of the model by name, with sharded ones as shards.
        everyone: Collectives over all ranks.
        arguments: Arguments of `save_pretrained` by name. Default: None, only the folder is given.

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
        if is_sharded(each)
    }
    names_to_write = set(tensors)
    if _saves_only_adapters(model):
        names_to_write = run_on_rank_0(
            lambda: _choose_adapter_tensors(model, {**tensors, **placeholders}, arguments or {}),
            everyone,
            is_shared=True,
        )
    gathered = gather_state_dict(((name, each) for name, each in tensors.items() if name in names_to_write), everyone)
    return {**tensors, **placeholders, **gathered}  # PEFT expects a complete state dict


def run_on_rank_0(function: Callable[[], Any], everyone: Any, is_shared: bool = False) -> Any:
    """Run a function on rank 0 while the other ranks wait for it. Return its result.

    Args:
        function: Function to run.
        everyone: Collectives over all ranks.
        is_shared: Whether all ranks return the result. If False, the other ranks return None. Default: False.

    Raises:
        CheckpointError: On the other ranks, if the function raises an exception on rank 0.
    """
    result: Any = None
    failure: Exception | None = None
    if everyone.rank == 0:
        try:
            result = function()
        except Exception as error:
            failure = error
    own_text = None if failure is None else f"{type(failure).__name__}: {failure}"
    failure_text, shared_result = everyone.broadcast_object((own_text, result if is_shared else None))
    if failure is not None:
        raise failure
    if failure_text is not None:
        raise CheckpointError(f"save_pretrained() failed on rank 0: {failure_text}")
    return shared_result if is_shared else result


def _choose_adapter_tensors(model: Any, state: Mapping[str, torch.Tensor], arguments: Mapping[str, Any]) -> set[str]:
    """Return the names of the tensors that PEFT writes for the adapters, so that the base model is not gathered.

    A PeftModel writes all its adapters unless `selected_adapters` is given. A transformers model with adapters writes
    the active one.

    Args:
        model: PeftModel, or transformers model with adapters of its own.
        state: State dict of the model, in which sharded tensors have no values.
        arguments: Arguments of `save_pretrained` by name.
    """
    from peft import get_peft_model_state_dict

    names_to_write: set[str] = set()
    # PEFT renames the tensors, so they are recognized by identity.
    names_by_id = {id(tensor): name for name, tensor in state.items()}
    # It also runs the prompt encoders, which therefore need values. Their own tensors are always written.
    encoder_tensors = {
        name: torch.zeros(each.shape, dtype=each.dtype)
        for name, each in state.items()
        if name.startswith(f"{PROMPT_ENCODERS}.")
    }
    if is_peft_model(model):
        adapters = arguments.get("selected_adapters") or model.peft_config
    else:
        adapters = model.active_adapters()
    for adapter in adapters:
        with replace_encoders(model, encoder_tensors):
            written_tensors = get_peft_model_state_dict(
                model,
                state_dict=dict(state),
                adapter_name=adapter,
                save_embedding_layers=arguments.get("save_embedding_layers", "auto"),
            )
        names_to_write |= {names_by_id[id(tensor)] for tensor in written_tensors.values() if id(tensor) in names_by_id}
    return names_to_write | encoder_tensors.keys()


@contextmanager
def replace_encoders(model: Any, state: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Return a context in which prompt encoders have full tensors.

    PEFT runs the encoders on this rank to save their output.

    Args:
        model: Model, with or without prompt encoders.
        state: Full tensors by name.
    """
    encoders = getattr(model, PROMPT_ENCODERS, None)
    if not isinstance(encoders, torch.nn.ModuleDict):
        yield
        return
    original_modules = dict(encoders._modules)
    try:
        for name, module in original_modules.items():
            if module is not None:
                prefix = f"{PROMPT_ENCODERS}.{name}."
                values = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
                encoders._modules[name] = copy_with_tensors(module, values)
        yield
    finally:
        encoders._modules.update(original_modules)

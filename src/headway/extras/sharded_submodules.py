"""`save_pretrained` of the transformers models inside a sharded model, such as `model.encoder.save_pretrained(folder)`."""

from typing import Any
from weakref import WeakKeyDictionary

import torch

from headway.common import scope
from headway.core.runtime.process import ProcessRuntime
from headway.core.strategies.base import Strategy
from headway.core.strategies.blocks import extend_class
from headway.core.training.prepared.model import PreparedModel
from headway.extras.sharded_adapters import wrap_save


class SubmoduleSaves:
    """Wrapped `save_pretrained` methods of the process's sharded submodules, by submodule.

    Copies of a submodule, which have whole tensors, are not included.
    """

    def __init__(self) -> None:
        self.methods: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


class GatheringSave:
    """Mixin that precedes the class of a submodule whose `save_pretrained` must write whole tensors."""

    def save_pretrained(self, *args: Any, **kwargs: Any) -> Any:
        """Call the class's own `save_pretrained` on rank 0, with the submodule's full tensors. All ranks must call it.

        If `state_dict` is passed, nothing is gathered, and ranks with an empty state dict write nothing. On a copy of the
        submodule that already has full tensors, the class's own method is called directly.

        Args:
            args: Positional arguments of the class's own method.
            kwargs: Keyword arguments of the class's own method.

        Returns:
            Return value of the class's own method on the rank that writes, else None.

        Raises:
            CheckpointError: On the other ranks, if rank 0 fails.
            StateError: If the process group has ended.
            UnsupportedError: If only some ranks make the call.
        """
        save = scope.get_or_create(SubmoduleSaves).methods.get(self)
        if save is None:
            return super().save_pretrained(*args, **kwargs)  # type: ignore[misc]
        return save(self, *args, **kwargs)


def adapt_submodules(model: torch.nn.Module, strategy: Strategy, runtime: ProcessRuntime) -> None:
    """Make `save_pretrained` of all submodules that have this method gather the tensors that it writes.

    Args:
        model: User's model.
        strategy: Strategy that has sharded the model.
        runtime: Runtime of this process.
    """
    methods = scope.get_or_create(SubmoduleSaves).methods
    for module in model.modules():
        save: Any = getattr(type(module), "save_pretrained", None)
        if module is model or not callable(save) or isinstance(module, PreparedModel):
            continue
        if not isinstance(module, GatheringSave):
            extend_class(module, GatheringSave)
        else:  # prepared before, by another strategy
            save = super(GatheringSave, type(module)).save_pretrained  # type: ignore[misc]
        methods[module] = wrap_save(save, strategy, runtime)

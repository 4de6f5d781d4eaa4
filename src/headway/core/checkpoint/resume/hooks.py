"""Hooks of the script that run in saves and loads of checkpoints."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch.utils.hooks import RemovableHandle

from headway.core.checkpoint.state import CollectedState

SaveHook = Callable[[list[torch.nn.Module], list[dict[str, torch.Tensor]], str], None]
LoadHook = Callable[[list[torch.nn.Module], str], None]


class CheckpointHooks:
    """Registry of save hooks and load hooks.

    Args:
        get_final_hook: Function that returns the save hook to call after those of `add_save_hook`, or None to call no
            further hook. It is called at each save.
    """

    def __init__(self, get_final_hook: Callable[[], SaveHook | None]) -> None:
        # By the ID that torch's `RemovableHandle` gives each hook, in the order in which they are called.
        self._save_hooks: OrderedDict[int, SaveHook] = OrderedDict()
        self._load_hooks: OrderedDict[int, LoadHook] = OrderedDict()
        self._get_final_hook = get_final_hook

    def add_save_hook(self, hook: SaveHook) -> RemovableHandle:
        """Register a hook that each save calls before any file of the checkpoint is written, on every rank that saves.

        Args:
            hook: Function of the models, their state dicts, and the staging directory. The weights of a model whose
                state dict it removes from the list are not saved.

        Returns:
            Handle that removes the hook.
        """
        handle = RemovableHandle(self._save_hooks)
        self._save_hooks[handle.id] = hook
        return handle

    def add_load_hook(self, hook: LoadHook) -> RemovableHandle:
        """Register a hook that each load calls, and return a handle that removes it.

        Args:
            hook: Function of the models and the checkpoint's folder. A model that it removes from the list is not
                loaded.
        """
        handle = RemovableHandle(self._load_hooks)
        self._load_hooks[handle.id] = hook
        return handle

    def list_save_hooks(self, extra_hook: SaveHook | None) -> list[SaveHook]:
        """Return the hooks of a save, in the order in which they are called.

        Args:
            extra_hook: Hook to call before the final hook, or None.
        """
        later_hooks = (extra_hook, self._get_final_hook())
        return [*self._save_hooks.values(), *(hook for hook in later_hooks if hook is not None)]

    def list_load_hooks(self) -> tuple[LoadHook, ...]:
        """Return the load hooks, in the order in which they are called."""
        return tuple(self._load_hooks.values())

    def call_load_hooks(self, models: list[torch.nn.Module], folder: Path) -> None:
        """Call the load hooks with another program's checkpoint.

        Args:
            models: Models to load. A hook may remove from this list the models that it has loaded itself.
            folder: Folder of the checkpoint.
        """
        for hook in self._load_hooks.values():
            hook(models, str(folder))


def make_staging_hooks(
    hooks: Sequence[SaveHook], models: list[torch.nn.Module], collected: CollectedState
) -> list[Callable[[Path], None]]:
    """Return functions of the staging directory, each of which calls one save hook.

    The last function removes the weights from `collected` that hooks have saved themselves.

    Args:
        hooks: Save hooks.
        models: Prepared models, which the hooks receive.
        collected: State of the save, from which weights are removed.
    """
    state_dicts = [
        {
            name.split("/", 2)[2]: tensor
            for name, tensor in collected.tensors.items()
            if name.startswith(f"model/{index}/")
        }
        for index in range(len(models))
    ]
    all_state_dicts = list(state_dicts)

    def call_hook(hook: SaveHook, staging: Path) -> None:
        hook(models, state_dicts, str(staging))

    def remove_saved_weights(staging: Path) -> None:
        for index, state_dict in enumerate(all_state_dicts):
            if not any(state_dict is each for each in state_dicts):  # a hook has removed it from the list
                for name in state_dict:
                    del collected.tensors[f"model/{index}/{name}"]
                for name in [each for each in collected.aliases if each.startswith(f"model/{index}/")]:
                    del collected.aliases[name]

    return [*(partial(call_hook, hook) for hook in hooks), remove_saved_weights]

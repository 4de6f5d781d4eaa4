"""Warn if a resumed run does not train the same parameters as the saved run.

Whether a parameter is frozen (`requires_grad=False`) is the script's choice. As in torch, loading a checkpoint does not
change it. A script that unfreezes parameters at some epoch does so again after a load. Therefore parameters are
compared only at the first update after a load. Those that the script has frozen or unfrozen since the load are left
out.
"""

from collections.abc import Callable, Sequence

import torch

from headway.core.checkpoint.format.text import to_logical_name
from headway.core.training.hooks import StepHooks
from headway.core.weights.compiled import rename_bare_items
from headway.log import get_logger

log = get_logger(__name__)

_SHOWN = 3


class FrozenParameters:
    """Names of the frozen parameters of a run's models, with a check after a load.

    Args:
        models: Function that returns the models without wrappers.
        step_hooks: Hooks of the training step.
    """

    def __init__(self, models: Callable[[], Sequence[torch.nn.Module]], step_hooks: StepHooks) -> None:
        self._models = models
        self._step_hooks = step_hooks
        self._differing_at_load: dict[str, bool] = {}
        """Whether each parameter that differs from the saved run was frozen at the load, by "model index/name"."""
        self._at_load: dict[str, bool] = {}
        """Whether each parameter was frozen at the load, by "model index/name"."""
        self._checkpoint = ""

    def list_names(self) -> list[list[str]]:
        """Return the names of the frozen parameters, as one list per model."""
        return [
            [to_logical_name(name) for name, parameter in _list_parameters(model) if not parameter.requires_grad]
            for model in self._models()
        ]

    def compare_at_update(self, saved_names: Sequence[Sequence[str]] | None, checkpoint: str) -> None:
        """Schedule a comparison of this run's frozen parameters with those of a checkpoint, before the next update.

        Args:
            saved_names: For each model, the names of its frozen parameters in the saved run. None: unknown. If it is
                None or has another length than this run's models, nothing is compared.
            checkpoint: Name of the checkpoint, for the warning.
        """
        self._checkpoint = checkpoint
        self._differing_at_load = {}
        self._at_load = self._map_frozen()
        if saved_names is None or len(saved_names) != len(self._models()):
            return
        # Earlier versions of Headway saved names with the components of torch.compile, which the tensors' names lacked.
        frozen_names = [{name for name, _ in rename_bare_items((name, None) for name in each)} for each in saved_names]
        for key, is_frozen in self._at_load.items():
            index, _, name = key.partition("/")
            was_frozen = name in frozen_names[int(index)]
            if was_frozen != is_frozen:
                self._differing_at_load[key] = is_frozen
        if self._differing_at_load and self._warn_of_changes not in self._step_hooks.before_update:
            self._step_hooks.before_update.append(self._warn_of_changes)

    def _map_frozen(self) -> dict[str, bool]:
        """Return whether each parameter is frozen now, by "model index/name"."""
        return {
            f"{index}/{to_logical_name(name)}": not parameter.requires_grad
            for index, model in enumerate(self._models())
            for name, parameter in _list_parameters(model)
        }

    def _warn_of_changes(self) -> None:
        """Warn about parameters that are frozen only in this run or only in the saved run.

        Parameters that the script has frozen or unfrozen since the load are left out.
        """
        if not self._differing_at_load:
            return
        current, differing = self._map_frozen(), self._differing_at_load
        self._differing_at_load = {}
        unchanged = {key: is_frozen for key, is_frozen in differing.items() if current.get(key) == is_frozen}
        frozen_now = [key.partition("/")[2] for key, is_frozen in unchanged.items() if is_frozen]
        trained_now = [key.partition("/")[2] for key, is_frozen in unchanged.items() if not is_frozen]
        if current != self._at_load:
            # The script has frozen or unfrozen parameters since the load, probably by epoch. Those that it trains now
            # are then intended, so the warning names only frozen ones.
            trained_now = []
        lines = []
        if frozen_now:
            lines.append(
                f"{len(frozen_now)} parameters were trained and are frozen now ({', '.join(frozen_now[:_SHOWN])})"
            )
        if trained_now:
            lines.append(
                f"{len(trained_now)} parameters were frozen and are trained now ({', '.join(trained_now[:_SHOWN])})"
            )
        if lines:
            log.warning(
                "since %s was saved, %s. A checkpoint does not set requires_grad: set it in the script as it was, before the "
                "first update, depending on the epoch that resumes (`if epoch >= 3`, not `== 3`). If the change is intended, "
                "ignore this warning",
                self._checkpoint,
                "; ".join(lines),
            )


def _list_parameters(model: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
    """Return pairs of (name, parameter). The names do not depend on which submodules `torch.compile` has wrapped."""
    return rename_bare_items(model.named_parameters())

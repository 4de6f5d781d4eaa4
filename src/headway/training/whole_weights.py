"""A model's weights as whole tensors: the state dict that scripts ask for, and files of plain weights."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from headway.errors import ConfigError
from headway.runtime.conditional_calls import RankConditionalCallCheck
from headway.runtime.control_plane.attendance import Attendance
from headway.runtime.process import ProcessRuntime
from headway.strategies.base import Strategy
from headway.weights.export import save_pickled, save_weights
from headway.weights.gathered import save_gathered, whole_state
from headway.weights.pieces import is_spread


class WholeWeights:
    """Whole tensors of prepared models; where each rank holds a part, all ranks put them together.

    Args:
        strategy: gives the tensors.
        runtime: this process.
    """

    def __init__(self, strategy: Strategy, runtime: ProcessRuntime) -> None:
        self._strategy = strategy
        self._runtime = runtime
        self._lone_calls = RankConditionalCallCheck(runtime, strategy.name)

    def state_dict(self, model: torch.nn.Module) -> dict[str, torch.Tensor]:
        """The model's tensors by name; of a sharded model on rank 0 alone, on the host, and nothing elsewhere.

        Raises:
            UnsupportedError: the model is sharded, and only some ranks make the call.
        """
        self._begin(model, "get_state_dict")
        return whole_state(self._strategy.export_state(model), self._strategy.everyone)

    def save(self, model: torch.nn.Module, folder: str | Path, max_shard_size: int | str, is_safe: bool) -> None:
        """Write the weights from rank 0: as safetensors, or pickled in one file; where all ranks call it, they go on together.

        Under `if accelerator.is_main_process:` the rank that comes writes whole copies, when the others have gone on.

        Raises:
            UnsupportedError: as for `state_dict`.
            ConfigError: the state dict holds something besides tensors, and safetensors is wanted.
        """
        self._begin(model, "save_model")
        everyone = self._strategy.everyone
        tensors = dict(self._strategy.export_state(model))
        if is_safe:
            _refuse_objects(tensors)
        attended = self._runtime.scope.own(Attendance).who_comes("save_model")
        if is_safe and any(map(is_spread, tensors.values())):
            save_gathered(tensors.items(), folder, max_shard_size, everyone)
        else:
            tensors = whole_state(tensors.items(), everyone)
            if self._runtime.rank == attended.ranks[0]:
                save_weights(tensors.items(), folder, max_shard_size) if is_safe else save_pickled(tensors, folder)
        if not attended.elsewhere:
            everyone.barrier()

    def _begin(self, model: torch.nn.Module, call: str) -> None:
        if not self._strategy.capabilities.lone_forward:
            self._lone_calls.check(f"{call}() is called", "putting whole weights together")
        self._strategy.at_rest(model)


def _refuse_objects(state: Mapping[str, Any]) -> None:
    """Every rank holds the same names, so all of them refuse."""
    for name, value in state.items():
        if not (isinstance(value, torch.Tensor) or is_spread(value)):
            raise ConfigError(
                f"{name} of the model's state dict is a {type(value).__name__}, and safetensors files hold tensors only: pass "
                "safe_serialization=False, or use save_state(), which saves the state that get_extra_state() returns"
            )

"""Full weights of prepared models: state dicts, weight files, and folders that `from_pretrained` can open.

The tensors of a sharded model are gathered on rank 0, one at a time.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from headway.common.object_path import open_writable, to_path
from headway.core import extensions
from headway.core.runtime.control_plane.attendance import Attendance
from headway.core.runtime.control_plane.conditional_calls import RankConditionalCallCheck
from headway.core.runtime.process import ProcessRuntime
from headway.core.strategies.base import Strategy
from headway.core.training.gathered_tensors import gather_and_save, gather_state_dict, run_on_rank_0
from headway.core.weights.compiled import accept_bare_names, rename_bare_items
from headway.core.weights.export import save_pickled, save_weights
from headway.core.weights.pieces import is_sharded
from headway.core.weights.pretrained_files import has_adapters, push_folder, write_configurations
from headway.errors import ConfigError


class FullWeights:
    """Access to the full tensors of models, prepared or not.

    If a model is sharded, all ranks gather the tensors together.

    Args:
        strategy: Strategy that exports the tensors.
        runtime: Runtime of this process.
    """

    def __init__(self, strategy: Strategy, runtime: ProcessRuntime) -> None:
        self._strategy = strategy
        self._runtime = runtime
        self._rank_check = RankConditionalCallCheck(runtime, strategy.name)

    def state_dict(self, model: torch.nn.Module, is_bare: bool = True) -> dict[str, torch.Tensor]:
        """Return the full tensors of a model by name.

        For a sharded model, all ranks must call it, and only rank 0 gets the tensors, with the gathered ones on the CPU.
        The other ranks get an empty dict.

        Args:
            model: Model, prepared or not.
            is_bare: Whether to remove the prefixes that `torch.compile(module)` adds to names. Default: True.

        Raises:
            UnsupportedError: If the model is sharded, and only some ranks make the call.
            StateError: If the model is sharded, and the process group has ended.
        """
        self._begin_gather(model, "get_state_dict")
        tensors = self._strategy.export_state(model)
        accept_bare_names(model)  # submodules may have been compiled since prepare()
        return gather_state_dict(rename_bare_items(tensors) if is_bare else tensors, self._strategy.everyone)

    def save(self, model: torch.nn.Module, folder: str | Path, max_shard_size: int | str, is_safe: bool) -> None:
        """Write the model's weights from rank 0, as safetensors or as one pickled file.

        If all ranks call this method, the other ranks wait until rank 0 has written the files. Under `if
        accelerator.is_main_process:` the main process writes alone, and the other ranks do not wait. After the process
        group has been destroyed, rank 0 writes, and no rank waits.

        Args:
            model: Model to save.
            folder: Directory to write to.
            max_shard_size: Largest size of a file, in bytes or as text such as "10GB".
            is_safe: Whether to write safetensors instead of one pickled file.

        Raises:
            UnsupportedError: If the model is sharded, and only some ranks make the call.
            StateError: If the model is sharded, and the process group has ended.
            ConfigError: If safetensors are requested, and the state dict contains objects other than tensors.
        """
        everyone = self._strategy.everyone
        tensors = self.export(model, "save_model", is_safe)
        attended = self._runtime.scope.get_or_create(Attendance).find_participants("save_model")
        if is_safe and any(map(is_sharded, tensors.values())):
            gather_and_save(tensors.items(), folder, max_shard_size, everyone)
        else:
            tensors = gather_state_dict(tensors.items(), everyone)
            if self._runtime.rank == attended.ranks[0]:
                save_weights(tensors.items(), folder, max_shard_size) if is_safe else save_pickled(tensors, folder)
        if not (attended.absence or everyone.has_ended):
            everyone.barrier()

    def save_adapters(self, model: torch.nn.Module, folder: str | Path) -> None:
        """Write a model's adapters from rank 0 with its `save_pretrained`, such as PEFT's. The base is not written.

        Ranks call it and wait as in `save`.

        Args:
            model: Model with adapters.
            folder: Directory or URL to write to.

        Raises:
            UnsupportedError: If the model is sharded, and only some ranks make the call.
            StateError: If the model is sharded, and the process group has ended.
        """
        everyone = self._strategy.everyone
        tensors = self.export(model, "save_model", is_safe=False)
        attended = self._runtime.scope.get_or_create(Attendance).find_participants("save_model")
        self._write_adapters(model, tensors, folder, attended.ranks[0])
        if not (attended.absence or everyone.has_ended):
            everyone.barrier()

    def _write_adapters(
        self, model: torch.nn.Module, tensors: Mapping[str, torch.Tensor], folder: str | Path, writer: int
    ) -> None:
        """Write a model's adapters from one rank. All ranks must call it if tensors are sharded.

        Args:
            model: Model with adapters.
            tensors: Tensors of the model, from `export`.
            folder: Directory or URL to write to.
            writer: Rank that writes. It is 0 if tensors are sharded.

        Raises:
            CheckpointError: On the other ranks, if tensors are sharded and rank 0 fails. Rank 0 raises its own error.
        """
        is_gathered = any(map(is_sharded, tensors.values()))
        state = dict(tensors)
        if is_gathered:
            state = extensions.load("feature", "gather_written_tensors")(model, tensors, self._strategy.everyone)

        def write_files() -> None:
            with open_writable(to_path(folder)) as local:
                model.save_pretrained(local, state_dict=state)  # type: ignore[operator]

        if is_gathered:  # all ranks are here, and must not wait for a rank 0 that could not write
            run_on_rank_0(write_files, self._strategy.everyone)
        elif self._runtime.rank == writer:
            write_files()

    def save_pretrained(
        self, model: torch.nn.Module, folder: Path, max_shard_size: int | str, parts: Sequence[object] = ()
    ) -> None:
        """Write a directory that `from_pretrained` can open. Rank 0 writes it.

        If the model has adapters, only the adapters are written. All ranks must call this method if the model is
        sharded. Otherwise rank 0 can call it alone.

        Args:
            model: Model to save.
            folder: Directory to write to.
            max_shard_size: Largest size of a file, in bytes or as text such as "10GB".
            parts: Objects to save in addition to the model, such as a tokenizer. Default: ().
        """
        if has_adapters(model):
            self._write_adapters(model, self.export(model, "save_pretrained", is_safe=False), folder, 0)
        else:
            self.save(model, folder, max_shard_size, True)
        if self._runtime.rank == 0:
            write_configurations(model, folder, parts)

    def save_all_pretrained(self, models: Sequence[torch.nn.Module], weights: object, folder: str) -> None:
        """Write all models so that `from_pretrained` can open them. `save_state` calls this as a save hook.

        The first model is written to `folder` itself, the others to subdirectories `model_1`, `model_2` and so on.

        Args:
            models: Prepared models, in order of preparation.
            weights: State dicts that save hooks receive. They are ignored here.
            folder: Directory to write to. It is created if missing.
        """
        for number, model in enumerate(models):
            place = Path(folder, f"model_{number}") if number else Path(folder)
            place.mkdir(parents=True, exist_ok=True)
            self.save_pretrained(getattr(model, "_orig_mod", model), place, "10GB")

    def push_to_hub(
        self,
        model: torch.nn.Module,
        repo_id: str,
        parts: Sequence[object],
        max_shard_size: int | str,
        commit_options: Mapping[str, Any],
    ) -> str | None:
        """Write a model to a temporary directory, as `save_pretrained` does, and upload it to the Hugging Face Hub from rank 0.

        All ranks must call this method if the model is sharded. Otherwise rank 0 can call it alone. If the upload
        fails, only rank 0 raises the error.

        Args:
            model: Model to upload.
            repo_id: Repository on the Hub: "name" or "owner/name".
            parts: Objects to upload in addition to the model, such as a tokenizer.
            max_shard_size: Largest size of a file, in bytes or as text such as "10GB".
            commit_options: Keyword arguments of `push_folder`, such as `commit_message`.

        Returns:
            URL of the commit on rank 0, and None on the other ranks.
        """
        with TemporaryDirectory(prefix="headway-push_to_hub-") as folder:
            self.save_pretrained(model, Path(folder), max_shard_size, parts)
            return push_folder(Path(folder), repo_id, **commit_options) if self._runtime.rank == 0 else None

    def export(self, model: torch.nn.Module, call: str, is_safe: bool = True) -> dict[str, Any]:
        """Return the model's tensors by name. Sharded tensors are not gathered: they contain this rank's shards.

        The names have no prefixes of `torch.compile`.

        Args:
            model: Model to export.
            call: Name of the calling public method, for error messages.
            is_safe: Whether to raise an error for objects other than tensors. Default: True.

        Raises:
            ConfigError: If `is_safe` is set, and the state dict contains objects other than tensors.
            UnsupportedError: If the model is sharded, and only some ranks make the call.
            StateError: If the model is sharded, and the process group has ended.
        """
        self._begin_gather(model, call)
        tensors = dict(rename_bare_items(self._strategy.export_state(model)))
        if is_safe:
            _refuse_objects(tensors)
        return tensors

    def _begin_gather(self, model: torch.nn.Module, call: str) -> None:
        """Check that all ranks can gather a sharded model together, and free its gathered parameters.

        Args:
            model: Model to export.
            call: Name of the calling public method, for error messages.

        Raises:
            UnsupportedError: If the model is sharded, and only some ranks make the call.
            StateError: If the model is sharded, and the process group has ended.
        """
        if not self._strategy.capabilities.lone_forward:
            self._strategy.everyone.ensure_connected(call)
            self._rank_check.check(f"{call}() is called", "gathering full weights")
        self._strategy.free_gathered(model)


def _refuse_objects(state: Mapping[str, Any]) -> None:
    """Raise `ConfigError` if the state dict contains objects other than tensors.

    Every rank raises it, because the state dict has the same names and types on all ranks.
    """
    for name, value in state.items():
        if not (isinstance(value, torch.Tensor) or is_sharded(value)):
            raise ConfigError(
                f"{name} of the model's state dict is a {type(value).__name__}, but safetensors files contain only tensors: pass "
                "safe_serialization=False to save_model(), or use save_state(), which saves the state that get_extra_state() "
                "returns"
            )

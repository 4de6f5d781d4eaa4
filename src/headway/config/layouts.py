"""Layouts by Accelerate's names: sizes of parallelism, and one error for layouts that are not supported yet."""

from dataclasses import dataclass
from math import prod
from typing import Any

from headway.config.plugins import (
    DeepSpeedSequenceParallelConfig,
    TorchContextParallelConfig,
    TorchTensorParallelConfig,
)
from headway.errors import ConfigError, UnsupportedError
from headway.optional import Later

meshes = Later("torch.distributed.device_mesh")

_ADVICE = {
    "Megatron-LM": (
        "Megatron-LM is not there yet. It is planned; until then leave the plugin out: strategy='tp' or 'fsdp+tp=2' cuts matrices "
        "(docs/tensor_parallel.md)"
    ),
}


def refusal(layout: str) -> UnsupportedError:
    """The error for a layout that is not there yet."""
    return UnsupportedError(_ADVICE[layout])


@dataclass
class ParallelismConfig:
    """How many processes each kind of parallelism takes; 1: none. `strategy="fsdp=4+tp=2"` says the same in a word.

    Attributes:
        dp_replicate_size: copies of the model.
        dp_shard_size: processes over which a copy's parameters are sharded.
        tp_size: processes that share each matrix.
        cp_size: processes that share each sequence.
        sp_size: DeepSpeed's sequence parallelism, which the Accelerator refuses.
        cp_backend, sp_backend: "torch" and "deepspeed", the only ones.
        tp_handler, cp_handler, sp_handler: options, by Accelerate's names.

    Raises:
        ConfigError: a size that is not a number of processes, or sizes that exclude each other.
    """

    dp_replicate_size: int | None = None
    dp_shard_size: int | None = None
    tp_size: int | None = None
    cp_size: int | None = None
    cp_backend: str | None = None
    sp_size: int | None = None
    sp_backend: str | None = None
    tp_handler: TorchTensorParallelConfig | None = None
    cp_handler: TorchContextParallelConfig | None = None
    sp_handler: DeepSpeedSequenceParallelConfig | None = None

    def __post_init__(self) -> None:
        for name in ("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "sp_size"):
            size = getattr(self, name)
            size = 1 if size is None else size
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ConfigError(f"{name}={size!r}; give a number of processes, 1 or more")
            setattr(self, name, size)
        self.cp_backend = self._backend("cp_backend", "torch")
        self.sp_backend = self._backend("sp_backend", "deepspeed")
        if self.cp_enabled and self.sp_enabled:
            raise ConfigError(
                f"cp_size={self.cp_size} and sp_size={self.sp_size} both cut sequences; leave one of them at 1"
            )
        self._make_handlers()
        self._mesh: Any = None

    def _backend(self, name: str, only: str) -> str:
        given = getattr(self, name) or only
        if given != only:
            raise ConfigError(f"{name}={given!r}; allowed: {only!r}")
        return only

    def _make_handlers(self) -> None:
        kinds = {
            "tp": TorchTensorParallelConfig,
            "cp": TorchContextParallelConfig,
            "sp": DeepSpeedSequenceParallelConfig,
        }
        for axis, kind in kinds.items():
            given = getattr(self, f"{axis}_handler")
            if given is not None and not isinstance(given, kind):
                raise ConfigError(f"{axis}_handler is a {type(given).__name__}; give a headway.{kind.__name__}")
            if given is None and self.sizes[axis] > 1:
                setattr(self, f"{axis}_handler", kind())

    @property
    def sizes(self) -> dict[str, int]:
        """Processes by kind."""
        return {kind: int(getattr(self, f"{kind}_size")) for kind in ("dp_replicate", "dp_shard", "tp", "cp", "sp")}

    @property
    def total_size(self) -> int:
        """All processes together."""
        return prod(self.sizes.values())

    @property
    def non_data_parallel_size(self) -> int:
        """Processes that share one replica's data."""
        return self.sizes["tp"] * self.sizes["cp"] * self.sizes["sp"]

    @property
    def data_parallel_size(self) -> int:
        """Processes that read data of their own."""
        return self.sizes["dp_replicate"] * self.sizes["dp_shard"]

    @property
    def dp_replicate_enabled(self) -> bool:
        """Are there several replicas?"""
        return self.sizes["dp_replicate"] > 1

    @property
    def dp_shard_enabled(self) -> bool:
        """Are parameters sharded?"""
        return self.sizes["dp_shard"] > 1

    @property
    def tp_enabled(self) -> bool:
        """Is there tensor parallelism?"""
        return self.sizes["tp"] > 1

    @property
    def cp_enabled(self) -> bool:
        """Is there context parallelism?"""
        return self.sizes["cp"] > 1

    @property
    def sp_enabled(self) -> bool:
        """Is there sequence parallelism?"""
        return self.sizes["sp"] > 1

    def _enabled(self, *kinds: str) -> list[str]:
        return [kind for kind in kinds if self.sizes[kind] > 1]

    @property
    def dp_dim_names(self) -> list[str]:
        """The axes whose ranks read data of their own."""
        return self._enabled("dp_replicate", "dp_shard")

    @property
    def non_dp_dim_names(self) -> list[str]:
        """The axes whose ranks read the same."""
        return self._enabled("tp", "cp", "sp")

    @property
    def dp_shard_cp_dim_names(self) -> list[str]:
        """The axes over which parameters are sharded."""
        return self._enabled("dp_shard", "cp")

    @property
    def dp_cp_dim_names(self) -> list[str]:
        """The axes over which losses are averaged."""
        return self._enabled("dp_replicate", "dp_shard", "cp")

    @property
    def fsdp_dim_names(self) -> list[str]:
        """The axes of FSDP, copies among them."""
        return [*self._enabled("dp_replicate"), "dp_shard_cp"]

    @property
    def active_mesh_dims(self) -> list[str]:
        """All axes that there are."""
        return self.dp_dim_names + self.non_dp_dim_names

    def build_device_mesh(self, device_type: str) -> Any:
        """torch's device mesh of these sizes; all processes call it. None where every size is 1.

        Args:
            device_type: such as "cuda".
        """
        names = tuple(kind for kind in ("dp_replicate", "dp_shard", "cp", "sp", "tp") if self.sizes[kind] > 1)
        if not names:
            return None
        sizes = tuple(self.sizes[name] for name in names)
        return meshes.init_device_mesh(device_type, sizes, mesh_dim_names=names)

    def get_device_mesh(self, device_type: str | None = None) -> Any:
        """The same, made once.

        Raises:
            ConfigError: it is there for another kind of device, or has to be made and none is named.
        """
        if self._mesh is None and device_type is None:
            raise ConfigError(
                "get_device_mesh() makes the mesh: say for which devices, such as get_device_mesh('cuda')"
            )
        if self._mesh is None:
            self._mesh = self.build_device_mesh(str(device_type))
        if device_type is not None and self._mesh is not None and self._mesh.device_type != device_type:
            raise ConfigError(
                f"the device mesh is there for {self._mesh.device_type}, but {device_type} is asked for; give one kind of device"
            )
        return self._mesh

    @property
    def device_mesh(self) -> Any:
        """The mesh that `get_device_mesh` has made; else None."""
        return self._mesh


def check_layouts(megatron: Any) -> None:
    """Refuse the Accelerator's arguments that ask for what is not there yet.

    Args:
        megatron: the plugin; None: not asked for.

    Raises:
        UnsupportedError: it is not there yet; the message says what to do today.
    """
    if megatron is not None:
        raise refusal("Megatron-LM")

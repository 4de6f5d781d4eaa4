"""Accelerate's dataclasses for layouts: the same names, fields and checks; `headway.config.choice` translates them."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import Any

from headway.config.foreign import Foreign
from headway.errors import ConfigError


@dataclass
class FullyShardedDataParallelPlugin:
    """Options of a sharded layout by Accelerate's names. Both versions of its keys are read; FSDP2 is what runs.

    A field that is None decides nothing: the launcher's flags and the config file may. `headway.ShardingOptions` has more.

    Attributes:
        fsdp_version: 1 or 2, by which the other fields are read; 2 from then on.
        sharding_strategy: version 1's "FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD" or "HYBRID_SHARD_ZERO2".
        reshard_after_forward: free a block's whole parameters between forward and backward; or a word as above.
        cpu_offload: shards, gradients and optimizer state lie in host memory.
        auto_wrap_policy: "transformer_based_wrap", "size_based_wrap", "no_wrap", or one of torch's policies.
        transformer_cls_names_to_wrap: class names of the blocks.
        min_num_params: parameters from which a module is gathered on its own.
        mixed_precision_policy: "bf16", "fp16", "fp32", a dict of dtypes, or torch's MixedPrecisionPolicy.
        activation_checkpointing, activation_checkpointing_offload: compute activations of blocks again; keep their inputs in
            host memory.
        state_dict_type, state_dict_config, optim_state_dict_config: change nothing: checkpoints are sharded, `save_model`
            writes whole weights. Accelerate's `save_fsdp_model` goes by the first.
        backward_prefetch, forward_prefetch, limit_all_gathers, use_orig_params, sync_module_states,
            cpu_ram_efficient_loading: change nothing: FSDP2 and prepare() do what they ask for.
        ignored_modules, param_init_fn: refused by the Accelerator.

    Raises:
        ConfigError: a value that the field cannot have.
    """

    fsdp_version: int | None = None
    sharding_strategy: Any = None
    reshard_after_forward: Any = None
    backward_prefetch: Any = None
    mixed_precision_policy: Any = None
    auto_wrap_policy: str | Callable[..., Any] | None = None
    cpu_offload: Any = None
    ignored_modules: Iterable[Any] | str | None = None
    state_dict_type: Any = None
    state_dict_config: Any = None
    optim_state_dict_config: Any = None
    limit_all_gathers: bool = True
    use_orig_params: bool | None = None
    param_init_fn: Callable[..., Any] | None = None
    sync_module_states: bool | None = None
    forward_prefetch: bool | None = None
    activation_checkpointing: bool | None = None
    activation_checkpointing_offload: bool | None = None
    cpu_ram_efficient_loading: bool | None = None
    transformer_cls_names_to_wrap: list[str] | str | None = None
    min_num_params: int | None = None

    def __post_init__(self) -> None:
        if self.activation_checkpointing_offload and not self.activation_checkpointing:
            raise ConfigError("activation_checkpointing_offload=True needs activation_checkpointing=True; give both")
        if (
            self.fsdp_version in (None, 2)
            and self.sharding_strategy is None
            and isinstance(self.reshard_after_forward, str)
        ):
            self._check_version_of(self.reshard_after_forward)
        self._given = {
            each.name: getattr(self, each.name)
            for each in fields(self)
            if getattr(self, each.name) is not None and (each.name != "limit_all_gathers" or not self.limit_all_gathers)
        }
        self.read("FullyShardedDataParallelPlugin")
        self.fsdp_version = 2
        self.state_dict_type = _word(self.state_dict_type) or "SHARDED_STATE_DICT"
        self.reshard_after_forward = self._plain("fsdp_reshard_after_forward", True)
        self.cpu_offload = self._plain("fsdp_offload_params", False)
        self.activation_checkpointing = bool(self.activation_checkpointing)
        self.activation_checkpointing_offload = bool(self.activation_checkpointing_offload)

    def _check_version_of(self, word: str) -> None:
        if self.fsdp_version == 2 and word.lower() not in ("true", "false"):
            raise ConfigError(
                f"reshard_after_forward={word!r} is a value of FSDP1; with fsdp_version=2 give True or False"
            )

    def read(self, name: str, into: Foreign | None = None) -> Foreign:
        """What the fields that were given say, each under `name.field`."""
        found = Foreign() if into is None else into
        found.use_fsdp(name)
        for each, value in self._given.items():
            found.fsdp(each.removeprefix("fsdp_"), value, f"{name}.{each}")
        return found

    def _plain(self, setting: str, default: bool) -> bool:
        return bool(self.read("").settings.get(setting, (default, ""))[0])

    def set_state_dict_type(self, state_dict_type: Any = None) -> None:
        """Keep the word: checkpoints stay sharded, `save_model` and `get_state_dict` give whole weights."""
        self.state_dict_type = _word(state_dict_type) or self.state_dict_type

    def set_auto_wrap_policy(self, model: Any) -> None:
        """Nothing to do: blocks are found when a model is prepared."""

    def set_mixed_precision(self, mixed_precision: Any, buffer_autocast: bool = False, override: bool = False) -> None:
        """Say the policy, before the Accelerator is built; one that was given stays unless `override`."""
        if override or "mixed_precision_policy" not in self._given:
            self.mixed_precision_policy = self._given["mixed_precision_policy"] = mixed_precision


def _word(value: Any) -> str | None:
    return None if value is None else str(getattr(value, "name", value)).upper()


@dataclass
class TorchTensorParallelPlugin:
    """Tensor parallelism by Accelerate's older name; `strategy="tp=2"` or a ParallelismConfig says the same.

    Attributes:
        tp_size: ranks that share a matrix.
        torch_device_mesh: refused by the Accelerator, which makes its own.
    """

    tp_size: int = 1
    torch_device_mesh: Any = None

    def __post_init__(self) -> None:
        if isinstance(self.tp_size, bool) or not isinstance(self.tp_size, int) or self.tp_size < 1:
            raise ConfigError(f"tp_size={self.tp_size!r}; give a number of processes, 1 or more")


@dataclass
class TorchTensorParallelConfig:
    """Options of tensor parallelism in a ParallelismConfig; `headway.TensorParallelOptions` has more.

    Attributes:
        enable_async_tp: changes nothing, as in Accelerate.
    """

    enable_async_tp: bool = False


@dataclass
class TorchContextParallelConfig:
    """Options of context parallelism in a ParallelismConfig.

    Attributes:
        cp_comm_strategy: "allgather" (default) or "alltoall": how keys and values travel in torch's ring attention.
        labels: arguments of the model, of the shape (rows, tokens), from which it computes a loss over tokens itself.
        blocks: classes, class names or names of the modules through which sequences go; none: what is repeated in the model.
        ignore_index: the label that the loss ignores; None (default): what the model passes to torch's cross entropy, or -100.
    """

    cp_comm_strategy: str | None = None
    labels: tuple[str, ...] = ("labels", "shift_labels", "targets", "target")
    blocks: tuple[Any, ...] = ()
    ignore_index: int | None = None

    def __post_init__(self) -> None:
        for name in ("labels", "blocks"):
            value = getattr(self, name)
            setattr(self, name, (value,) if isinstance(value, str | type) else tuple(value))
        self.cp_comm_strategy = self.cp_comm_strategy or "allgather"
        if self.cp_comm_strategy not in ("allgather", "alltoall"):
            raise ConfigError(f"cp_comm_strategy={self.cp_comm_strategy!r}; allowed: allgather, alltoall")


@dataclass
class DeepSpeedSequenceParallelConfig:
    """Options of DeepSpeed's sequence parallelism, which is not served: the Accelerator refuses an sp_size above 1.

    Attributes:
        sp_seq_length, sp_seq_length_is_variable, sp_attn_implementation: kept by name.
    """

    sp_seq_length: int | None = None
    sp_seq_length_is_variable: bool | None = None
    sp_attn_implementation: str | None = None

    def __post_init__(self) -> None:
        if self.sp_seq_length_is_variable is None:
            self.sp_seq_length_is_variable = True
        if not self.sp_seq_length_is_variable and self.sp_seq_length is None:
            raise ConfigError("sp_seq_length_is_variable=False needs sp_seq_length; give the length")

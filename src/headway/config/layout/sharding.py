"""How parameters are sharded (FSDP2 and HSDP): what is gathered together, when, and in which dtype. Torch-free."""

from dataclasses import dataclass
from typing import Any

from headway.config.values import known_keywords
from headway.errors import ConfigError

DTYPES = ("float32", "bfloat16", "float16")


@known_keywords
@dataclass(frozen=True)
class ShardingOptions:
    """Options of sharded layouts ("fsdp", "hsdp" and their products); each has a default that is right for most models.

    Attributes:
        units: what is gathered together: classes, class names or module names; none: the blocks that are repeated in the
            module tree. What lies in no unit belongs to the root, which is one unit of its own.
        min_num_params: instead of `units`: each module with so many parameters, outside of smaller such modules.
        ignored: classes, class names or module names whose frozen parameters stay whole on every rank.
        reshard_after_forward: free a unit's whole parameters after its forward and gather them again in backward; None: all
            units but the root. False: keep them, which saves a gather and costs memory. A number: keep them cut among so many
            ranks, a divisor of the shards (the ranks of a machine, say).
        cpu_offload: parameters, gradients and the optimizer's state lie in host memory, and the optimizer steps there.
        forward_prefetch: gather so many units ahead in forward; 0: torch's own order, one ahead.
        backward_prefetch: the same in backward.
        param_dtype: of gathered parameters in blocks; None: that of mixed_precision, else their own.
        reduce_dtype: in which gradients are summed over ranks; None: float32 under mixed precision, else their own.
        output_dtype: of the model's floating-point outputs; None: as they come.
        forward_methods: names of methods of the model that use its parameters beside forward ("encode", "generate").
        find_unused_parameters: from step to step, and from rank to rank, other parameters take part in the loss.
        broadcast_buffers: all ranks get rank 0's buffers after each update's last backward.
    """

    units: tuple[Any, ...] = ()
    min_num_params: int = 0
    ignored: tuple[Any, ...] = ()
    reshard_after_forward: bool | int | None = None
    cpu_offload: bool = False
    forward_prefetch: int = 0
    backward_prefetch: int = 0
    param_dtype: str | None = None
    reduce_dtype: str | None = None
    output_dtype: str | None = None
    forward_methods: tuple[str, ...] = ()
    find_unused_parameters: bool = False
    broadcast_buffers: bool = True

    def __post_init__(self) -> None:
        for name in ("units", "ignored", "forward_methods"):
            value = getattr(self, name)
            object.__setattr__(self, name, (value,) if isinstance(value, str | type) else tuple(value))
        for name in ("min_num_params", "forward_prefetch", "backward_prefetch"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ConfigError(f"ShardingOptions({name}={value!r}); give a whole number, 0 or more")
        if self.units and self.min_num_params:
            raise ConfigError("ShardingOptions has both units and min_num_params; give one of them")
        for name in ("param_dtype", "reduce_dtype", "output_dtype"):
            object.__setattr__(self, name, _dtype(getattr(self, name), name))
        chosen = self.reshard_after_forward
        if not isinstance(chosen, bool | int | None) or (not isinstance(chosen, bool) and chosen == 0):
            raise ConfigError(
                f"ShardingOptions(reshard_after_forward={chosen!r}); allowed: True, False, None, or a number of ranks"
            )

    def check(self, num_shards: int) -> None:
        """Do they fit so many shards?

        Raises:
            ConfigError: `reshard_after_forward` is a number that does not divide them.
        """
        chosen = self.reshard_after_forward
        if isinstance(chosen, bool) or chosen is None:
            return
        if not 1 < chosen < num_shards or num_shards % chosen:
            fitting = [n for n in range(2, num_shards) if num_shards % n == 0]
            allowed = f"one of {', '.join(map(str, fitting))}, " if fitting else ""
            raise ConfigError(
                f"ShardingOptions(reshard_after_forward={chosen}) does not divide {num_shards} shards; "
                f"give {allowed}True (all of them) or False (keep parameters whole)"
            )


def _dtype(value: Any, name: str) -> str | None:
    if value is None:
        return None
    text = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}.get(str(value), str(value).removeprefix("torch."))
    if text not in DTYPES:
        raise ConfigError(f"ShardingOptions({name}={value!r}); allowed: {', '.join(DTYPES)}")
    return text

"""Options of context parallelism: how sequences are split across the ranks of the `cp` axis. Torch-free."""

from dataclasses import dataclass
from typing import Any

from headway.errors import ConfigError

ROTATIONS = ("allgather", "alltoall")
"""How keys and values travel."""


@dataclass
class TorchContextParallelConfig:
    """Options of context parallelism, in a ParallelismConfig or in `kwargs_handlers`.

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
        if self.cp_comm_strategy not in ROTATIONS:
            raise ConfigError(f"cp_comm_strategy={self.cp_comm_strategy!r}; allowed: {', '.join(ROTATIONS)}")

"""An example strategy: pairs of ranks read the same data and hold the same weights, so that each rank checks the other.

headway launch -n 4 --strategy mirror train.py      two parts of the data, each read by two ranks
headway launch -n 6 --strategy mirror=3 train.py    two parts of the data, each read by three ranks
"""

from typing import Any

from headway.core.config.engines import EngineOptions
from headway.core.data.sampling.shard import ShardIndex
from headway.core.runtime.collectives.checked import Collectives
from headway.core.strategies.base import Capabilities
from headway.core.strategies.ddp import DDPStrategy
from headway.errors import ConfigError


class MirrorStrategy(DDPStrategy):
    """DDP over all ranks, in which each group of `copies` adjacent ranks counts as one.

    Args:
        collectives: Collectives over all ranks.
        text: Requested strategy: "mirror" or "mirror=COPIES".
        options: Options of torch's engines.
    """

    name = "mirror"
    capabilities = Capabilities(rollback=False)  # DDP reduces gradients during backward: no batch can be run again

    def __init__(self, collectives: Collectives, text: str, options: EngineOptions) -> None:
        super().__init__(collectives, options.ddp)
        number = text.partition("=")[2] or "2"
        copies, world = int(number) if number.isdigit() else 0, collectives.world_size
        if not copies or world % copies:
            raise ConfigError(
                f"strategy {text!r}: {world} ranks cannot be divided into groups of {number}; choose another"
            )
        count = world // copies
        # Part of the data that this rank reads. Ranks of one group read the same part.
        self.data_shard = ShardIndex(collectives.rank // copies, count)
        # One rank of each part: losses and metrics are summed over these, so that each sample counts once.
        self.data_group = collectives.split([range(copy, world, copies) for copy in range(copies)])
        # DDP divides the sum over all ranks by their number; each part is in that sum `copies` times.
        self.gradient_divisor = count

    def check(self, model: Any) -> bool:
        """Return whether all ranks hold the same weights."""
        sums = [float(parameter.detach().double().sum()) for parameter in model.parameters()]
        rows = self.everyone.gather_numbers(sums)
        return all(row == rows[0] for row in rows)

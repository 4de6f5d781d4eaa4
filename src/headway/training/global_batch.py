"""How a global batch that the script asks for is made up of the ranks' batches."""

from headway.config.layout_choice import launched_on
from headway.data.loader import PreparedLoader
from headway.errors import ConfigError
from headway.log import get_logger

log = get_logger(__name__)

_REACH = 4
"""How many times the fewest rounds are tried before a batch counts as not divisible."""


def derive_steps(loader: PreparedLoader, wanted: int, num_shards: int, num_ranks: int) -> int:
    """The micro-batches per update; the loader is told where they have to be of different sizes.

    Args:
        loader: the first one that was prepared.
        wanted: samples of an update.
        num_shards: parts of the data, each read by one rank or by several.
        num_ranks: of this run.

    Raises:
        ConfigError: the ranks' batches do not make it up. Where machines were lost that is not the script's doing: it is split
            unevenly then.
    """
    per_step = loader.total_batch_size
    if per_step and wanted % per_step == 0:
        steps = wanted // per_step
        log.info("global batch %d = %d per process x %d processes x %d accumulation steps",
                 wanted, per_step // num_shards, num_shards, steps)  # fmt: skip
        return steps
    if per_step and launched_on(num_ranks) is not None:
        fewest = -(-wanted // per_step)
        for steps in range(fewest, _REACH * fewest + 1):
            if loader.fits_window(wanted, steps):
                loader.ask_window(wanted, steps, per_step)
                log.warning_once("the global batch of %d samples is split unevenly among the ranks", wanted)
                return steps
    raise ConfigError(
        f"global_batch_size={wanted} is not a multiple of what all ranks read at once ({per_step} samples); choose a "
        "multiple, or another batch size for the loader"
    )

"""Options of pipeline parallelism: where a model is cut into stages, and in which order micro-batches pass. Torch-free."""

from dataclasses import dataclass

from headway.config.values import known_keywords
from headway.errors import ConfigError

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble", "zbv")
"""GPipe, 1F1B, interleaved 1F1B, interleaved zero bubble, and zero bubble with V-shaped placement, as torch has them."""
_SEVERAL = ("interleaved", "zero_bubble", "zbv")


@known_keywords
@dataclass(frozen=True)
class PipelineOptions:
    """How a model is cut into stages, and how batches pass through them.

    Attributes:
        schedule: one of `SCHEDULES`. "gpipe": all forwards, then all backwards. "1f1b": the same result with fewer activations
            in memory. "interleaved", "zero_bubble" and "zbv": several stages a rank, and less idle time. All but "gpipe" need
            forward and backward in one call, `accelerator.forward_backward`.
        num_microbatches: how many parts a batch is cut into; None: twice the number of ranks along the pipeline. A batch with
            fewer rows gets one part a row.
        stages_per_rank: of the schedules that take several; None: 2. "zbv" takes 2.
        split: names of the blocks at which the second and each later stage begins; none: stages of equally many blocks.
        blocks: class names or module names of the blocks; none: what is repeated in the module tree.
        first, last: names of modules outside of the blocks that belong to the first or the last stage; a name in both is on
            both, and its gradients are summed. Others: the first where they come before the blocks in the module tree, else
            the last.
    """

    schedule: str = "gpipe"
    num_microbatches: int | None = None
    stages_per_rank: int | None = None
    split: tuple[str, ...] = ()
    blocks: tuple[str, ...] = ()
    first: tuple[str, ...] = ()
    last: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("split", "blocks", "first", "last"):
            value = getattr(self, name)
            object.__setattr__(self, name, (value,) if isinstance(value, str) else tuple(value))
        object.__setattr__(self, "schedule", str(self.schedule).lower())
        if self.schedule not in SCHEDULES:
            raise ConfigError(f"PipelineOptions(schedule={self.schedule!r}); allowed: {', '.join(SCHEDULES)}")
        for name in ("num_microbatches", "stages_per_rank"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ConfigError(f"PipelineOptions({name}={value!r}); give a whole number, 1 or more, or None")
        wanted = self.stages_per_rank
        if self.schedule not in _SEVERAL and wanted not in (None, 1):
            raise ConfigError(
                f"PipelineOptions(stages_per_rank={wanted}) needs a schedule of several stages a rank "
                f"({', '.join(_SEVERAL)}), not {self.schedule!r}"
            )
        if self.schedule == "zbv" and wanted not in (None, 2):
            raise ConfigError(f"PipelineOptions(stages_per_rank={wanted}): zbv has exactly 2 stages a rank")

    @property
    def num_per_rank(self) -> int:
        """Stages on each rank."""
        if self.schedule not in _SEVERAL:
            return 1
        return self.stages_per_rank or 2

    def rank_of(self, stage: int, num_ranks: int) -> int:
        """Which rank along the pipeline has a stage: each in turn, or with "zbv" there and back."""
        lap, place = divmod(stage, num_ranks)
        return num_ranks - 1 - place if self.schedule == "zbv" and lap % 2 else place

    def wanted_microbatches(self, num_ranks: int) -> int:
        """Into how many parts a batch is cut, if it has as many rows."""
        return self.num_microbatches or 2 * num_ranks

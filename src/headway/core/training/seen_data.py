"""`SeenData`, the totals of samples and tokens that a run has trained on since its first update."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from headway.core.data.batch_reads import BatchReads
from headway.core.data.loader import PreparedLoader
from headway.core.runtime.collectives.checked import Collectives
from headway.core.strategies.base import Strategy
from headway.errors import ConfigError
from headway.log import get_logger

log = get_logger(__name__)

_UNCOUNTED = (
    "throughput.add() was called on the ranks of data shard %s, but not on those of shard %s, so the totals of tokens are too low. "
    "Call it on every rank, with the tokens of the rank's own batch"
)


class SeenTotals(NamedTuple):
    """Amount of data that a run has trained on since its first update, on all ranks together.

    Attributes:
        samples: Number of samples, without padding.
        tokens: Number of tokens that the script has counted, without those that it counted as padding.
        padding_tokens: Number of tokens that the script has counted as padding.
    """

    samples: int
    tokens: int
    padding_tokens: int

    def to_dict(self) -> dict[str, int]:
        """Return the known totals under the names that logs and manifests use. A total of 0 is left out."""
        names = ("samples_seen", "tokens_seen", "padding_tokens_seen")
        return {name: value for name, value in zip(names, self) if value}


class RankCounts(NamedTuple):
    """Counts of one rank at one moment.

    A tensor is an int64 scalar on the device. It is never changed in place.

    Attributes:
        samples: Number of samples of all ranks since the first update of the run.
        tokens: Number of tokens that this rank has counted in this process, without padding.
        padding_tokens: Number of tokens that this rank has counted as padding in this process.
    """

    samples: int
    tokens: int | torch.Tensor = 0
    padding_tokens: int | torch.Tensor = 0


class SeenData:
    """Counter of the samples and tokens that a run has trained on since its first update.

    Every rank knows how many samples all ranks have read, so samples need no communication. When a micro-batch begins,
    the samples of all batches count that were read since the previous one (`BatchReads.num_samples`). Tokens are counted on each
    rank, and `compute_totals` adds them up. The ranks that read one data shard, such as those of a tensor-parallel
    group, count its tokens only once.

    Args:
        reads: Record of the batches that the run reads, which counts the samples.
        collectives: Collectives over all ranks.
        strategy: Strategy of the run, which assigns data shards to ranks.
    """

    def __init__(self, reads: BatchReads[PreparedLoader], collectives: Collectives, strategy: Strategy) -> None:
        self._reads = reads
        self._collectives = collectives
        self._strategy = strategy
        self._tokens: int | torch.Tensor = 0
        self._padding_tokens: int | torch.Tensor = 0
        self._has_added = False  # whether `add_tokens` was called in this process
        # Tokens of all ranks in the loaded checkpoint, and tokens that this rank had counted before it was loaded.
        self._loaded = (0, 0)
        self._own_before_load = (0, 0)

    # ---------------------------------------------------------------- counting

    @property
    def tokens(self) -> int | torch.Tensor:
        """Number of tokens that this rank has counted in this process, without padding. May be a scalar on the device."""
        return self._tokens

    def add_tokens(self, tokens: float | torch.Tensor, padding: float | torch.Tensor = 0) -> None:
        """Add tokens that this rank has trained on. A tensor on an accelerator is added there, without waiting for it.

        Args:
            tokens: Number of tokens, without padding.
            padding: Number of padding tokens. Default: 0.

        Raises:
            ConfigError: If a number is negative or not finite, or a tensor has several elements.
        """
        self._has_added = True
        self._tokens = self._tokens + _to_count("tokens", tokens)
        self._padding_tokens = self._padding_tokens + _to_count("padding", padding)

    def read_counts(self) -> RankCounts:
        """Return the counts of this rank at this moment, without waiting for the device."""
        return RankCounts(self._reads.num_samples, self._tokens, self._padding_tokens)

    # ---------------------------------------------------------------- totals

    def compute_totals(self, counts: RankCounts | None = None) -> SeenTotals:
        """Return the totals over all ranks, including those of the loaded checkpoint. Every rank must call it.

        It waits for the device if `add_tokens` was given tensors.

        Args:
            counts: Counts of this rank at an earlier moment, which all ranks must pass for the same moment. None: the
                present counts.
        """
        counts = self.read_counts() if counts is None else counts
        return self.add_up(counts.samples, self._collectives.gather_numbers(self.list_share(counts)))

    def list_share(self, counts: RankCounts | None = None) -> list[float]:
        """Return this rank's share of the totals: index of its data shard, tokens, padding tokens, whether it adds tokens.

        Tokens that were counted before a checkpoint was loaded are subtracted, because the checkpoint's totals replace
        them. It waits for the device if `add_tokens` was given tensors.

        Args:
            counts: Counts of this rank at an earlier moment. None: the present counts.
        """
        counts = self.read_counts() if counts is None else counts
        own_tokens, own_padding = self._own_before_load
        shard = self._strategy.data_shard.index
        return [shard, int(counts.tokens) - own_tokens, int(counts.padding_tokens) - own_padding, self._has_added]

    def add_up(self, num_samples: int, shares: Sequence[Sequence[float]]) -> SeenTotals:
        """Return the totals. Warn once if only some data shards have added tokens.

        Args:
            num_samples: Number of samples of all ranks.
            shares: Result of `list_share` of each rank.
        """
        # Ranks of one shard have the same tokens. Under `pp`, perhaps only some of them have counted.
        by_shard: dict[float, list[float]] = {}
        for shard, *counts in shares:
            by_shard[shard] = list(map(max, counts, by_shard.get(shard, counts)))
        adding = [int(shard) for shard, (*_, has_added) in by_shard.items() if has_added]
        if adding and len(adding) < len(by_shard):
            other = next(int(shard) for shard in by_shard if shard not in adding)
            log.warning_once(_UNCOUNTED, adding[0], other)
        loaded_tokens, loaded_padding = self._loaded
        return SeenTotals(
            samples=num_samples,
            tokens=loaded_tokens + int(sum(tokens for tokens, *_ in by_shard.values())),
            padding_tokens=loaded_padding + int(sum(padding for _, padding, _ in by_shard.values())),
        )

    def estimate_totals(self, counts: RankCounts | None = None) -> SeenTotals:
        """Return the totals as if each data shard had as many tokens as this rank's, without communication.

        Args:
            counts: Counts of this rank at an earlier moment. None: the present counts.
        """
        counts = self.read_counts() if counts is None else counts
        _, *own = self.list_share(counts)
        num_shards = self._strategy.data_shard.count
        return self.add_up(counts.samples, [(shard, *own) for shard in range(num_shards)])

    def resume(self, totals: SeenTotals) -> None:
        """Continue from the totals of a loaded checkpoint."""
        self._reads.set_num_samples(totals.samples)
        self._loaded = totals.tokens, totals.padding_tokens
        self._own_before_load = int(self._tokens), int(self._padding_tokens)

    # ---------------------------------------------------------------- replay

    def snapshot(self) -> Any:
        """Return the state that `restore` needs to undo a batch: the tokens.

        A replayed batch does not come from its loader again, so its samples stay counted.
        """
        return self._tokens, self._padding_tokens

    def restore(self, snapshot: Any) -> None:
        """Restore the tokens from a snapshot, which can be restored several times."""
        self._tokens, self._padding_tokens = snapshot

    def restore_counts(self, counts: RankCounts) -> None:
        """Restore samples and tokens, because a trial of a batch size is undone, with all batches that it has read."""
        self._reads.set_num_samples(counts.samples)
        self._tokens, self._padding_tokens = counts.tokens, counts.padding_tokens


def _to_count(name: str, value: float | torch.Tensor) -> int | torch.Tensor:
    """Return a number of tokens as an integer, or as an int64 scalar if it is a tensor on an accelerator.

    Float32, the result of 0.0 + an integer tensor, would stop counting at a few billion tokens.

    Args:
        name: Name of the argument, for the error.
        value: Number of tokens.

    Raises:
        ConfigError: If the number is negative or not finite, or the tensor has several elements.
    """
    if isinstance(value, torch.Tensor):
        if value.numel() != 1:
            raise ConfigError(f"{name} has shape {list(value.shape)}; give the number of tokens, such as mask.sum()")
        if value.device.type != "cpu":
            return value.detach().reshape(()).to(torch.int64)
        value = value.item()
    if not 0 <= value < float("inf"):
        raise ConfigError(f"{name}={value!r}; give a number of tokens, 0 or more")
    return int(value)

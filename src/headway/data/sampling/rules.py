"""What a run's loaders do where several ways are right: orders, draws and incomplete rounds, as a choice that is handed in.

`TorchRules` is what prepared loaders go by unless a run says otherwise.
"""

from dataclasses import dataclass
from typing import Any, Protocol

from headway.config.run import DataLoaderConfiguration
from headway.data.loader import PreparedLoader
from headway.data.sampling.draws import LoaderStream
from headway.data.sampling.order import DrawnOrder, PureOrder, SampleOrder, SamplerOrder, is_plain_shuffling
from headway.data.sampling.rng import Agree


@dataclass(frozen=True)
class RandomSource:
    """What an order may be drawn from.

    Attributes:
        config: how loaders shuffle.
        seed: of this loader's order, the same on all ranks.
        stream: what the run's loaders draw from.
        agree: turns this rank's value into that of rank 0; None: this process draws alone.
        is_synchronised: let samplers' own generators begin each epoch with rank 0's state.
    """

    config: DataLoaderConfiguration
    seed: int
    stream: LoaderStream
    agree: Agree | None
    is_synchronised: bool


class LoadingRules(Protocol):
    """How a run's loaders order, read and share out.

    Attributes:
        reads_ahead: fetch a map-style batch before the one in hand is trained on, where the process itself fetches it: what
            collating draws from the global streams then comes before what training draws.
        leaves_workers: workers draw from the streams that torch gives them, on several ranks too; False: there from functions
            of a sample's place in the epoch, so that a resumed epoch is the same on any number of ranks.
        opens_late: a pass draws its order with its first batch; False: when `iter` is called, as torch's loaders do.
        parts_streams: where several ranks read the same part of the data, loaders draw from a stream of their own.
    """

    reads_ahead: bool
    leaves_workers: bool
    opens_late: bool
    parts_streams: bool

    def order_of(self, sampler: Any, draws: RandomSource) -> SampleOrder:
        """The order that a sampler or batch sampler stands for."""

    def wrap(self, config: DataLoaderConfiguration, *parts: Any) -> PreparedLoader:
        """The prepared loader of these parts (`PreparedLoader`), which goes by `config`."""

    def is_apart(self, config: DataLoaderConfiguration) -> bool:
        """Do loaders leave the run's stream alone, and are workers' streams functions of the seed and the epoch?"""

    def spreads(self, config: DataLoaderConfiguration, is_stream: bool) -> bool:
        """Is an incomplete round shared out evenly, in short batches, instead of filling one rank's batch after the other?"""


class TorchRules:
    """Plain shuffling as torch draws it, or as a function of the seed and the epoch; other samplers as they are."""

    reads_ahead = False
    leaves_workers = False
    opens_late = False
    parts_streams = True

    def order_of(self, sampler: Any, draws: RandomSource) -> SampleOrder:
        """The order that a sampler or batch sampler stands for."""
        is_seedable = draws.config.is_seedable
        pure = PureOrder.of(sampler, draws.seed, is_seedable)
        if pure is not None:
            return pure
        if is_plain_shuffling(sampler):
            return DrawnOrder(sampler, draws.stream, draws.agree)
        return SamplerOrder(sampler, draws.seed, is_seedable, draws.stream, draws.agree, draws.is_synchronised)

    def wrap(self, config: DataLoaderConfiguration, *parts: Any) -> PreparedLoader:
        """Headway's own."""
        return PreparedLoader(*parts)

    def is_apart(self, config: DataLoaderConfiguration) -> bool:
        """With a seedable order."""
        return config.is_seedable

    def spreads(self, config: DataLoaderConfiguration, is_stream: bool) -> bool:
        """Never."""
        return False

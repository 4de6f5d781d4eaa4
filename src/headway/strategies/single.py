"""One process: plain PyTorch."""

from headway.strategies.base import Strategy


class SingleStrategy(Strategy):
    """The model as it is, on the one process there is."""

    name = "single"

"""What every progress bar says besides the values of its own loop, such as the peak that a MemoryMonitor measures."""

from collections.abc import Callable

# A bar asks them whenever it is drawn; who measures adds itself and takes itself out. No bar is imported for that.
sources: list[Callable[[], str]] = []

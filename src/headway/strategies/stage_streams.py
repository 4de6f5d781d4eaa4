"""Random numbers in the stages of a pipeline.

Ranks along a pipeline read the same data, and must go on to draw alike from every stream; what a stage draws is its own, and no other
stage draws as often. So the streams are put back after a batch, and those that any rank has drawn from move by one number on all.
"""

import pickle
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from zlib import crc32

import torch

from headway.runtime.device import Hardware
from headway.runtime.seed import read_streams, write_streams

NAMES = ("python", "numpy", "torch", "device")


class Drawn:
    """From which streams numbers were drawn in a block.

    Attributes:
        flags: 1 or 0 for each of `NAMES`.
    """

    def __init__(self) -> None:
        self.flags = [0.0] * len(NAMES)


@contextmanager
def own_streams(hardware: Hardware, rank: int) -> Iterator[Drawn]:
    """A block after which all streams are as before; where the models compute, it draws from a stream of this rank's own.

    That one follows from the common one. The others begin as the common ones: on a GPU what a model's forward draws on the host,
    outside of its blocks, is alike on all stages.

    Args:
        hardware: where the models compute.
        rank: along the pipeline.
    """
    told, common = Drawn(), read_streams(hardware)
    main = "torch" if hardware.kind == "cpu" else "device"
    start = dict(common)
    if main in common:  # not every device's stream can be read
        seed = crc32(common[main].numpy().tobytes()) * 65_537 + rank
        start[main] = torch.Generator(hardware.kind).manual_seed(seed).get_state()
        write_streams({main: start[main]}, hardware)
    try:
        yield told
    finally:
        now = read_streams(hardware)
        told.flags = [float(name in start and not _same(now[name], start[name])) for name in NAMES]
        write_streams(common, hardware)


def go_on(flags: Sequence[float], device: torch.device) -> None:
    """Move the common streams by one number each, where any rank has drawn: the next batch must not draw the same.

    Args:
        flags: for each of `NAMES`, alike on all ranks.
        device: where the models compute.
    """
    drawn = {name for name, flag in zip(NAMES, flags) if flag}
    if "python" in drawn:
        random.random()
    if "numpy" in drawn:
        import numpy

        numpy.random.random()
    if "torch" in drawn:
        torch.rand(())
    if "device" in drawn:
        torch.rand((), device=device)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    return pickle.dumps(one) == pickle.dumps(other)  # tuples, NumPy's with an array in it

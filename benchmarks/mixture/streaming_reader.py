"""Reader of the mixture with MosaicML Streaming, which runs in a separate Python because it needs an older NumPy.

It reads an array of every source, and answers each line of its standard input ("read", "resume" or "memory") with a line of JSON.
It ends when its input ends. `measure.py` starts it.
"""

import importlib
import json
import multiprocessing
import os
import sys
import time
import types
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any


def stub_torchvision() -> None:
    """Put empty modules in place of torchvision, if it is missing; only the image datasets of Streaming use it."""
    try:
        importlib.import_module("torchvision")
    except ImportError:
        importlib.import_module(
            "transformers"
        )  # import it before the stub, which it would mistake for the real package
        for name, members in {
            "torchvision": (),
            "torchvision.datasets": ("VisionDataset",),
            "torchvision.transforms": (),
            "torchvision.transforms.functional": ("to_tensor",),
        }.items():
            sys.modules[name] = module = types.ModuleType(name)
            for member in members:
                setattr(module, member, type(member, (), {}))


def main(folder: Path, settings: dict[str, Any]) -> None:
    """Write the sources as MDS files, then answer requests until the input ends.

    Args:
        folder: Folder with an array per source, `<name>.npy`.
        settings: "weights" by source, "batch_size", "num_batches", "num_samples", and "far", the sample at which a resume starts.
    """
    stub_torchvision()
    import numpy
    import torch
    from streaming import MDSWriter, Stream, StreamingDataset
    from streaming.base.util import clean_stale_shared_memory
    from torch.utils.data import DataLoader

    torch.set_num_threads(1)
    clean_stale_shared_memory()
    for name in settings["weights"]:
        array = numpy.load(folder / f"{name}.npy")
        with MDSWriter(out=str(folder / name), columns={"x": f"ndarray:int64:{array.shape[1]}"}) as writer:
            for row in array:
                writer.write({"x": row})
    datasets = []

    def load(num_workers: int = 0, start: int = 0) -> DataLoader[Any]:
        streams = [Stream(local=str(folder / name), proportion=share) for name, share in settings["weights"].items()]
        dataset = StreamingDataset(
            streams=streams,
            epoch_size=settings["num_samples"],
            batch_size=settings["batch_size"],
            shuffle=True,
            shuffle_seed=1,
        )
        datasets.append(dataset)  # keep it alive: its shared memory ends with it
        if start:
            dataset.load_state_dict(dataset.state_dict(start, from_beginning=True))
        return DataLoader(dataset, batch_size=settings["batch_size"], num_workers=num_workers)

    def find_memory() -> float:
        iterator = iter(load(1))
        for _ in range(50):
            next(iterator)
        (worker,) = multiprocessing.active_children()
        lines = Path(f"/proc/{worker.pid}/smaps_rollup").read_text().splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) / 1024

    passes: Iterator[Any] = iter(load())
    for line in sys.stdin:
        wall, cpu = time.perf_counter(), time.process_time()
        answer: dict[str, Any] = {}
        if line.strip() == "read":
            for _ in islice(passes, settings["num_batches"]):
                pass
        elif line.strip() == "resume":
            next(iter(load(start=settings["far"])))
        else:
            answer["memory"] = find_memory()
        answer |= {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}
        print(json.dumps(answer), flush=True)
    os._exit(0)  # Streaming's threads would block an ordinary exit


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))

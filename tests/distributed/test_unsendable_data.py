"""If one rank's object cannot be pickled, or its rows cannot be counted, all ranks get an error, so that none waits."""

import torch
from torch.utils.data import DataLoader

from headway import Accelerator, DataLoaderConfiguration
from tests.distributed.ranks import run_ranks


def make_lambda(rows):
    """Collate function whose batch cannot be pickled."""
    return {"rows": torch.stack(rows), "function": lambda: None}


class Shards(torch.utils.data.IterableDataset):
    """Sharded stream. The last item of the second shard has no tensor, so its rows cannot be counted."""

    num_shards = 2

    def __init__(self, shards=(0, 1)):
        self.shards = shards

    def shard(self, num_shards, index):
        """Return the shards of one rank."""
        return Shards(self.shards[index::num_shards])

    def __iter__(self):
        for shard in self.shards:
            yield from (torch.full((3,), float(shard)) for _ in range(2))
            yield "no tensor" if shard else torch.zeros(3)


def fail_in_pickle_or_count():
    """Return the type of error that this rank gets from each call, and the result of a collective that follows it."""
    accelerator = Accelerator(cpu=True)
    dispatching = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=True))
    rank = accelerator.process_index
    dispatched = DataLoader(torch.arange(8.0).view(8, 1), batch_size=2, collate_fn=make_lambda)
    calls = {
        "gather, rank 1": lambda: accelerator.collectives.gather_objects((lambda: None) if rank == 1 else rank),
        "gather, both": lambda: accelerator.collectives.gather_objects(lambda: None),
        "broadcast": lambda: accelerator.collectives.broadcast_object((lambda: None) if rank == 0 else None, src=0),
        "dispatch": lambda: list(dispatching.prepare(dispatched)),
        "stream": lambda: list(accelerator.prepare(DataLoader(Shards(), batch_size=None))),
    }
    found = {}
    for name, call in calls.items():
        error = None
        try:
            call()
        except Exception as raised:
            error = raised
        found[name] = (type(error).__name__, str(error))
        assert accelerator.reduce(torch.tensor(1)).item() == 2  # the ranks are still in step
    return found


def test_data_that_cannot_be_sent_or_counted_raises_an_error_on_every_rank():
    first, second = run_ranks(fail_in_pickle_or_count, 2, timeout=120)
    assert first["gather, rank 1"][0] == first["stream"][0].replace("DataError", "CollectiveError") == "CollectiveError"
    assert "rank 1 cannot send its object" in first["gather, rank 1"][1]
    assert "Can't pickle" in second["gather, rank 1"][1] or "pickle" in second["gather, rank 1"][1]
    assert "pickle" in first["gather, both"][1]
    assert "pickle" in first["broadcast"][1]
    assert second["broadcast"][0] == second["dispatch"][0] == "CollectiveError"
    assert "rank 0 cannot send its object" in second["dispatch"][1]
    assert "an item of rank 1" in first["stream"][1]
    assert first["stream"] == second["stream"]

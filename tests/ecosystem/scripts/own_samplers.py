"""A loop with its own sharded sampler, loader and tracker, like scripts that do not pass their loaders to `prepare`."""

import torch
from accelerate import Accelerator
from accelerate.data_loader import (
    BatchSamplerShard,
    IterableDatasetShard,
    SeedableRandomSampler,
    SkipBatchSampler,
    prepare_data_loader,
)
from accelerate.test_utils import RegressionDataset, RegressionModel, are_the_same_tensors
from accelerate.tracking import GeneralTracker, on_main_process, register_tracker_class
from accelerate.utils import clean_state_dict_for_safetensors, get_data_structure, set_seed
from torch.utils.data import BatchSampler, DataLoader

from tests.scripts.evidence import Evidence


class Rows(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(range(13))


class Memory(GeneralTracker):
    name = "memory"
    requires_logging_directory = False

    def __init__(self, run_name):
        super().__init__()
        self.rows = []

    @property
    def tracker(self):
        return self.rows

    @on_main_process
    def store_init_configuration(self, values):
        self.rows.append(values["lr"])

    @on_main_process
    def log(self, values, step=None, **kwargs):
        self.rows += [step, values["loss"]]


def main():
    set_seed(11)
    register_tracker_class(Memory)
    accelerator = Accelerator(cpu=True, log_with="memory")
    accelerator.init_trackers("own", {"lr": 0.05})
    evidence = Evidence("evidence", accelerator.process_index)
    places = accelerator.num_processes, accelerator.process_index

    dataset = RegressionDataset(length=22, seed=5)
    sampler = SeedableRandomSampler(dataset, data_seed=3)
    batches = BatchSamplerShard(BatchSampler(sampler, 4, False), *places)
    loader = DataLoader(dataset, batch_sampler=batches)
    model = RegressionModel()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05))
    step = 0
    for _ in range(3):
        for batch in loader:
            loss = torch.nn.functional.mse_loss(model(batch["x"]), batch["y"])
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            accelerator.log({"loss": loss.item()}, step=step)
            evidence.add("loss", loss.item())
            step += 1
    evidence.add("lengths", len(batches), sampler.epoch)
    for name, value in clean_state_dict_for_safetensors(accelerator.unwrap_model(model).state_dict()).items():
        evidence.add(name, value.item(), float(are_the_same_tensors(value)))
    evidence.add("rows", *IterableDatasetShard(Rows(), 2, False, *places))
    evidence.add("skipped", *(row for batch in SkipBatchSampler(BatchSampler(range(9), 2, False), 2) for row in batch))
    shared = prepare_data_loader(DataLoader(range(22), batch_size=4))
    evidence.add("shared", *(row for batch in shared for row in batch.tolist()))
    evidence.add("shapes", *get_data_structure(batch)["x"].shape)
    if accelerator.is_main_process:
        evidence.add("tracked", *accelerator.get_tracker("memory", unwrap=True))
    accelerator.end_training()
    evidence.write()


if __name__ == "__main__":
    main()

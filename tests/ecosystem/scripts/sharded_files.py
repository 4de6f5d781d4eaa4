"""A model that plain torch shards: Accelerate's functions write or read its weights and its optimizer's state."""

import argparse
from types import SimpleNamespace

import torch
import torch.distributed as dist
from accelerate import PartialState
from accelerate.utils import (
    FullyShardedDataParallelPlugin,
    load_fsdp_model,
    load_fsdp_optimizer,
    save_fsdp_model,
    save_fsdp_optimizer,
)
from peft import LoraConfig, get_peft_model
from torch.distributed.fsdp import fully_shard

from tests.scripts.evidence import Evidence


def gather_whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--kind", default="SHARDED_STATE_DICT")
    parser.add_argument("--read", help="folder that an earlier run wrote")
    parser.add_argument("--adapter", action="store_true", help="a PEFT model")
    flags = parser.parse_args()
    process = PartialState(cpu=True)
    rank, count = process.process_index, process.num_processes
    torch.manual_seed(5 if flags.read else 4)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))
    if flags.adapter:
        torch.manual_seed(4)
        model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))
        torch.manual_seed(5 if flags.read else 4)
        model = get_peft_model(model, LoraConfig(r=2, target_modules=["0", "2"]))
    fully_shard(model)
    learning = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(learning, lr=0.1)
    accelerator = SimpleNamespace(
        num_processes=count,
        process_index=rank,
        is_main_process=rank == 0,
        is_fsdp2=True,
        wait_for_everyone=dist.barrier,
    )
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type=flags.kind)
    evidence = Evidence("evidence", rank)
    if flags.read:
        load_fsdp_model(plugin, accelerator, model, flags.read, adapter_only=True)
        load_fsdp_optimizer(plugin, accelerator, optimizer, model, flags.read)
    else:
        for step in range(3):
            model(torch.full((4, 6), step + 1.0)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        save_fsdp_model(plugin, accelerator, model, "saved", adapter_only=True)
        save_fsdp_optimizer(plugin, accelerator, optimizer, model, "saved")
    for parameter in model.parameters():
        evidence.add("weights", gather_whole(parameter))
    for parameter in learning:
        state = optimizer.state[parameter]
        evidence.add("optimizer", state["step"], gather_whole(state["exp_avg"]), gather_whole(state["exp_avg_sq"]))
    evidence.write()
    process.wait_for_everyone()
    process.destroy_process_group()


main()

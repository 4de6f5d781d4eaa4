"""Reads Accelerate's singletons in the same order as transformers, and records their values."""

import argparse
import io

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DataLoaderConfiguration, GradientAccumulationPlugin
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from tests.scripts.evidence import Evidence


def arguments(**given):
    return TrainingArguments(
        output_dir="out", use_cpu=True, report_to=[], disable_tqdm=True, save_strategy="no", **given
    )


def is_known():
    return [float(each._shared_state != {}) for each in (PartialState, AcceleratorState)]


def windows(evidence, accelerator, loader):
    state, outer = accelerator.gradient_state, GradientState()
    evidence.add("outside", state.in_dataloader, state.sync_gradients, state.end_of_dataloader, state.remainder)
    for number, rows in enumerate(loader):
        state._set_sync_gradients(number == 1)
        evidence.add("inside", state.in_dataloader, state.end_of_dataloader, state.remainder, len(rows))
        evidence.add("shared", outer.sync_gradients, accelerator.sync_gradients, state.active_dataloader is loader)
        with torch.no_grad():
            evidence.add("gathered", accelerator.gather_for_metrics(rows))
    evidence.add("outside", state.in_dataloader, state.num_steps, float(state.sync_with_dataloader))
    evidence.add("plugin", *(float(state.plugin_kwargs.get(name, 0)) for name in ("num_steps", "sync_each_batch")))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--configured", action="store_true", help="create the state before TrainingArguments")
    flags = parser.parse_args()
    known = [is_known()]
    if flags.configured:
        PartialState(cpu=True)
        given = arguments(accelerator_config={"use_configured_state": True})
    else:
        given = arguments()
    known.append([given.world_size, given.process_index, given.local_process_index, *is_known()])
    evidence = Evidence("evidence", given.process_index)
    again = arguments(seed=7)  # some scripts create two, for example for hyperparameter tuning
    known.append([again.world_size, again.process_index, float(given.distributed_state == again.distributed_state)])
    plugin = GradientAccumulationPlugin(num_steps=1, sync_with_dataloader=False)
    loading = DataLoaderConfiguration(even_batches=True)
    loading.data_seed = 5
    accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=plugin, dataloader_config=loading)
    known.append(is_known())
    model = accelerator.prepare_model(torch.nn.Linear(2, 2), evaluation_mode=True)
    known.append([len(accelerator._models), float(accelerator.unwrap_model(model) is model)])
    accelerator.free_memory()
    known.append(
        [len(accelerator._models), float(accelerator.scaler is None), float(accelerator.optimizer_step_was_skipped)]
    )
    windows(evidence, accelerator, accelerator.prepare(DataLoader(torch.arange(13.0), batch_size=4)))
    stored = io.BytesIO()
    torch.save(again, stored)
    read = torch.load(io.BytesIO(stored.getvalue()), weights_only=False)
    known.append([read.seed, read.distributed_state.num_processes, read.distributed_state.process_index])
    AcceleratorState._reset_state(reset_partial_state=True)
    known.append(is_known())
    config = GPT2Config(vocab_size=8, n_positions=8, n_embd=8, n_layer=1, n_head=2, bos_token_id=1, eos_token_id=2)
    trainer = Trainer(GPT2LMHeadModel(config), arguments())
    known.append([*is_known(), trainer.args.world_size, len(trainer.accelerator._models)])
    for each in known:
        evidence.add("known", *map(float, each))
    evidence.write()
    trainer.accelerator.wait_for_everyone()  # the process that hosts the store must not exit before the others have started


main()

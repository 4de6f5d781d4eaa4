"""Adapts a frozen GPT-2 to a task with low-rank adapters, which are the only weights that are trained and saved."""

import argparse
import os

import torch
from accelerate import Accelerator
from accelerate.utils import is_peft_model, set_seed
from evidence import Evidence
from peft import LoraConfig, PeftModel, TaskType, get_peft_model
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm
from transformers import GPT2Config, GPT2LMHeadModel, get_linear_schedule_with_warmup


def make_model(seed):
    """Create the base model with random weights from a seed, instead of downloading pretrained ones."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = GPT2Config(
            vocab_size=32, n_positions=12, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )  # fmt: skip
        return GPT2LMHeadModel(config)


def make_copies(number, seed):
    """Return sequences whose second half repeats the first."""
    half = torch.randint(1, 32, (number, 6), generator=torch.Generator().manual_seed(seed))
    return TensorDataset(torch.cat([half, half], dim=1))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output_dir", default="lora-out")
    parser.add_argument("--num_epochs", type=int, default=3)
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=2)
    parser.add_argument("--lora_dropout", type=float, default=0.1)
    parser.add_argument("--in_order", action="store_true", help="no shuffling")
    parser.add_argument("--evidence", default=None)
    args = parser.parse_args()

    accelerator = Accelerator(gradient_accumulation_steps=args.gradient_accumulation_steps)
    evidence = Evidence(args.evidence, accelerator.process_index)
    set_seed(42)
    peft_config = LoraConfig(
        task_type=TaskType.CAUSAL_LM, inference_mode=False, r=4, lora_alpha=16, lora_dropout=args.lora_dropout,
        target_modules=["c_attn"], fan_in_fan_out=True,
    )  # fmt: skip
    model = get_peft_model(make_model(seed=0), peft_config)
    if accelerator.is_main_process:
        model.print_trainable_parameters()
    assert is_peft_model(model)

    train_dataloader = DataLoader(make_copies(64, 1), shuffle=not args.in_order, batch_size=args.batch_size)
    eval_dataloader = DataLoader(make_copies(19, 2), batch_size=args.batch_size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    lr_scheduler = get_linear_schedule_with_warmup(
        optimizer=optimizer,
        num_warmup_steps=0,
        num_training_steps=len(train_dataloader) * args.num_epochs,
    )
    model, train_dataloader, eval_dataloader, optimizer, lr_scheduler = accelerator.prepare(
        model, train_dataloader, eval_dataloader, optimizer, lr_scheduler
    )
    accelerator.print(type(accelerator.unwrap_model(model)).__name__)
    is_ds_zero_3 = False
    if getattr(accelerator.state, "deepspeed_plugin", None):
        is_ds_zero_3 = accelerator.state.deepspeed_plugin.zero_stage == 3

    for epoch in range(args.num_epochs):
        model.train()
        total_loss = 0
        for (input_ids,) in tqdm(train_dataloader, disable=not accelerator.is_local_main_process):
            with accelerator.accumulate(model):
                outputs = model(input_ids=input_ids, labels=input_ids)
                loss = outputs.loss
                total_loss += loss.detach().float()
                evidence.add("loss", loss)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    evidence.gradients(accelerator.unwrap_model(model))
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
        model.eval()
        eval_preds = []
        for (input_ids,) in tqdm(eval_dataloader, disable=not accelerator.is_local_main_process):
            with torch.no_grad():
                outputs = (
                    accelerator.unwrap_model(model)(input_ids=input_ids, synced_gpus=is_ds_zero_3)
                    if is_ds_zero_3
                    else model(input_ids=input_ids)
                )
            predictions = accelerator.pad_across_processes(outputs.logits.argmax(dim=-1), dim=1, pad_index=0)
            eval_preds.extend(accelerator.gather_for_metrics(predictions).cpu().tolist())
        expected = make_copies(19, 2).tensors[0][:, 7:]
        accuracy = (torch.tensor(eval_preds)[:, 6:-1] == expected).double().mean()
        accelerator.print(f"{epoch=}: {accuracy=}, train loss {total_loss / len(train_dataloader):.4f}")
        evidence.add("metrics", len(eval_preds), accuracy)

    accelerator.wait_for_everyone()
    unwrapped_model = accelerator.unwrap_model(model)
    unwrapped_model.save_pretrained(
        args.output_dir,
        state_dict=accelerator.get_state_dict(model),
        is_main_process=accelerator.is_main_process,
        save_function=accelerator.save,
        save_embedding_layers=False,
    )
    accelerator.wait_for_everyone()
    evidence.parameters(unwrapped_model)
    if accelerator.is_main_process:
        size = os.path.getsize(os.path.join(args.output_dir, "adapter_model.safetensors"))
        loaded = PeftModel.from_pretrained(make_model(seed=0), args.output_dir)
        evidence.parameters(loaded, name="loaded")
        evidence.add("bytes of adapters", size)
        assert size < sum(p.numel() * 4 for p in unwrapped_model.parameters()) / 5
    evidence.write()
    accelerator.end_training()


if __name__ == "__main__":
    main()

"""LoRA: adapters of PEFT on a frozen model, here a tiny Llama.

Run: headway launch --cpu -n 2 examples/cookbook/lora.py      (pip install transformers peft)

Only the adapters are trained, exchanged between processes and saved: the checkpoint has a digest of the frozen base instead of
its weights. The same script runs with --layout fsdp, which also shards the base. Prints the loss of each epoch, and the token
that the adapted model predicts after 5, 6, ... 12, which is 13.
"""

import argparse
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM

from headway import Accelerator, ProjectConfiguration, set_seed


def make_base() -> LlamaForCausalLM:
    """Return the pretrained base. In a real program: `from_pretrained`."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
    )
    return LlamaForCausalLM(config)


def make_counting(num_rows: int) -> TensorDataset:
    """Return sequences that count upward from a random number."""
    first = torch.randint(0, 32, (num_rows, 1), generator=torch.Generator().manual_seed(1))
    return TensorDataset((first + torch.arange(12)) % 32)


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", default="runs/lora")
    parser.add_argument("--layout", default="ddp", help="layout of the ranks (default: ddp)")
    parser.add_argument("--epochs", type=int, default=4, help="default: 4")
    args = parser.parse_args(arguments)

    project = ProjectConfiguration(args.folder, automatic_checkpoint_naming=True, save_frozen=False)
    accelerator = Accelerator(strategy=args.layout, project_config=project)
    base = make_base()
    set_seed(0)
    settings = LoraConfig(r=8, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(base, settings)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    loader = DataLoader(make_counting(256), batch_size=16 // accelerator.num_data_shards, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    accelerator.resume()

    loss = torch.tensor(0.0)
    for epoch in accelerator.epochs(args.epochs):
        for (tokens,) in loader:
            with accelerator.accumulate(model):
                loss = model(input_ids=tokens, labels=tokens).loss
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(trained, 1.0)
                optimizer.step()
                optimizer.zero_grad()
        accelerator.save_state()
        accelerator.print(f"epoch {epoch}: loss {accelerator.reduce(loss.detach(), 'mean'):.4f}")

    # With any layout, the main process gets whole tensors. PEFT selects its adapters and writes them in its own format.
    weights = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        accelerator.unwrap_model(model).save_pretrained(f"{args.folder}/adapter", state_dict=weights)
    accelerator.wait_for_everyone()

    reloaded = PeftModel.from_pretrained(make_base(), f"{args.folder}/adapter").eval()
    with torch.no_grad():
        next_token = reloaded(input_ids=torch.arange(5, 13)[None]).logits.argmax(-1)[0, -1].item()
    accelerator.print(f"after 5, 6, ... 12 the adapted model predicts {next_token}")
    result = {"loss": accelerator.reduce(loss.detach(), "mean").item(), "following": next_token}
    accelerator.end_training()
    return result


if __name__ == "__main__":
    main()

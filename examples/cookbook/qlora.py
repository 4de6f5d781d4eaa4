"""QLoRA: adapters of PEFT on a base in 4 bits, here a tiny Llama quantized by bitsandbytes.

Run: headway launch --cpu -n 2 examples/cookbook/qlora.py     (pip install transformers peft bitsandbytes accelerate)

bitsandbytes runs on a CPU, too, but slowly. transformers imports accelerate to load quantized weights; the script itself uses
Headway. For --layout fsdp, the 4-bit weights are stored as float32 (bnb_4bit_quant_storage), so that they can be sharded. Prints
the loss of each epoch.
"""

import argparse
from typing import Any

import torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from torch.utils.data import DataLoader, TensorDataset
from transformers import BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

from headway import Accelerator, set_seed


def write_base(folder: str) -> None:
    """Write the pretrained base, which a real program would download."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def make_counting(num_rows: int) -> TensorDataset:
    """Return sequences that count upward from a random number."""
    first = torch.randint(0, 32, (num_rows, 1), generator=torch.Generator().manual_seed(1))
    return TensorDataset((first + torch.arange(12)) % 32)


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", default="runs/qlora")
    parser.add_argument("--layout", default="ddp")
    parser.add_argument("--epochs", type=int, default=4)
    args = parser.parse_args(arguments)

    accelerator = Accelerator(strategy=args.layout)
    if accelerator.is_main_process:
        write_base(f"{args.folder}/base")
    accelerator.wait_for_everyone()
    quantization = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,  # torch.bfloat16 on a GPU
        bnb_4bit_quant_storage=torch.float32,
    )
    base = LlamaForCausalLM.from_pretrained(
        f"{args.folder}/base", quantization_config=quantization, device_map={"": accelerator.device}
    )
    base = prepare_model_for_kbit_training(base, use_gradient_checkpointing=False)
    set_seed(0)
    settings = LoraConfig(r=8, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(base, settings)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    loader = DataLoader(make_counting(256), batch_size=16 // accelerator.num_data_shards, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    for epoch in range(args.epochs):
        for (tokens,) in loader:
            with accelerator.accumulate(model):
                loss = model(input_ids=tokens, labels=tokens).loss
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(trained, 1.0)
                optimizer.step()
                optimizer.zero_grad()
        mean = accelerator.reduce(loss.detach(), "mean").item()
        accelerator.print(f"epoch {epoch}: loss {mean:.4f}")

    weights = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        accelerator.unwrap_model(model).save_pretrained(f"{args.folder}/adapter", state_dict=weights)
    accelerator.wait_for_everyone()
    num_packed = sum(type(parameter).__name__ == "Params4bit" for parameter in model.parameters())
    accelerator.end_training()
    return {"loss": mean, "packed": num_packed}


if __name__ == "__main__":
    main()

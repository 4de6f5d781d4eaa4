"""LoRA adapters of PEFT on a frozen tiny Llama; the checkpoints leave the base out."""

import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM

from headway import Accelerator, ProjectConfiguration, set_seed

set_seed(0)
project = ProjectConfiguration("runs/lora", automatic_checkpoint_naming=True, total_limit=2, save_frozen=False)
accelerator = Accelerator(project_config=project)
base = LlamaForCausalLM(
    LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
)
model = get_peft_model(base, LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
optimizer = torch.optim.AdamW(trained, lr=1e-2)
tokens = (torch.randint(0, 32, (80, 1)) + torch.arange(10)) % 32
loader = DataLoader(TensorDataset(tokens), batch_size=8 // accelerator.num_processes, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
accelerator.resume()

for _ in accelerator.epochs(1):
    for (batch,) in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(input_ids=batch, labels=batch).loss)
            accelerator.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.num_updates % 2 == 0:
            accelerator.save_state()
accelerator.end_training()

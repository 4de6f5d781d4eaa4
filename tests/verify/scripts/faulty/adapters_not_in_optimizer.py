"""A tiny Llama with LoRA adapters of PEFT.

Fault: the list of parameters is made from the base before get_peft_model adds the adapters, so the optimizer holds
frozen weights and nothing else. Reported as adapter-hub/adapters#260.
Expect: what learns, learns: lora_A and lora_B get gradients and never change; they belong to no optimizer.
"""

import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM

from headway import Accelerator, ProjectConfiguration, set_seed

set_seed(0)
accelerator = Accelerator(
    project_config=ProjectConfiguration("runs/adapters", automatic_checkpoint_naming=True, total_limit=2)
)
base = LlamaForCausalLM(
    LlamaConfig(vocab_size=24, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
)
parameters = list(base.parameters())
model = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
optimizer = torch.optim.AdamW(parameters, lr=0.01)
tokens = (torch.randint(0, 24, (80, 1)) + torch.arange(8)) % 24
loader = DataLoader(TensorDataset(tokens), batch_size=8 // accelerator.num_processes, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
accelerator.resume()

for _ in accelerator.epochs(1):
    for (batch,) in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(input_ids=batch, labels=batch).loss)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.num_updates % 2 == 0:
            accelerator.save_state()
accelerator.end_training()

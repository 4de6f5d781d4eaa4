"""PEFT with a dispatched model: LoRA is trained, saved, loaded into a dispatched model, and merged.

Argument: the place of two of the model's three blocks, cpu or disk. With disk, this combination fails in Accelerate and
PEFT.
"""

import sys
import zlib

import torch
from accelerate import Accelerator
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from tests.scripts.evidence import Evidence

(way,) = sys.argv[1:]
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, bos_token_id=1, eos_token_id=2, pad_token_id=0,
)  # fmt: skip
LlamaForCausalLM(config).save_pretrained("checkpoint--llama", max_shard_size="20kB")
accelerator = Accelerator()
evidence = Evidence("evidence", accelerator.process_index)
device_map = {
    "model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": way, "model.layers.2": way,
    "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu",
}  # fmt: skip


memory = {"cpu": "60kB" if way == "disk" else "1GB"}


def load_dispatched() -> torch.nn.Module:
    """Load the model with two of its blocks at `way`."""
    return AutoModelForCausalLM.from_pretrained("checkpoint--llama", device_map=device_map, offload_folder="offload")


lora = LoraConfig(
    r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM", init_lora_weights=False
)
torch.manual_seed(1)
model = get_peft_model(load_dispatched(), lora)
optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-2)
tokens = torch.randint(3, 60, (4, 8))
for _ in range(3):
    loss = model(input_ids=tokens, labels=tokens).loss
    accelerator.backward(loss)
    evidence.gradients(model)
    optimizer.step()
    optimizer.zero_grad()
    evidence.add("loss", loss)
model.eval()
with torch.no_grad():
    evidence.add("trained", model(input_ids=tokens).logits)
model.save_pretrained("adapter")

again = PeftModel.from_pretrained(
    load_dispatched(), "adapter", offload_folder="offload again", max_memory=memory
).eval()
with torch.no_grad():
    evidence.add("loaded", again(input_ids=tokens).logits)
    evidence.add("tokens", again.generate(input_ids=tokens, max_new_tokens=5, do_sample=False))
hooks = {name: type(each._hf_hook).__name__ for name, each in again.named_modules() if hasattr(each, "_hf_hook")}
evidence.add("hooks", *(float(zlib.crc32(str(each).encode())) for each in hooks.items()))

merged = PeftModel.from_pretrained(
    load_dispatched(), "adapter", offload_folder="offload again", max_memory=memory
).merge_and_unload()
with torch.no_grad():
    evidence.add("merged", merged(input_ids=tokens).logits)
merged.resize_token_embeddings(70)
with torch.no_grad():
    evidence.add("resized", merged(input_ids=tokens).logits[..., :64])
merged.save_pretrained("merged", safe_serialization=True)
evidence.parameters(AutoModelForCausalLM.from_pretrained("merged"))
evidence.write()

"""transformers loads a sharded checkpoint with a device map, generates text, and saves the model again.

Arguments: the model family (llama, gpt2, t5), and the device map (cpu, disk, auto, word, or toy for the toy
accelerator).
"""

import sys
import zlib

import torch
from accelerate import PartialState, dispatch_model
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.integrations.accelerate import skip_device_map_check

from tests.scripts.evidence import Evidence

family, places = sys.argv[1:]
if places == "toy":
    from tests.accelerator.toy import register

    register()
torch.manual_seed(0)
if family == "llama":
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    reference, loader = LlamaForCausalLM(config).eval(), AutoModelForCausalLM
    blocks, others = "model.layers", ["model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"]
elif family == "gpt2":
    config = GPT2Config(
        vocab_size=96, n_positions=32, n_embd=32, n_layer=3, n_head=4, bos_token_id=1, eos_token_id=2, pad_token_id=0
    )
    reference, loader = GPT2LMHeadModel(config).eval(), AutoModelForCausalLM
    blocks, others = "transformer.h", ["transformer.wte", "transformer.wpe", "transformer.ln_f", "lm_head"]
else:
    config = T5Config(
        vocab_size=80, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0,
        pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    reference, loader = T5ForConditionalGeneration(config).eval(), T5ForConditionalGeneration
    blocks, others = (
        "decoder.block",
        ["shared", "encoder", "decoder.embed_tokens", "decoder.final_layer_norm", "lm_head"],
    )
size = sum(each.numel() for each in reference.parameters()) * 4

evidence = Evidence("evidence", PartialState(cpu=True).process_index)
reference.save_pretrained("checkpoint", max_shard_size="20kB")
arguments = {
    "cpu": {"device_map": "auto"},
    "word": {"device_map": "cpu"},
    "auto": {"device_map": "auto", "max_memory": {"cpu": size * 2 // 3}, "offload_folder": "offload"},
    "disk": {"device_map": {blocks: "disk", **dict.fromkeys(others, "cpu")}, "offload_folder": "offload"},
    "toy": {
        "device_map": {
            f"{blocks}.0": "toy:0", f"{blocks}.1": "cpu", f"{blocks}.2": "cpu", **dict.fromkeys(others, "toy:0")
        },
        "offload_folder": "offload",
    },
}[places]  # fmt: skip
model = loader.from_pretrained("checkpoint", **arguments).eval()


def hash_text(words: object) -> float:
    """Return a number that stands for the text."""
    return float(zlib.crc32(str(words).encode()))


def note_hooks(root: torch.nn.Module) -> None:
    """Record which modules have hooks, and of which kind."""
    for name, module in root.named_modules():
        hook = getattr(module, "_hf_hook", None)
        if hook is not None:
            evidence.add("hooks", hash_text((name, type(hook).__name__)))
            hook = hook.hooks[-1] if hasattr(hook, "hooks") else hook
            settings = (hook.execution_device, hook.offload, hook.io_same_device, hook.place_submodules)
            evidence.add("hooks say", hash_text(settings), hash_text(hook.weights_map is None))


evidence.add(
    "map", hash_text(sorted((name, str(device)) for name, device in getattr(model, "hf_device_map", {}).items()))
)
note_hooks(model)
tokens = torch.randint(3, 60, (2, 6))
inputs = {"input_ids": tokens, **({"labels": tokens} if family == "t5" else {})}
with torch.no_grad():
    evidence.add("logits", model(**inputs).logits, model(**inputs).logits)
evidence.add("as the reference", torch.equal(model(**inputs).logits, reference(**inputs).logits))
for choice in ({"do_sample": False}, {"do_sample": True, "top_k": 5}, {"num_beams": 3}):
    torch.manual_seed(1)
    evidence.add("tokens", model.generate(tokens, max_new_tokens=6, **choice))
note_hooks(model)
evidence.add("devices", *(hash_text(each) for each in (model.device, model.dtype)))
model.save_pretrained("again", max_shard_size="20kB")
again = loader.from_pretrained("again").eval()
evidence.parameters(again, name="saved again")
evidence.add("of the reference", *(torch.equal(a, b) for a, b in zip(again.parameters(), reference.parameters())))
if places == "disk":
    # The map leaves out the head, like maps of models with parameters that must not be placed.
    covered = {name: place for name, place in arguments["device_map"].items() if name != "lm_head"}
    with skip_device_map_check():
        dispatch_model(reference, covered, offload_dir="offload again")
    evidence.add("map that leaves something out", reference(**inputs).logits)
evidence.write()

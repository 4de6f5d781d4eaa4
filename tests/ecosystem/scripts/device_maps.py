"""Device maps for several models and memory budgets, as transformers, PEFT and diffusers request them."""

from math import inf

import torch
from accelerate import PartialState, infer_auto_device_map, init_empty_weights
from accelerate.utils import compute_module_sizes, get_balanced_memory
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from tests.scripts.evidence import Evidence

evidence = Evidence("evidence", PartialState(cpu=True).process_index)
with init_empty_weights():
    llama = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
            num_key_value_heads=2,
        )
    )  # fmt: skip
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=96, n_positions=32, n_embd=32, n_layer=4, n_head=4))
    t5 = T5ForConditionalGeneration(T5Config(vocab_size=80, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4))
    bert = BertForSequenceClassification(
        BertConfig(
            vocab_size=64, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=64,
            max_position_embeddings=32,
        )
    )  # fmt: skip
    layers = [torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 16)) for _ in range(5)]
    plain = torch.nn.Sequential(*layers)
gpt2.tie_weights()
t5.tie_weights()
MODELS = [
    (llama, ["LlamaDecoderLayer"]),
    (gpt2, ["GPT2Block"]),
    (t5, ["T5Block"]),
    (bert, ["BertLayer"]),
    (plain, None),
]
BUDGETS = [
    {"cpu": 4.0}, {"cpu": 0.5}, {"cpu": 0.33}, {0: 0.5, "cpu": 4.0}, {0: 0.3, "cpu": 0.3}, {0: 0.6, 1: 0.6, "cpu": 4.0},
    {0: 0.4, 1: 0.4, "cpu": 0.1}, {0: 0.5, 1: 0.5, 2: 0.5, "cpu": 1.0},
]  # fmt: skip


def find_device(device_map: dict, name: str) -> object:
    """Return the device of the longest entry that contains the name, or None."""
    while name not in device_map and name:
        name = name.rpartition(".")[0]
    return device_map.get(name)


for model, no_split in MODELS:
    size = compute_module_sizes(model)[""]
    names = {id(each): name for name, each in model.named_parameters()}
    for budget in BUDGETS:
        limits = {device: int(size * share) for device, share in budget.items()}
        for balanced in (False, True):
            memory = get_balanced_memory(model, dict(limits), no_split_module_classes=no_split) if balanced else limits
            device_map = infer_auto_device_map(model, dict(memory), no_split_module_classes=no_split)
            used: dict[object, int] = dict.fromkeys([*limits, "disk"], 0)
            for name in names.values():
                parameter = model.get_parameter(name)
                used[find_device(device_map, name)] += parameter.numel() * parameter.element_size()
            split = [name for name, each in model.named_modules() if type(each).__name__ in (no_split or ())]
            inside = [
                {device for entry, device in device_map.items() if entry.startswith(f"{name}.")} for name in split
            ]
            kind = "host alone" if list(budget) == ["cpu"] else "accelerators"
            evidence.add(f"{kind}: over budget", sum(used[device] > limits.get(device, inf) for device in used))
            evidence.add(f"{kind}: blocks apart", sum(len(devices) > 1 for devices in inside))
            evidence.add(f"{kind}: on accelerators", sum(used[device] for device in used if isinstance(device, int)))
            evidence.add(f"{kind}: not on disk", sum(used.values()) - used["disk"])
            evidence.add(f"{kind}: budgets within limits", all(memory[device] <= limits[device] for device in limits))
evidence.write()

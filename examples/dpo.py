"""DPO: a small Llama learns which of two responses is preferred, with the loss in plain sight.

    python examples/dpo.py                                          on one process
    headway launch --cpu -n 2 examples/dpo.py                       on two processes, with the same updates
    headway launch --cpu -n 2 examples/dpo.py --layout fsdp         both models sharded
    headway launch --cpu -n 2 examples/dpo.py --lora                an adapter, whose base is the reference model

The preferred responses are complete sentences; the rejected ones are not. The script prints the values that TRL's DPOTrainer
logs, averaged over the pairs of an update, and at the end those of pairs that were not trained. You can kill the script at any
time and start it again: it continues with the next pair. It needs `pip install transformers`, and `peft` for --lora.
"""

import argparse
import copy
import random

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn.functional import cross_entropy, logsigmoid
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from headway import Accelerator, ChatDataset, PreferenceCollator, PreferenceTokenizer, ProjectConfiguration, set_seed

BETA = 0.1
"""How strongly the reference model holds back the policy."""
PAIRS_PER_UPDATE = 8
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CAPITALS = {
    "France": "Paris", "Japan": "Tokyo", "Kenya": "Nairobi", "Peru": "Lima", "Norway": "Oslo", "Egypt": "Cairo",
    "Italy": "Rome", "Cuba": "Havana", "Ghana": "Accra", "Spain": "Madrid", "Chile": "Santiago", "Fiji": "Suva",
}  # fmt: skip


# ---------------------------------------------------------------- data and models


def make_pairs(number, seed):
    """Return preference pairs in TRL's format. In a real program: `datasets.load_dataset`."""
    draw = random.Random(seed)
    rows = []
    for country in draw.choices(list(CAPITALS), k=number):
        capital = CAPITALS[country]
        rows.append({
            "prompt": [{"role": "user", "content": f"What is the capital of {country}?"}],
            "chosen": [{"role": "assistant", "content": f"The capital of {country} is {capital}."}],
            "rejected": [{"role": "assistant", "content": draw.choice([capital, f"{capital}, I think", "no idea"])}],
        })  # fmt: skip
    return rows


def make_tokenizer():
    """Return a byte-level tokenizer with a chat template."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special = ["<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    inner.train_from_iterator(
        [], trainers.BpeTrainer(special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="<|im_end|>", extra_special_tokens=special[:1]
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def make_model(vocabulary_size):
    """Return the model to train. In a real program: `from_pretrained` of a model that was trained on conversations."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=vocabulary_size, **sizes))


# ---------------------------------------------------------------- loss


def compute_log_probabilities(model, batch):
    """Return the log-probability of each response, given its prompt: [pairs, 2], chosen first."""
    tokens, mask, labels = (batch[name].flatten(0, 1) for name in ("input_ids", "attention_mask", "labels"))
    logits = model(input_ids=tokens, attention_mask=mask, use_cache=False).logits[:, :-1].float()
    losses = cross_entropy(logits.transpose(1, 2), labels[:, 1:], reduction="none")  # 0 where the label is -100
    return -losses.sum(1).view(-1, 2)


def compute_reference(model, reference, batch):
    """Return the log-probabilities of the reference model. Without one, it is the model without its adapter."""
    with torch.no_grad():
        if reference is not None:
            return compute_log_probabilities(reference, batch)
        with model.disable_adapter():
            return compute_log_probabilities(model, batch)


def compute_losses(policy, reference):
    """Return the DPO loss of each pair, and the values to log, from log-probabilities of shape [pairs, 2]."""
    chosen, rejected = (BETA * (policy - reference)).unbind(1)
    losses = -logsigmoid(chosen - rejected)
    values = {
        "loss": losses,
        "rewards/chosen": chosen,
        "rewards/rejected": rejected,
        "rewards/accuracies": chosen > rejected,
        "rewards/margins": chosen - rejected,
    }
    return losses, {name: each.detach().double() for name, each in values.items()}


class Averages:
    """Means of logged values over pairs: all micro-batches and ranks since the last call of `compute`."""

    def __init__(self):
        self.sums, self.count = {}, 0

    def add(self, values, count):
        """Add the values of the first `count` pairs of a batch."""
        for name, each in values.items():
            self.sums[name] = self.sums.get(name, 0) + each[:count].sum()
        self.count += count

    def compute(self, accelerator):
        """Return the means, and start again. All ranks must call this."""
        means = {name: accelerator.reduce_mean(total, self.count).item() for name, total in self.sums.items()}
        self.sums, self.count = {}, 0
        return means


# ---------------------------------------------------------------- training


def evaluate(accelerator, model, reference, loader):
    """Return the means over all pairs of the loader."""
    averages = Averages()
    model.eval()
    with torch.no_grad():
        for batch in loader:
            policy = compute_log_probabilities(model, batch)
            _, values = compute_losses(policy, compute_reference(model, reference, batch))
            averages.add(values, loader.num_valid)
    model.train()
    return averages.compute(accelerator)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="runs/dpo", help="folder of the checkpoints and the log (default: runs/dpo)")
    parser.add_argument("--layout", default="ddp", help="layout of the ranks (default: ddp)")
    parser.add_argument("--lora", action="store_true", help="train an adapter instead of the whole model")
    parser.add_argument("--updates", type=int, default=30, help="default: 30")
    args = parser.parse_args(arguments)

    # Frozen weights, such as those of the reference model, are not saved.
    project = ProjectConfiguration(args.out, automatic_checkpoint_naming=True, total_limit=1, save_frozen=False)
    accelerator = Accelerator(strategy=args.layout, global_batch_size=PAIRS_PER_UPDATE, project_config=project)
    accelerator.init_trackers("log", vars(args))
    set_seed(0)
    tokenizer = make_tokenizer()
    train_pairs, test_pairs = (
        ChatDataset(make_pairs(number, seed), PreferenceTokenizer(tokenizer)) for number, seed in ((512, 1), (50, 2))
    )
    accelerator.print(train_pairs.show(0))
    model, reference = make_model(len(tokenizer)), None
    if args.lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"))
    else:
        reference = copy.deepcopy(model).requires_grad_(False).eval()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    collate = PreferenceCollator()
    model, optimizer, train_loader, test_loader = accelerator.prepare(
        model,
        torch.optim.AdamW(trained, lr=1e-2 if args.lora else 1e-3),
        DataLoader(train_pairs, batch_size=4, shuffle=True, drop_last=True, collate_fn=collate),
        DataLoader(test_pairs, batch_size=8, collate_fn=collate),
    )
    if reference is not None:
        reference = accelerator.prepare(reference)  # as the model: moved to the device, and sharded under fsdp

    accelerator.resume()
    averages = Averages()
    for _ in accelerator.epochs(100):
        for batch in train_loader:
            with accelerator.accumulate(model):
                reference_log_probabilities = compute_reference(model, reference, batch)
                policy = compute_log_probabilities(model, batch)
                losses, values = compute_losses(policy, reference_log_probabilities)
                accelerator.backward(losses.mean(), weight=len(losses))  # each pair has the same weight
                accelerator.clip_grad_norm_(trained, 1.0)
                optimizer.step()
                optimizer.zero_grad()
            averages.add(values, len(losses))
            if not accelerator.sync_gradients:
                continue
            means = averages.compute(accelerator)
            accelerator.log(means)
            if accelerator.num_updates % 5 == 0:
                accelerator.save_state()
                text = ", ".join(f"{name} {mean:.4f}" for name, mean in means.items())
                accelerator.print(f"update {accelerator.num_updates}: {text}")
            if accelerator.num_updates >= args.updates:
                break
        if accelerator.num_updates >= args.updates:
            break
    result = evaluate(accelerator, model, reference, test_loader)
    text = ", ".join(f"{name} {mean:.4f}" for name, mean in result.items())
    accelerator.print(f"{len(test_pairs)} other pairs: {text}")
    accelerator.end_training()
    return result


if __name__ == "__main__":
    main()

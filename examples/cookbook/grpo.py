"""GRPO in one file: the model that is trained also generates. Here a tiny Llama learns to prefer even tokens.

Run: headway launch --cpu -n 2 examples/cookbook/grpo.py      (pip install transformers)

Each process samples a group of completions for its own prompts, and compares each completion with its group. Prints the mean
reward, the share of even tokens, which rises from 0.5 to more than 0.9. examples/grpo.py generates in another process and shards
the model.
"""

import argparse
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

from headway import Accelerator, set_seed

VOCABULARY_SIZE, PROMPT_LENGTH, COMPLETION_LENGTH, GROUP_SIZE = 16, 2, 8, 16
NUM_PROMPTS = 4


def make_policy() -> LlamaForCausalLM:
    """Return the model to train. In a real program: `from_pretrained`."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY_SIZE, tie_word_embeddings=False, **sizes))


def sample(model: torch.nn.Module, prompts: torch.Tensor) -> torch.Tensor:
    """Return a group of completions for each prompt, with their prompts: [prompts * group, length]."""
    rows = prompts.repeat_interleave(GROUP_SIZE, dim=0)
    model.eval()
    with torch.no_grad():
        for _ in range(COMPLETION_LENGTH):
            probabilities = model(input_ids=rows).logits[:, -1].softmax(-1)
            rows = torch.cat((rows, torch.multinomial(probabilities, 1)), dim=1)
    model.train()
    return rows


def compute_rewards(rows: torch.Tensor) -> torch.Tensor:
    """Return the share of even tokens in each completion."""
    return (rows[:, PROMPT_LENGTH:] % 2 == 0).float().mean(1)


def compute_advantages(rewards: torch.Tensor) -> torch.Tensor:
    """Return the advantage of each completion: its distance from its group's mean, in standard deviations."""
    groups = rewards.view(-1, GROUP_SIZE)
    return ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)).flatten()


def compute_policy_loss(model: torch.nn.Module, rows: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
    """Return the sum of the losses of all tokens. One update follows each sampling, so the ratio is 1."""
    logits = model(input_ids=rows[:, :-1]).logits[:, PROMPT_LENGTH - 1 :]
    log_probabilities = -cross_entropy(logits.transpose(1, 2), rows[:, PROMPT_LENGTH:], reduction="none")
    ratio = (log_probabilities - log_probabilities.detach()).exp()  # 1, but its gradient is not 0
    return -(ratio * advantages[:, None]).sum()


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser()
    parser.add_argument("--updates", type=int, default=30)
    args = parser.parse_args(arguments)

    accelerator = Accelerator()
    set_seed(0)
    model = make_policy()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    set_seed(0, device_specific=True)  # each rank samples its own completions
    for update in range(args.updates):
        prompts = torch.randint(0, VOCABULARY_SIZE, (NUM_PROMPTS // accelerator.num_data_shards, PROMPT_LENGTH))
        rows = sample(model, prompts.to(accelerator.device))
        rewards = compute_rewards(rows)
        with accelerator.accumulate(model):
            loss = compute_policy_loss(model, rows, compute_advantages(rewards))
            accelerator.backward(
                loss, weight=len(rows) * COMPLETION_LENGTH, reduction="sum"
            )  # a mean over all ranks' tokens
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        mean = accelerator.reduce(rewards.mean(), "mean").item()
        if update % 10 == 9:
            accelerator.print(f"update {update + 1}: mean reward {mean:.3f}")

    accelerator.end_training()
    return {"reward": mean}


if __name__ == "__main__":
    main()

"""GRPO on a tiny Llama that another process generates with: `headway launch -n 2 --cpu examples/grpo.py`.

Each update, rank 0 streams the weights, which are sharded over the ranks, to a process that generates with transformers, without a
file in between, and gets completions back. The reward is the share of even tokens in a completion. The numbers are those of a loop
on one process.
"""

import argparse
import multiprocessing
import socket

import torch
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

from headway import Accelerator, WeightChannel, set_seed

VOCABULARY, PROMPT, COMPLETION = 32, 4, 12
NUM_PROMPTS, GROUP = 4, 16


def build():
    set_seed(1)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, tie_word_embeddings=False, **sizes))


# ---------------------------------------------------------------- the process that generates


def complete(model, prompts, seed):
    """A group of completions of each prompt, prompts included: [prompts x group, length]."""
    torch.manual_seed(seed)
    rows = prompts.repeat_interleave(GROUP, 0)
    how = {"do_sample": True, "top_k": 0, "max_new_tokens": COMPLETION, "min_new_tokens": COMPLETION, "pad_token_id": 0}
    return model.generate(rows, attention_mask=torch.ones_like(rows), **how)


def generator(orders, connection):
    """Take up the weights that come, then answer the prompts; until there are no more orders."""
    torch.set_num_threads(1)
    model, weights = build().eval(), WeightChannel(connection, "the trainer")
    while (order := orders.recv()) is not None:
        prompts, seed = order
        for bucket in weights.receive():
            unexpected = model.load_state_dict(dict(bucket), strict=False).unexpected_keys
            assert not unexpected, unexpected
        orders.send(complete(model, torch.tensor(prompts), seed).tolist())


class Engine:
    """The generator's process, as rank 0 sees it."""

    def __init__(self):
        context = multiprocessing.get_context("spawn")
        self.orders, theirs = context.Pipe()
        connection, other = socket.socketpair()
        self.channel = WeightChannel(connection, "the generator")
        self.process = context.Process(target=generator, args=(theirs, other), daemon=True)
        self.process.start()
        theirs.close()
        other.close()  # so that its death closes the connection

    def order(self, prompts, seed):
        self.orders.send((prompts.tolist(), seed))

    def answer(self):
        return torch.tensor(self.orders.recv())

    def close(self):
        self.orders.send(None)
        self.process.join()


def rollouts(accelerator, model, engine, prompts, seed):
    """Completions by the weights of this moment; every rank calls it, and gets all of them."""
    if engine is not None:
        engine.order(prompts, seed)
    for bucket in accelerator.stream_weights(model, bucket_size="16KiB"):
        if engine is not None:
            engine.channel.send(bucket)
    if engine is not None:
        engine.channel.send([])  # that is all
    rows = torch.zeros(NUM_PROMPTS * GROUP, PROMPT + COMPLETION, dtype=torch.long)
    if engine is not None:
        rows = engine.answer()
    return accelerator.reduce(rows.to(accelerator.device), "sum")  # zeros but on rank 0


# ---------------------------------------------------------------- the policy's loss


def rewards_of(rows):
    """The share of even tokens in each completion."""
    return (rows[:, PROMPT:] % 2 == 0).float().mean(1)


def advantages_of(rewards):
    """How much better than its group each completion is, in standard deviations."""
    groups = rewards.view(-1, GROUP)
    return ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)).flatten()


def policy_loss(model, rows, advantages):
    """The sum over the completions' tokens; the probabilities are those that sampled them, so the ratio is 1, its gradient is not."""
    logits = model(rows[:, :-1]).logits[:, PROMPT - 1 :]
    log_probabilities = -cross_entropy(logits.transpose(1, 2), rows[:, PROMPT:], reduction="none")
    ratio = (log_probabilities - log_probabilities.detach()).exp()
    return -(ratio * advantages[:, None]).sum()


def prompts_of(update):
    generator = torch.Generator().manual_seed(update)
    return torch.randint(0, VOCABULARY, (NUM_PROMPTS, PROMPT), generator=generator)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layout", default="fsdp")
    parser.add_argument("--updates", type=int, default=32)
    args = parser.parse_args(arguments)

    accelerator = Accelerator(strategy=args.layout)
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    engine = Engine() if accelerator.is_main_process else None
    for update in range(args.updates):
        rows = rollouts(accelerator, model, engine, prompts_of(update), seed=update)
        rewards = rewards_of(rows)
        with accelerator.split_between_processes(list(zip(rows, advantages_of(rewards)))) as own:
            own_rows, own_advantages = map(torch.stack, zip(*own))
        with accelerator.accumulate(model):
            loss = policy_loss(model, own_rows, own_advantages)
            accelerator.backward(loss, weight=own_rows.shape[0] * COMPLETION, reduction="sum")
            norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        if update % 4 == 3:
            accelerator.print(f"update {update + 1}: reward {rewards.mean():.4f}, norm {norm:.4f}")
    if engine is not None:
        engine.close()
    accelerator.end_training()


if __name__ == "__main__":
    main()

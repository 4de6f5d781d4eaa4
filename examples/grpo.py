"""GRPO on a tiny sharded Llama, with completions that another process generates.

    pip install transformers
    headway launch --cpu -n 2 examples/grpo.py

In each update, rank 0 streams the sharded weights to a process that generates with transformers, without a file in between, and
receives completions. The reward is the share of even tokens in a completion; the script prints its mean, which rises from 0.5.
The results are those of a loop on one process. examples/cookbook/grpo.py is a shorter form, in which the trained model itself
generates.
"""

import argparse
import multiprocessing
import socket

import torch
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

from headway import Accelerator, WeightChannel, set_seed

VOCABULARY_SIZE, PROMPT_LENGTH, COMPLETION_LENGTH = 32, 4, 12
NUM_PROMPTS, GROUP_SIZE = 4, 16


def build_model():
    set_seed(1)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY_SIZE, tie_word_embeddings=False, **sizes))


# ---------------------------------------------------------------- generation in another process


def complete(model, prompts, seed):
    """Return a group of completions of each prompt, with their prompts: [prompts x group, length]."""
    torch.manual_seed(seed)
    rows = prompts.repeat_interleave(GROUP_SIZE, 0)
    return model.generate(
        rows,
        attention_mask=torch.ones_like(rows),
        do_sample=True,
        top_k=0,
        max_new_tokens=COMPLETION_LENGTH,
        min_new_tokens=COMPLETION_LENGTH,
        pad_token_id=0,
    )


def run_generator(requests, connection):
    """For each request, load the weights that arrive, and send back completions. Stop at None."""
    torch.set_num_threads(1)
    model, weights = build_model().eval(), WeightChannel(connection, "the trainer")
    requests.send("ready")
    while (request := requests.recv()) is not None:
        prompts, seed = request
        for bucket in weights.receive():
            unexpected = model.load_state_dict(dict(bucket), strict=False).unexpected_keys
            assert not unexpected, unexpected
        requests.send(complete(model, torch.tensor(prompts), seed).tolist())


class GeneratorProcess:
    """The process that generates, as rank 0 sees it."""

    def __init__(self):
        context = multiprocessing.get_context("spawn")
        self.requests, child_requests = context.Pipe()
        connection, child_connection = socket.socketpair()
        self.channel = WeightChannel(connection, "the generator")
        self.process = context.Process(target=run_generator, args=(child_requests, child_connection), daemon=True)
        self.process.start()
        child_requests.close()
        child_connection.close()  # so that the connection closes if the process dies
        self.requests.recv()  # "ready": its imports may take longer than the channel waits for a sign of life

    def request(self, prompts, seed):
        self.requests.send((prompts.tolist(), seed))

    def receive(self):
        return torch.tensor(self.requests.recv())

    def close(self):
        self.requests.send(None)
        self.process.join()


def generate(accelerator, model, generator, prompts, seed):
    """Return completions of the current weights, on all ranks. Every rank must call this function.

    Args:
        generator: The generating process on rank 0, None on all other ranks.
    """
    if generator is not None:
        generator.request(prompts, seed)
    for bucket in accelerator.stream_weights(model, bucket_size="16KiB"):
        if generator is not None:
            generator.channel.send(bucket)
    if generator is not None:
        generator.channel.send([])  # ends the stream of weights
        rows = generator.receive()
    else:
        rows = torch.zeros(NUM_PROMPTS * GROUP_SIZE, PROMPT_LENGTH + COMPLETION_LENGTH, dtype=torch.long)
    return accelerator.reduce(rows.to(accelerator.device), "sum")  # a broadcast: all other ranks add zeros


# ---------------------------------------------------------------- rewards and loss


def compute_rewards(rows):
    """Return the share of even tokens in each completion."""
    return (rows[:, PROMPT_LENGTH:] % 2 == 0).float().mean(1)


def compute_advantages(rewards):
    """Return how much better than its group each completion is, in standard deviations."""
    groups = rewards.view(-1, GROUP_SIZE)
    return ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)).flatten()


def compute_policy_loss(model, rows, advantages):
    """Return the sum of the losses of all completion tokens.

    The weights have not changed since the tokens were sampled. So the ratio of probabilities is 1, but its gradient is not 0.
    """
    logits = model(rows[:, :-1]).logits[:, PROMPT_LENGTH - 1 :]
    log_probabilities = -cross_entropy(logits.transpose(1, 2), rows[:, PROMPT_LENGTH:], reduction="none")
    ratio = (log_probabilities - log_probabilities.detach()).exp()
    return -(ratio * advantages[:, None]).sum()


def make_prompts(update):
    generator = torch.Generator().manual_seed(update)
    return torch.randint(0, VOCABULARY_SIZE, (NUM_PROMPTS, PROMPT_LENGTH), generator=generator)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layout", default="fsdp", help="layout of the ranks (default: fsdp)")
    parser.add_argument("--updates", type=int, default=32, help="default: 32")
    args = parser.parse_args(arguments)

    accelerator = Accelerator(strategy=args.layout)
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    generator = GeneratorProcess() if accelerator.is_main_process else None
    for update in range(args.updates):
        rows = generate(accelerator, model, generator, make_prompts(update), seed=update)
        rewards = compute_rewards(rows)
        group_results = {"rows": rows, "advantages": compute_advantages(rewards)}
        with accelerator.split_between_processes(group_results) as own:  # this rank's part of each tensor
            own_rows, own_advantages = own["rows"], own["advantages"]
        with accelerator.accumulate(model):
            loss = compute_policy_loss(model, own_rows, own_advantages)
            # The loss is a sum: Headway divides by the number of tokens on all ranks.
            accelerator.backward(loss, weight=own_rows.shape[0] * COMPLETION_LENGTH, reduction="sum")
            norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        if update % 4 == 3:
            accelerator.print(f"update {update + 1}: reward {rewards.mean():.4f}, norm {norm:.4f}")
    if generator is not None:
        generator.close()
    accelerator.end_training()


if __name__ == "__main__":
    main()

"""A small transformers language model for `headway verify` under layouts of several axes. `--fault` plants a fault.

    headway verify --only layout -n 2 --strategy tp language_model.py
    headway verify --only layout -n 2 --strategy ep language_model.py --model mixtral
    headway verify --only layout -n 2 --strategy cp language_model.py --fault mean_over_own_tokens

The faults show only under some layouts:

- sum_over_rows: the loss is a sum over the rows of a rank.
- mean_over_own_tokens: a penalty of the hidden states is averaged over the tokens of a rank (cp).
- norm_of_own_shard: gradients are scaled by the norm of a rank's own shard (fsdp, tp and combinations).
- decay_of_own_stage: the last layer of each rank's stage is decayed by hand (pp).
- scale_by_own_experts: gradients of experts are scaled by their number on a rank (ep).
"""

import argparse

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from headway import Accelerator, set_seed

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32,
}


def make_model(kind: str) -> torch.nn.Module:
    """Return a Llama, or a Mixtral with four experts."""
    if kind == "mixtral":
        return MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2))
    return LlamaForCausalLM(LlamaConfig(**SIZES))


def make_tokens() -> torch.Tensor:
    """Return rows that count up in steps of 1 to 4."""
    generator = torch.Generator().manual_seed(2)
    first, step = (
        torch.randint(0, 64, (128, 1), generator=generator),
        torch.randint(1, 5, (128, 1), generator=generator),
    )
    return (first + step * torch.arange(24)) % 64


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="llama", choices=("llama", "mixtral"))
    parser.add_argument("--fault", default="")
    args = parser.parse_args()
    accelerator = Accelerator()
    set_seed(1)
    model = make_model(args.model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = DataLoader(TensorDataset(make_tokens()), batch_size=16, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    activations: list[torch.Tensor] = []
    if args.fault == "mean_over_own_tokens":
        layer = next(each for name, each in model.named_modules() if name.endswith("layers.2.mlp"))
        layer.register_forward_hook(lambda module, inputs, output: activations.append(output))
    for (tokens,) in loader:
        with accelerator.accumulate(model):
            if args.fault == "sum_over_rows":
                logits = model(tokens).logits[:, :-1]
                loss = cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum") / 64
            else:
                loss = model(tokens, labels=tokens).loss
            if args.fault == "mean_over_own_tokens":
                loss = loss + 1000 * activations.pop().float().square().mean()
                activations.clear()
            accelerator.backward(loss)
            if args.fault == "norm_of_own_shard":
                gradients = [getattr(p.grad, "_local_tensor", p.grad) for p in model.parameters() if p.grad is not None]
                norm = torch.stack([each.norm() for each in gradients]).norm()
                for each in gradients:
                    each.div_(norm)
            if args.fault == "scale_by_own_experts":
                for name, p in model.named_parameters():
                    if "expert" in name and p.grad is not None:
                        p.grad.mul_(len(getattr(p.grad, "_local_tensor", p.grad)) / 4)
            optimizer.step()
            if args.fault == "decay_of_own_stage":
                parameters = [p for p in model.parameters() if not p.is_meta and p.ndim > 1]
                parameters[-1].data.mul_(0.9)
            optimizer.zero_grad()
    accelerator.end_training()


if __name__ == "__main__":
    main()

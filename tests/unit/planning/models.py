"""Small models for plans."""

import torch
from torch import nn

from headway.forecasting.tracing.attention_masks import skip_causal_mask
from headway.offload.placement.meta_model import init_empty_weights

LENGTH = 16
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def llama_config(**more):
    from transformers import LlamaConfig

    return LlamaConfig(**(SIZES | {"vocab_size": 99, "max_position_embeddings": 64, "use_cache": False} | more))


def llama():
    from transformers import LlamaForCausalLM

    return skip_causal_mask(LlamaForCausalLM(llama_config()))


def tied():
    from transformers import LlamaForCausalLM

    return skip_causal_mask(LlamaForCausalLM(llama_config(tie_word_embeddings=True)))


def loss(model):
    """Compute the loss of a language model on one sequence."""
    tokens = torch.zeros(1, LENGTH, dtype=torch.long)
    return model(input_ids=tokens, labels=tokens).loss


class Chain(nn.Module):
    """Linear layers without biases, whose numbers can be computed by hand."""

    def __init__(self, width=24, depth=3):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, width, bias=False)) for _ in range(depth))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def chain():
    return Chain()


def chain_loss(model):
    return model(torch.zeros(5, 24)).sum()


def chain_and_step():
    return Chain(), chain_loss


def count_parameters(make):
    with init_empty_weights():
        return sum(parameter.numel() for parameter in make().parameters())

"""Offline material for language scripts: a tokenizer trained on Python's own source code, and small models."""

import argparse
import inspect
import textwrap

import torch
from accelerate import PartialState
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import BertConfig, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

# The standard library is available everywhere, so its source code serves as text.
SOURCES = [inspect.getsource(argparse), inspect.getsource(textwrap)]

TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}<end>{% endgeneration %}"
    "{% else %}{{ message['content'] }}<end>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def train_tokenizer(size=400, kind="bytes"):
    """Train a byte-level BPE tokenizer on SOURCES. kind="bytes" adds a chat template, kind="bert" BERT's special tokens."""
    special = (
        ["<pad>", "<end>", "<user>", "<assistant>"]
        if kind == "bytes"
        else ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    )
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    inner.train_from_iterator(SOURCES, trainer)
    if kind == "bytes":
        made = PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<end>", bos_token="<end>")
        made.chat_template = TEMPLATE
        return made
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
    )


def gpt2(words, dropout=0.1):
    """Build a GPT-2 with two layers."""
    shape = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 128}
    drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    ends = {"bos_token_id": words.bos_token_id, "eos_token_id": words.eos_token_id, "pad_token_id": words.pad_token_id}
    return GPT2LMHeadModel(GPT2Config(vocab_size=len(words), **shape, **drops, **ends))


def llama(words):
    """Build a Llama with two layers."""
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    ends = {"bos_token_id": words.bos_token_id, "eos_token_id": words.eos_token_id, "pad_token_id": words.pad_token_id}
    return LlamaForCausalLM(LlamaConfig(vocab_size=len(words), max_position_embeddings=128, **shape, **ends))


def save_and_reload(model):
    """Save the model to the folder "model", and return the model loaded from it. Some trainers read this path again."""
    state = PartialState(cpu=True)
    model.save_pretrained("model")
    state.wait_for_everyone()
    return type(model).from_pretrained("model")


def bert_config(words):
    """Return the config of a BERT with two layers."""
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    return BertConfig(vocab_size=len(words), max_position_embeddings=128, pad_token_id=words.pad_token_id, **shape)


def lines(count):
    """Return the first `count` different lines of SOURCES with more than 20 characters, without indentation."""
    found = [line.strip() for source in SOURCES for line in source.splitlines()]
    return list(dict.fromkeys(line for line in found if len(line) > 20))[:count]


def record_history(evidence, trainer):
    """Add every number that a Trainer logged to the evidence, except times and rates."""
    for entry in trainer.state.log_history:
        for name, value in entry.items():
            if not any(word in name for word in ("runtime", "per_second", "time")):
                evidence.add(name, torch.tensor(value, dtype=torch.float64))

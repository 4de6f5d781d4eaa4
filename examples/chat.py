"""A small Llama learns to answer, from conversations in which only the assistant's responses are trained.

    python examples/chat.py                            on one process
    headway launch --cpu -n 2 examples/chat.py         on two processes, with the same updates

The conversations are questions about capitals, in two turns. The script trains the tokenizer, writes the chat template, packs the
conversations, and finally asks the model. It needs `pip install transformers`.
"""

import argparse
import random

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from headway import Accelerator, ChatDataset, ChatTokenizer, PackedDataset, PackingCollator, set_seed

SPECIAL_TOKENS = ["<|pad|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CAPITALS = {
    "France": "Paris", "Japan": "Tokyo", "Kenya": "Nairobi", "Peru": "Lima", "Norway": "Oslo", "Egypt": "Cairo",
    "Italy": "Rome", "Cuba": "Havana", "Ghana": "Accra", "Spain": "Madrid", "Chile": "Santiago", "Fiji": "Suva",
}  # fmt: skip
LENGTH = 256
"""Tokens per packed sequence."""


def make_conversations(number: int) -> list[dict[str, list[dict[str, str]]]]:
    """Return conversations of two questions and two responses each."""
    draw = random.Random(0)
    rows = []
    for _ in range(number):
        messages = []
        for country in draw.sample(list(CAPITALS), 2):
            messages.append({"role": "user", "content": f"What is the capital of {country}?"})
            messages.append({"role": "assistant", "content": f"It is {CAPITALS[country]}."})
        rows.append({"messages": messages})
    return rows


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer with a chat template."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIAL_TOKENS, initial_alphabet=alphabet, show_progress=False
    )
    inner.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<|pad|>", eos_token="<|im_end|>", extra_special_tokens=["<|im_start|>"]
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@torch.no_grad()
def answer(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, question: str) -> str:
    """Return the model's response, with its end-of-turn token if the model stops within 12 tokens."""
    messages = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"
    ).to(model.device)
    output = model.generate(
        **prompt,
        max_new_tokens=12,
        do_sample=False,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return str(tokenizer.decode(output[0, prompt["input_ids"].shape[1] :]))


def main(num_updates: int = 150) -> float:
    set_seed(0)
    accelerator = Accelerator(global_batch_size=4)  # sequences per update, on any number of processes
    rows = make_conversations(2000)
    tokenizer = train_tokenizer([message["content"] for row in rows for message in row["messages"]])
    data = ChatDataset(rows, ChatTokenizer(tokenizer))
    accelerator.print(data.show(0))
    packed = PackedDataset(data, LENGTH, lengths=data.lengths)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=LENGTH, **sizes))
    model, optimizer, loader = accelerator.prepare(
        model,
        torch.optim.AdamW(model.parameters(), lr=5e-3),
        DataLoader(packed, batch_size=2, shuffle=True, collate_fn=PackingCollator(), drop_last=True),
    )
    for _ in accelerator.epochs(100):
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                # Each trained token has the same weight, however many of them each process has.
                accelerator.backward(loss, weight=(batch["labels"][:, 1:] != -100).sum())
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients and accelerator.num_updates % 25 == 0:
                accelerator.print(f"update {accelerator.num_updates}: loss {loss.item():.3f}")
            if accelerator.sync_gradients and accelerator.num_updates == num_updates:
                break
        if accelerator.num_updates >= num_updates:
            break
    trained = accelerator.unwrap_model(model).eval()
    num_right = 0
    for country, capital in CAPITALS.items():
        response = answer(trained, tokenizer, f"What is the capital of {country}?")
        accelerator.print(f"{country}: {response}")
        num_right += response == f"It is {capital}.<|im_end|>"
    accelerator.print(f"{num_right} of {len(CAPITALS)} responses are right and end with <|im_end|>")
    accelerator.end_training()
    return num_right / len(CAPITALS)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=150, help="optimizer updates (default: 150)")
    main(parser.parse_args().updates)

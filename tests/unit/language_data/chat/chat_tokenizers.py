"""Tokenizers that are trained in the test, and chat templates in the style of six model families."""

from functools import cache
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\n' + (message.content or '') }}"
    "{% for call in message.tool_calls or [] %}{{ '<tool_call>' + call.name + '</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{{ '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' + message.content | trim + '<|eot_id|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
GEMMA = (
    "{{ bos_token }}"
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for message in messages %}"
    "{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate') }}{% endif %}"
    "{% set role = 'model' if message.role == 'assistant' else message.role %}"
    "{{ '<start_of_turn>' + role + '\n' + message.content | trim + '<end_of_turn>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}"
    "{% if messages[0].role == 'system' %}{% set system = messages[0].content + '\n\n' %}{% set messages = messages[1:] %}"
    "{% else %}{% set system = '' %}{% endif %}"
    "{% for message in messages %}"
    "{% if message.role == 'user' %}"
    "{{ '[INST] ' + (system if loop.first else '') + message.content + ' [/INST]' }}"
    "{% else %}{{ ' ' + message.content + eos_token }}{% endif %}"
    "{% endfor %}"
)
# As Qwen3 does, it removes the reasoning before the last question, and adds an empty block to a last response without one.
THINKING = (
    "{% set last = namespace(question=-1) %}"
    "{% for message in messages %}{% if message.role == 'user' %}{% set last.question = loop.index0 %}{% endif %}{% endfor %}"
    "{% for message in messages %}"
    "{% set content = message.content.split('</think>')[-1].lstrip('\n') %}"
    "{% set reasoning = message.content.split('</think>')[0].split('<think>')[-1].strip('\n') "
    "if '</think>' in message.content else '' %}"
    "{{ '<|im_start|>' + message.role + '\n' }}"
    "{% if message.role == 'assistant' and loop.index0 > last.question and (loop.last or reasoning) %}"
    "{{ '<think>\n' + reasoning + '\n</think>\n\n' }}{% endif %}"
    "{{ content + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)
MARKED = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\n' }}"
    "{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ message.content + '<|im_end|>\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TEMPLATES = {
    "chatml": CHATML,
    "llama": LLAMA,
    "gemma": GEMMA,
    "mistral": MISTRAL,
    "thinking": THINKING,
    "marked": MARKED,
}

SPECIAL_TOKENS = [
    "<unk>", "<s>", "</s>", "<pad>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
    "<start_of_turn>", "<end_of_turn>", "[INST]", "[/INST]",
]  # fmt: skip
TEXTS = [
    "Hello there, how are you today?\n\nThe answer is 4, of course. assistant user system model",
    "What is the weather? It is sunny and warm.\nBe brief.",
] * 3
# Qwen's and Llama 3's: a run of line breaks is one token, whether or not text follows.
_PIECES = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@cache
def _train(kind: str) -> str:
    """Return the JSON of a tokenizer: "bytes" (as Qwen), "gpt2" (byte-level with GPT-2's rules) or "metaspace" (as Llama 2)."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    options: dict[str, Any] = {"vocab_size": 400, "special_tokens": SPECIAL_TOKENS, "show_progress": False}
    if kind == "metaspace":
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        tokenizer.decoder = decoders.Metaspace(prepend_scheme="first", split=False)
        options["initial_alphabet"] = [chr(code) for code in range(33, 127)] + ["\n"]
    else:
        tokenizer.pre_tokenizer = (
            pre_tokenizers.ByteLevel(add_prefix_space=False)
            if kind == "gpt2"
            else pre_tokenizers.Sequence(
                [
                    pre_tokenizers.Split(Regex(_PIECES), "isolated"),
                    pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
                ]
            )
        )
        tokenizer.decoder = decoders.ByteLevel()
        options["initial_alphabet"] = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator([*TEXTS, "a\n\nb\n\n\nc  d"] * 2, trainers.BpeTrainer(**options))
    # Outside chat templates, the tokenizer adds the first token itself, as Llama's does.
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    return str(tokenizer.to_str())


def make_tokenizer(template: str | None = "chatml", kind: str = "bytes") -> Any:
    """Return a fast tokenizer.

    Args:
        template: Name in `TEMPLATES`, or the text of a template, or None.
        kind: "bytes", "gpt2" or "metaspace".
    """
    tokenizer: Any = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_train(kind)),
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
        extra_special_tokens=SPECIAL_TOKENS[4:],
    )
    if template is not None:
        tokenizer.chat_template = TEMPLATES.get(template, template)
    return tokenizer


def read_marked(tokenizer: Any, marked: str) -> dict[str, list[int]]:
    """Return the token IDs and labels of a text whose trained parts are between `[train]` and `[/train]`.

    Each part is tokenized separately, so the labels follow from the text that a test states, not from offsets.
    """
    tokens: list[int] = []
    labels: list[int] = []
    for number, part in enumerate(marked.replace("[/train]", "[train]").split("[train]")):
        part_tokens = tokenizer(part, add_special_tokens=False)["input_ids"] if part else []
        tokens += part_tokens
        labels += part_tokens if number % 2 else [-100] * len(part_tokens)
    return {"input_ids": tokens, "labels": labels}


def make_messages(*contents: str, system: str | None = None) -> list[dict[str, Any]]:
    """Return messages of the user and the assistant in turn."""
    messages = [{"role": ("user", "assistant")[at % 2], "content": content} for at, content in enumerate(contents)]
    return messages if system is None else [{"role": "system", "content": system}, *messages]

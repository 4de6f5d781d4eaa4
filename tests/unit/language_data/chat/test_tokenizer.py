"""Test the labels of conversations: hand-written masks of six kinds of templates, and every refused kind of template."""

import os
import pickle
import random
import subprocess
import sys
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizer

from headway import ChatTokenizer
from headway.errors import ConfigError, DataError
from tests.unit.language_data.chat.chat_tokenizers import (
    CHATML,
    LLAMA,
    MARKED,
    SPECIAL_TOKENS,
    THINKING,
    make_messages,
    make_tokenizer,
    read_marked,
)

TWO_TURNS = make_messages("Hello", "Hi.", "2 + 2?", "It is 4.", system="Be brief.")
EXPECTED = {
    "chatml": (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n"
        "<|im_start|>assistant\n[train]Hi.<|im_end|>[/train]\n<|im_start|>user\n2 + 2?<|im_end|>\n"
        "<|im_start|>assistant\n[train]It is 4.<|im_end|>[/train]\n"
    ),
    "llama": (
        "<s><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nHello<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n[train]Hi.<|eot_id|>[/train]"
        "<|start_header_id|>user<|end_header_id|>\n\n2 + 2?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n[train]It is 4.<|eot_id|>[/train]"
    ),
    "gemma": (
        "<s><start_of_turn>user\nHello<end_of_turn>\n<start_of_turn>model\n[train]Hi.<end_of_turn>[/train]\n"
        "<start_of_turn>user\n2 + 2?<end_of_turn>\n<start_of_turn>model\n[train]It is 4.<end_of_turn>[/train]\n"
    ),
    "mistral": (
        "<s>[INST] Be brief.\n\nHello [/INST][train] Hi.</s>[/train][INST] 2 + 2? [/INST][train] It is 4.</s>[/train]"
    ),
    "marked": (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n"
        "<|im_start|>assistant\n[train]Hi.<|im_end|>[/train]\n<|im_start|>user\n2 + 2?<|im_end|>\n"
        "<|im_start|>assistant\n[train]It is 4.<|im_end|>[/train]\n"
    ),
}
"""Trained parts of `TWO_TURNS`, without the system message for Gemma."""


def get_two_turns(name: str) -> list[dict[str, Any]]:
    return TWO_TURNS[1:] if name == "gemma" else TWO_TURNS


def unmark_first(marked: str) -> str:
    return marked.replace("[train]", "", 1).replace("[/train]", "", 1)


@pytest.mark.parametrize("name", EXPECTED)
def test_labels_are_the_responses_with_their_end_tokens(name: str) -> None:
    tokenizer = make_tokenizer(name)
    chat = ChatTokenizer(tokenizer)
    assert chat({"messages": get_two_turns(name)}) == read_marked(tokenizer, EXPECTED[name])
    assert chat.show(get_two_turns(name)) == EXPECTED[name]


@pytest.mark.parametrize("name", EXPECTED)
def test_last_trains_only_the_last_response(name: str) -> None:
    tokenizer = make_tokenizer(name)
    expected = read_marked(tokenizer, unmark_first(EXPECTED[name]))
    assert ChatTokenizer(tokenizer, train_on="last")(get_two_turns(name)) == expected


@pytest.mark.parametrize("name", EXPECTED)
def test_all_trains_every_token(name: str) -> None:
    sample = ChatTokenizer(make_tokenizer(name), train_on="all")(get_two_turns(name))
    assert sample["labels"] == sample["input_ids"]


@pytest.mark.parametrize("name", EXPECTED)
def test_tokens_are_those_of_the_chat_template_with_one_first_token(name: str) -> None:
    tokenizer = make_tokenizer(name)
    tokens = ChatTokenizer(tokenizer)(get_two_turns(name))["input_ids"]
    assert tokens == tokenizer.apply_chat_template(get_two_turns(name), return_dict=True)["input_ids"]
    assert tokens.count(tokenizer.bos_token_id) == (0 if name in ("chatml", "marked") else 1)


@pytest.mark.parametrize("name", ["chatml", "llama", "gemma", "mistral"])
@pytest.mark.parametrize("kind", ["bytes", "gpt2", "metaspace"])
def test_context_of_each_response_has_the_tokens_of_inference(name: str, kind: str) -> None:
    """What precedes a trained part is, token by token, what `generate` is called with."""
    tokenizer = make_tokenizer(name, kind)
    messages = get_two_turns(name)
    if kind == "gpt2" and name == "llama":
        with pytest.raises(DataError, match="joins"):  # GPT-2 splits "\n\n" in two before a letter, but not at the end
            ChatTokenizer(tokenizer)(messages)
        return
    sample = ChatTokenizer(tokenizer)(messages)
    starts = [at for at, label in enumerate(sample["labels"]) if label != -100 and sample["labels"][at - 1] == -100]
    responses = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
    assert len(starts) == len(responses) == 2
    for start, response in zip(starts, responses):
        prompt = tokenizer.apply_chat_template(messages[:response], add_generation_prompt=True, return_dict=True)
        assert sample["input_ids"][:start] == prompt["input_ids"]


def test_random_conversations_train_exactly_the_responses() -> None:
    """The expected marks are written around each response while the text is built, without a template."""
    draw = random.Random(0)
    tokenizer = make_tokenizer("chatml")
    chat = ChatTokenizer(tokenizer)
    words = [
        "Hello",
        " there",
        "\n\n",
        " ",
        "é",
        "日本",
        "assistant",
        "<|im_end|>",
        "user\n",
        "4",
        "🙂",
        "</think>",
        "\t",
    ]
    num_refused = num_equal = 0
    for _ in range(300):
        messages, marked = [], ""
        for turn in range(draw.randint(1, 4)):
            for role in ("user", "assistant"):
                content = "".join(draw.choices(words, k=draw.randint(1, 6)))
                messages.append({"role": role, "content": content})
                body = f"{content}<|im_end|>"
                marked += f"<|im_start|>{role}\n" + (f"[train]{body}[/train]\n" if role == "assistant" else f"{body}\n")
        responses = [message["content"] for message in messages if message["role"] == "assistant"]
        problem = chat.find_problem(messages)
        if any(content.startswith("\n") for content in responses) or problem:
            # The tokenizer joins the line break of the header with those of the content.
            num_refused += 1
            assert "joins" in (problem or "")
            assert any("\n" in content[: len(content) - len(content.lstrip())] for content in responses)
        elif not any(content.rstrip().endswith("<|im_end|>") for content in responses):
            assert chat(messages) == read_marked(tokenizer, marked)
            num_equal += 1
    assert num_refused > 20
    assert num_equal > 100


# ------------------------------------------------------------------------------------------------ reasoning


def test_reasoning_that_the_template_removes_is_an_error() -> None:
    chat = ChatTokenizer(make_tokenizer("thinking"))
    messages = make_messages("Hello", "<think>\nGreet.\n</think>\n\nHi.", "2 + 2?", "<think>\nAdd.\n</think>\n\n4.")
    with pytest.raises(
        DataError, match=r"conversation 7: .*changes earlier messages.*'<think>\\nGreet.*train_on='last'"
    ):
        chat(messages, 7)
    last = ChatTokenizer(chat.tokenizer, train_on="last")
    assert last.show(messages) == (
        "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\nHi.<|im_end|>\n<|im_start|>user\n2 + 2?<|im_end|>\n"
        "<|im_start|>assistant\n[train]<think>\nAdd.\n</think>\n\n4.<|im_end|>[/train]\n"
    )
    # The recipe of the error message: one conversation for each response.
    first = last.show(messages[:2])
    assert first.endswith("assistant\n[train]<think>\nGreet.\n</think>\n\nHi.<|im_end|>[/train]\n")


@pytest.mark.parametrize("variables", [{}, {"enable_thinking": False}, {"enable_thinking": True}])
def test_empty_reasoning_is_not_trained(variables: dict[str, Any]) -> None:
    chat = ChatTokenizer(make_tokenizer("thinking"), chat_template_kwargs=variables)
    expected = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n[train]Hi.<|im_end|>[/train]\n"
    assert chat.show(make_messages("Hello", "Hi.")) == expected


def test_empty_reasoning_that_begins_in_the_prompt_is_not_trained() -> None:
    template = THINKING.replace("{{ '<|im_start|>assistant\n' }}", "{{ '<|im_start|>assistant\n<think>\n' }}")
    chat = ChatTokenizer(make_tokenizer(template))
    assert chat.show(make_messages("Hello", "Hi.")).endswith("<think>\n\n</think>\n\n[train]Hi.<|im_end|>[/train]\n")
    reasoned = chat.show(make_messages("Hello", "<think>\nGreet.\n</think>\n\nHi."))
    assert reasoned.endswith("assistant\n<think>\n[train]Greet.\n</think>\n\nHi.<|im_end|>[/train]\n")


def test_marked_empty_reasoning_is_not_trained() -> None:
    template = MARKED.replace(
        "{{ message.content + '<|im_end|>' }}", "{{ '<think></think>' + message.content + '<|im_end|>' }}"
    )
    assert (
        ChatTokenizer(make_tokenizer(template))
        .show(make_messages("Hello", "Hi."))
        .endswith("assistant\n<think></think>[train]Hi.<|im_end|>[/train]\n")
    )


# -------------------------------------------------------------------------------------- which responses


def test_last_includes_the_tool_calls_after_the_last_question() -> None:
    messages = [
        *make_messages("Hello", "Hi.", "Weather?"),
        {"role": "assistant", "content": None, "tool_calls": [{"name": "weather"}]},
        {"role": "tool", "content": "warm"},
        {"role": "assistant", "content": "It is warm."},
    ]
    expected = (
        "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\nHi.<|im_end|>\n<|im_start|>user\nWeather?<|im_end|>\n"
        "<|im_start|>assistant\n[train]<tool_call>weather</tool_call><|im_end|>[/train]\n<|im_start|>tool\nwarm<|im_end|>\n"
        "<|im_start|>assistant\n[train]It is warm.<|im_end|>[/train]\n"
    )
    assert ChatTokenizer(make_tokenizer(), train_on="last").show(messages) == expected


def test_special_tokens_of_tool_calls_do_not_end_the_turn() -> None:
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"extra_special_tokens": [*SPECIAL_TOKENS[4:], "<tool_call>", "</tool_call>"]})
    messages = [*make_messages("Weather?"), {"role": "assistant", "content": "", "tool_calls": [{"name": "weather"}]}]
    for template in (CHATML, CHATML.replace("'</tool_call>'", "'</tool_call>\n'")):
        shown = ChatTokenizer(tokenizer, chat_template=template).show(messages)
        assert shown.split("[train]")[1].strip().endswith("<|im_end|>[/train]")


def test_messages_after_the_last_trained_response_are_left_out() -> None:
    chat = ChatTokenizer(make_tokenizer())
    assert chat(make_messages("Hello", "Hi.", "And?")) == chat(make_messages("Hello", "Hi."))


@pytest.mark.parametrize("name", ["chatml", "marked"])
def test_message_with_weight_zero_is_context_only(name: str) -> None:
    tokenizer = make_tokenizer(name)
    messages = [dict(message) for message in TWO_TURNS]
    messages[2]["weight"] = 0
    messages[4]["weight"] = 1
    assert ChatTokenizer(tokenizer)(messages) == read_marked(tokenizer, unmark_first(EXPECTED[name]))
    messages[4]["weight"] = 0
    assert "may be trained" in (ChatTokenizer(tokenizer).find_problem(messages) or "")


# ------------------------------------------------------------------------------------------- refused templates


def test_tokenizer_without_a_template_is_an_error() -> None:
    with pytest.raises(DataError, match="the tokenizer has no chat template"):
        ChatTokenizer(make_tokenizer(None))
    assert ChatTokenizer(make_tokenizer(None), chat_template=CHATML).show(TWO_TURNS) == EXPECTED["chatml"]


def test_template_without_markers_gets_labels_although_transformers_masks_everything() -> None:
    tokenizer = make_tokenizer()
    found = tokenizer.apply_chat_template(TWO_TURNS, return_dict=True, return_assistant_tokens_mask=True)
    assert set(found["assistant_masks"]) == {0}  # the reason for this class
    labels = ChatTokenizer(tokenizer)(TWO_TURNS)["labels"]
    assert sum(label != -100 for label in labels) > 4


def test_markers_select_the_tokens_that_transformers_marks() -> None:
    tokenizer = make_tokenizer("marked")
    found = tokenizer.apply_chat_template(TWO_TURNS, return_dict=True, return_assistant_tokens_mask=True)
    labels = ChatTokenizer(tokenizer)(TWO_TURNS)["labels"]
    assert [int(label != -100) for label in labels] == found["assistant_masks"]


REFUSED = {
    "no end token": (CHATML.replace("{{ '<|im_end|>\n' }}", "{{ '\n' }}"), "would not learn to stop"),
    # As GLM does: a turn ends with the header of the next one.
    "end token of the next message": (
        "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
        "would not learn to stop",
    ),
    # As gpt-oss does: the last response ends with another token.
    "other end token of the last message": (
        CHATML.replace(
            "'<|im_end|>\n'", "('</s>' if loop.last and message.role == 'assistant' else '<|im_end|>') + '\n'"
        ),
        "changes earlier messages: when this response is the last message",
    ),
    "no prompt": (CHATML.partition("{% if add")[0], "ignores add_generation_prompt"),
    # As the first release of Llama 3's template did.
    "prompt after every conversation": (
        LLAMA.replace("{% if add_generation_prompt %}", "{% if true %}"),
        "changes earlier messages: when this response is the last message",
    ),
    "prompt that is not in the conversation": (
        CHATML.replace("assistant\n' }}{% endif", "assistant\n<think>' }}{% endif"),
        "when it prompts for this response",
    ),
    "system message before the last question": (
        "{% for message in messages if message.role != 'system' %}"
        "{% if loop.last or (loop.revindex == 2 and not add_generation_prompt) %}{{ messages[0].content }}{% endif %}"
        "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
        "changes earlier messages",
    ),
    "end token after the marker": (
        MARKED.replace(" + '<|im_end|>' }}{% endgeneration %}", " }}{% endgeneration %}{{ '<|im_end|>' }}"),
        "before the end-of-turn token",
    ),
    "marker that marks nothing": (
        CHATML + "{% if false %}{% generation %}{% endgeneration %}{% endif %}",
        "marks 0 spans|has a label|has no label",
    ),
    "marker of the last response only": (
        MARKED.replace("{% generation %}", "{% if loop.last %}{% generation %}").replace(
            "{% endgeneration %}", "{% endgeneration %}{% else %}{{ message.content + '<|im_end|>' }}{% endif %}"
        ),
        "marks 1 spans .* for 2 assistant messages",
    ),
    "failing template": ("{{ raise_exception('never') }}", "the chat template fails .*system, user.*: never"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_templates_that_would_train_other_tokens_are_refused(name: str) -> None:
    template, message = REFUSED[name]
    with pytest.raises(DataError, match=message):
        ChatTokenizer(make_tokenizer(template))(TWO_TURNS)


def test_prompt_after_the_last_response_is_never_trained() -> None:
    template = LLAMA.replace("{% if add_generation_prompt %}", "{% if true %}")
    with pytest.raises(DataError, match=r"adds '<\|eot_id\|><\|start_header_id\|>assistant' to message 1"):
        ChatTokenizer(make_tokenizer(template))(make_messages("Hello", "Hi."))


def test_end_of_text_after_the_last_message_is_not_trained() -> None:
    template = CHATML.replace("{% if add_gen", "{% if not add_generation_prompt %}{{ '</s>' }}{% endif %}{% if add_gen")
    assert ChatTokenizer(make_tokenizer(template)).show(TWO_TURNS) == EXPECTED["chatml"] + "</s>"


def test_end_of_turn_may_be_plain_text() -> None:
    template = CHATML.replace("<|im_end|>", "###")
    assert ChatTokenizer(make_tokenizer(template), end_of_turn="###").show(TWO_TURNS) == EXPECTED["chatml"].replace(
        "<|im_end|>", "###"
    )
    assert "would not learn to stop" in (
        ChatTokenizer(make_tokenizer(), end_of_turn="</s>").find_problem(TWO_TURNS) or ""
    )


def test_several_marked_spans_of_a_response_are_trained() -> None:
    template = MARKED.replace(
        "{{ message.content + '<|im_end|>' }}",
        "{{ message.content }}{% endgeneration %}{% generation %}{{ '<|im_end|>' }}",
    )
    assert ChatTokenizer(make_tokenizer(template)).show(TWO_TURNS) == EXPECTED["marked"]
    with pytest.raises(DataError, match=r"marks 4 spans .* for 2 assistant messages"):
        ChatTokenizer(make_tokenizer(template), train_on="last")(TWO_TURNS)


def test_response_in_the_middle_of_a_token_is_an_error() -> None:
    chat = ChatTokenizer(make_tokenizer())
    with pytest.raises(DataError, match=r"joins '.*assistant\\n' with '\\n\\nHi"):
        chat(make_messages("Hello", "\n\nHi."))


# ------------------------------------------------------------------------------------------- refused conversations


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (make_messages("Hello"), "no message of the role 'assistant'"),
        ({"messages": []}, "no messages"),
        ([{"role": "assistant", "content": "Hi."}, *make_messages("Hello", "Hi.")], "begins with an assistant message"),
        ({"text": "Hello"}, "has no 'messages' .*only text"),
        ({"messages": "Hello"}, "messages of a row are a str"),
        ({"messages": [{"content": "Hello"}]}, "no 'role', only content"),
        ({"messages": ["Hello"]}, "a message is a str"),
        ({"messages": make_messages("Hello", "Hi."), "tools": "[{"}, "'tools' are not JSON"),
        ("Hello", "a row is a str"),
        (7, "a row is a int"),
    ],
)
def test_rows_without_a_usable_conversation_are_errors(row: Any, message: str) -> None:
    chat = ChatTokenizer(make_tokenizer())
    with pytest.raises(DataError, match=message):
        chat(row)
    assert chat.find_problem(row) is not None
    with pytest.raises(DataError, match="conversation 12: "):
        chat(row, 12)


def test_leading_assistant_message_may_be_context() -> None:
    tokenizer = make_tokenizer()
    messages = [{"role": "assistant", "content": "Welcome.", "weight": 0}, *make_messages("Hello", "Hi.")]
    assert ChatTokenizer(tokenizer).show(messages) == (
        "<|im_start|>assistant\nWelcome.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n"
        "<|im_start|>assistant\n[train]Hi.<|im_end|>[/train]\n"
    )


def test_long_conversations() -> None:
    tokenizer = make_tokenizer()
    whole = ChatTokenizer(tokenizer)(TWO_TURNS)
    size = len(whole["input_ids"])
    assert ChatTokenizer(tokenizer, max_length=size)(TWO_TURNS) == whole
    with pytest.raises(DataError, match=rf"conversation 3: it has {size} tokens, and max_length={size - 1}"):
        ChatTokenizer(tokenizer, max_length=size - 1)(TWO_TURNS, 3)
    cut = ChatTokenizer(tokenizer, max_length=size - 4, too_long="truncate")(TWO_TURNS)
    assert cut == {name: values[:-4] for name, values in whole.items()}
    with pytest.raises(DataError, match="none of its 5 tokens has a label"):
        ChatTokenizer(tokenizer, max_length=5, too_long="truncate")(TWO_TURNS)
    dropping = ChatTokenizer(tokenizer, max_length=5, too_long="drop")
    assert dropping.encode_unless_dropped(TWO_TURNS) is None
    with pytest.raises(DataError, match="more than max_length=5 tokens"):
        dropping(TWO_TURNS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"train_on": "user"}, "train_on='user'; give one of 'assistant', 'last', 'all'"),
        ({"max_length": 0}, "max_length=0"),
        ({"max_length": True}, "max_length=True"),
        ({"max_length": 8, "too_long": "split"}, "too_long='split'"),
        ({"too_long": "drop"}, "needs max_length="),
    ],
)
def test_invalid_options_are_errors(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ChatTokenizer(make_tokenizer(), **options)


def test_processor_instead_of_a_tokenizer_is_an_error() -> None:
    with pytest.raises(ConfigError, match="give a tokenizer of transformers"):
        ChatTokenizer(Tokenizer.from_str(make_tokenizer().backend_tokenizer.to_str()))


# ---------------------------------------------------------------------------------------------- row formats


def test_formats_of_rows_have_the_same_samples() -> None:
    chat = ChatTokenizer(make_tokenizer())
    messages = make_messages("Hello", "Hi.")
    expected = chat(messages)
    from_and_value = [{"from": "human", "value": "Hello"}, {"from": "gpt", "value": "Hi."}]
    rows: list[Any] = [
        tuple(messages),
        {"messages": messages},
        {"messages": None, "conversations": messages},
        {"conversations": from_and_value},
        {"prompt": "Hello", "completion": "Hi."},
        {"prompt": messages[:1], "completion": messages[1:]},
        {"messages": [{**message, "name": None, "tool_calls": None} for message in messages]},
    ]
    for row in rows:
        assert chat(row) == expected
    assert ChatTokenizer(chat.tokenizer, messages_column="talk")({"talk": messages, "messages": []}) == expected


def test_only_the_completion_is_trained() -> None:
    chat = ChatTokenizer(make_tokenizer())
    row = {"prompt": TWO_TURNS[:4], "completion": TWO_TURNS[4:]}
    assert chat.show(row) == unmark_first(EXPECTED["chatml"])


def test_tools_come_from_the_row_or_from_the_tokenizer() -> None:
    template = "{% for tool in tools or [] %}{{ '[' + (tool | tojson) + ']' }}{% endfor %}" + CHATML
    messages = make_messages("Hello", "Hi.")
    chat = ChatTokenizer(make_tokenizer(template), tools=[{"name": "a"}])
    assert chat.show(messages).startswith('[{"name": "a"}]<|im_start|>')
    assert chat.show({"messages": messages, "tools": [{"name": "b", "city": None}]}).startswith('[{"name": "b"}]<|im')
    assert chat.show({"messages": messages, "tools": '[{"name": "c"}]'}).startswith('[{"name": "c"}]<|im')


def test_missing_entries_that_a_table_adds_to_tool_calls_are_removed() -> None:
    template = CHATML.replace("call.name", "(call.arguments | tojson)")
    datasets = pytest.importorskip("datasets")
    calls = [{"arguments": {"city": "Rome"}}, {"arguments": {"day": 3}}]
    rows = [
        {"messages": [*make_messages("Weather?"), {"role": "assistant", "content": "", "tool_calls": [call]}]}
        for call in calls
    ]
    chat = ChatTokenizer(make_tokenizer(template))
    for row, stored in zip(rows, datasets.Dataset.from_list(rows)):
        assert chat.show(stored) == chat.show(row)


# ------------------------------------------------------------------------------------- other tokenizers


class CharacterTokenizer(PreTrainedTokenizer):  # type: ignore[misc]
    """Tokenizer in Python, without offsets: one token per character."""

    def __init__(self, **options: Any) -> None:
        super().__init__(unk_token="<unk>", eos_token="<|im_end|>", extra_special_tokens=["<|im_start|>"], **options)

    vocab_size = 300

    def get_vocab(self) -> dict[str, int]:
        return {**{chr(code): code for code in range(300)}, **self.added_tokens_encoder}

    def _tokenize(self, text: str, **options: Any) -> list[str]:
        return list(text)

    def _convert_token_to_id(self, token: str) -> int:
        return ord(token)

    def _convert_id_to_token(self, index: int) -> str:
        return chr(index)

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return "".join(tokens)


def test_tokenizer_without_offsets() -> None:
    tokenizer = CharacterTokenizer()
    assert not tokenizer.is_fast
    tokenizer.chat_template = CHATML
    assert ChatTokenizer(tokenizer)(TWO_TURNS) == read_marked(tokenizer, EXPECTED["chatml"])


def test_metaspace_tokenizer_keeps_the_space_before_a_response() -> None:
    tokenizer = make_tokenizer("mistral", "metaspace")
    sample = ChatTokenizer(tokenizer)(TWO_TURNS)
    trained = [label for label in sample["labels"] if label != -100]
    pieces = "".join(tokenizer.convert_ids_to_tokens(trained))
    assert pieces == "▁Hi.</s>▁It▁is▁4.</s>"


# ------------------------------------------------------------------------------------------ tables and processes


def test_table_and_stream_map_it() -> None:
    datasets = pytest.importorskip("datasets")
    chat = ChatTokenizer(make_tokenizer())
    rows = [{"messages": make_messages("Hello", "Hi.")}, {"messages": TWO_TURNS}]
    expected = [chat(row) for row in rows]
    table = datasets.Dataset.from_list(rows)
    mapped = table.map(chat, remove_columns=table.column_names)
    assert list(mapped) == expected
    assert list(table.to_iterable_dataset().map(chat, remove_columns=table.column_names)) == expected
    broken = datasets.Dataset.from_list([*rows, {"messages": make_messages("Hello")}])
    with pytest.raises(DataError, match="conversation 2: "):
        broken.map(chat, with_indices=True)
    assert len(broken.filter(lambda row: chat.find_problem(row) is None)) == 2


def test_pickled_copy_encodes_equally() -> None:
    chat = ChatTokenizer(make_tokenizer("thinking"), train_on="last", tools=[{"name": "a"}])
    assert pickle.loads(pickle.dumps(chat))(TWO_TURNS) == chat(TWO_TURNS)


def test_hash_of_the_datasets_library_does_not_change_with_use() -> None:
    """Otherwise `map` would tokenize again instead of reading its cache."""
    fingerprint = pytest.importorskip("datasets.fingerprint")
    chat = ChatTokenizer(make_tokenizer())
    before = fingerprint.Hasher.hash(chat)
    chat(TWO_TURNS)
    assert fingerprint.Hasher.hash(chat) == before
    assert fingerprint.Hasher.hash(ChatTokenizer(make_tokenizer(), train_on="last")) != before


@pytest.mark.slow
def test_hash_of_the_datasets_library_is_equal_in_each_process() -> None:
    pytest.importorskip("datasets")
    script = (
        "from datasets.fingerprint import Hasher\n"
        "from headway import ChatTokenizer\n"
        "from tests.unit.language_data.chat.chat_tokenizers import make_tokenizer\n"
        "print(Hasher.hash(ChatTokenizer(make_tokenizer())))\n"
    )
    command = [sys.executable, "-c", script]
    found = [
        subprocess.run(
            command, capture_output=True, text=True, check=True, env={**os.environ, "PYTHONHASHSEED": seed}
        ).stdout
        for seed in ("1", "2")
    ]
    assert found[0] == found[1]

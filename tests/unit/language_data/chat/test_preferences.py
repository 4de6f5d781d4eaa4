"""Test preference pairs: hand-written masks, the token IDs and masks of TRL, row formats, batches and errors."""

import json
import pickle
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from headway import ChatDataset, ChatTokenizer, Mixture, PackedDataset, PreferenceCollator, PreferenceTokenizer
from headway.errors import ConfigError, DataError
from tests.unit.language_data.chat.chat_tokenizers import make_messages, make_tokenizer, read_marked

QUESTION = make_messages("Hello", "Hi.", "2 + 2?")
RIGHT, WRONG = ([{"role": "assistant", "content": text}] for text in ("It is 4.", "Five, of course."))
ROW = {"prompt": QUESTION, "chosen": RIGHT, "rejected": WRONG}
START = (
    "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\nHi.<|im_end|>\n<|im_start|>user\n2 + 2?<|im_end|>\n"
    "<|im_start|>assistant\n"
)
CHOSEN = START + "[train]It is 4.<|im_end|>[/train]\n"
REJECTED = START + "[train]Five, of course.<|im_end|>[/train]\n"


def read_marked_pair(tokenizer: Any, chosen: str, rejected: str) -> dict[str, list[int]]:
    sides = {"chosen": read_marked(tokenizer, chosen), "rejected": read_marked(tokenizer, rejected)}
    return {f"{side}_{name}": values for side, sample in sides.items() for name, values in sample.items()}


@pytest.mark.parametrize(
    "row",
    [
        ROW,
        {"chosen": QUESTION + RIGHT, "rejected": QUESTION + WRONG},
        {"prompt": QUESTION, "chosen": QUESTION + RIGHT, "rejected": QUESTION + WRONG},
        {**ROW, "chosen": "It is 4.", "rejected": "Five, of course."},
        {**ROW, "messages": QUESTION + RIGHT, "score": 3},
    ],
)
def test_only_the_last_responses_are_trained(row: dict[str, Any]) -> None:
    tokenizer = make_tokenizer()
    pairs = PreferenceTokenizer(tokenizer)
    assert pairs(row) == read_marked_pair(tokenizer, CHOSEN, REJECTED)
    assert pairs.show(row) == f"chosen:\n{CHOSEN}\nrejected:\n{REJECTED}"
    assert pickle.loads(pickle.dumps(pairs))(row) == pairs(row)


def test_texts_are_messages() -> None:
    pairs = PreferenceTokenizer(make_tokenizer())
    row = {"prompt": "2 + 2?", "chosen": "4", "rejected": "5"}
    assert pairs.show(row) == "\n".join(
        f"{side}:\n<|im_start|>user\n2 + 2?<|im_end|>\n<|im_start|>assistant\n[train]{answer}<|im_end|>[/train]\n"
        for side, answer in (("chosen", 4), ("rejected", 5))
    )


def test_every_assistant_message_of_a_response_is_trained_and_tools_are_rendered() -> None:
    template = "{{ tools[0].name if tools }}" + make_tokenizer().chat_template
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "add"}]}
    response = [call, {"role": "tool", "content": "4"}, {"role": "assistant", "content": "It is 4."}]
    row = {"prompt": "2 + 2?", "chosen": response, "rejected": "5", "tools": json.dumps([{"name": "adder"}])}
    chosen, rejected = PreferenceTokenizer(make_tokenizer(template)).show(row).split("\nrejected:\n")
    assert chosen == (
        "chosen:\nadder<|im_start|>user\n2 + 2?<|im_end|>\n"
        "<|im_start|>assistant\n[train]<tool_call>add</tool_call><|im_end|>[/train]\n<|im_start|>tool\n4<|im_end|>\n"
        "<|im_start|>assistant\n[train]It is 4.<|im_end|>[/train]\n"
    )
    assert rejected.startswith("adder<|im_start|>")
    last = PreferenceTokenizer(ChatTokenizer(make_tokenizer(template), train_on="last"))
    assert last(row) == PreferenceTokenizer(make_tokenizer(template))(row)


def tokenize_with_trl(tokenizer: Any, row: dict[str, Any]) -> dict[str, Any]:
    """Return the batch of one pair that TRL's `DPOTrainer` trains on."""
    datasets, trl = pytest.importorskip("datasets"), pytest.importorskip("trl")
    from transformers import LlamaConfig, LlamaForCausalLM
    from trl.trainer.dpo_trainer import DataCollatorForPreference

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    model, reference = (LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes)) for _ in range(2))
    args = trl.DPOConfig("out", use_cpu=True, bf16=False, report_to="none", save_strategy="no")
    trainer = trl.DPOTrainer(
        model, reference, args=args, train_dataset=datasets.Dataset.from_list([row]), processing_class=tokenizer
    )
    assert isinstance(trainer.data_collator, DataCollatorForPreference)
    batch: dict[str, Any] = trainer.data_collator([trainer.train_dataset[0]])
    return batch


TEXT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message.content }}"
    "{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)
"""Template of docs/language_models.md, with which texts are tokenized as TRL tokenizes them."""


@pytest.mark.parametrize("template", ["llama", "mistral", "chatml", "gemma", "thinking", "text"])
def test_tokens_and_masks_are_those_of_trl(template: str) -> None:
    tokenizer = make_tokenizer(TEXT_TEMPLATE if template == "text" else template)
    if template == "text":
        row: dict[str, Any] = {"prompt": "Say it.\n", "chosen": "It is 4.", "rejected": "Five, of course."}
    elif template == "thinking":  # the template removes earlier reasoning and adds an empty block to responses without
        texts = ("<think>\neasy\n</think>\n\nIt is 4.", "<think>\nhard\n</think>\n\nFive.")
        row = {
            **ROW,
            **{side: make_messages("", text)[1:] for side, text in zip(("chosen", "rejected"), texts, strict=True)},
        }
    else:
        row = ROW
    batch = PreferenceCollator(tokenizer.pad_token_id)([PreferenceTokenizer(tokenizer)(row)])
    expected = tokenize_with_trl(tokenizer, row)
    tokens, labels = batch["input_ids"].flatten(0, 1), batch["labels"].flatten(0, 1)
    torch.testing.assert_close(tokens, expected["input_ids"])
    torch.testing.assert_close(batch["attention_mask"].flatten(0, 1), expected["attention_mask"])
    mask = expected["completion_mask"].bool()
    if template in ("chatml", "gemma", "thinking"):
        # TRL also trains the line break after the end-of-turn token, which the model never generates.
        last = expected["attention_mask"].sum(1, keepdim=True) - 1
        assert [tokenizer.decode(each) for each in tokens.gather(1, last)] == ["\n", "\n"]
        mask = mask.scatter(1, last, False)
    assert torch.equal(labels != -100, mask)
    assert torch.equal(labels[mask], tokens[mask])


def make_rows(count: int) -> list[dict[str, str]]:
    return [{"prompt": f"{at}?", "chosen": "yes " * (at % 4) + "yes", "rejected": f"no, {at}."} for at in range(count)]


def test_batches_have_one_row_per_pair() -> None:
    data = ChatDataset(make_rows(5), PreferenceTokenizer(make_tokenizer()))
    loader = DataLoader(data, batch_size=5, collate_fn=PreferenceCollator(7, pad_to_multiple_of=16))
    (batch,) = loader
    longest = max(len(data[at][f"{side}_input_ids"]) for at in range(5) for side in ("chosen", "rejected"))
    assert batch["input_ids"].shape == (5, 2, -(-longest // 16) * 16)
    for at in range(5):
        for place, side in enumerate(("chosen", "rejected")):
            tokens, labels = data[at][f"{side}_input_ids"], data[at][f"{side}_labels"]
            missing = batch["input_ids"].shape[2] - len(tokens)
            assert batch["input_ids"][at, place].tolist() == tokens + [7] * missing
            assert batch["labels"][at, place].tolist() == labels + [-100] * missing
            assert batch["attention_mask"][at, place].tolist() == [1] * len(tokens) + [0] * missing
    assert data.lengths.tolist() == [
        2 * max(len(data[at]["chosen_input_ids"]), len(data[at]["rejected_input_ids"])) for at in range(5)
    ]
    assert data.show(1).startswith("chosen:\n<|im_start|>user\n1?")


def test_batches_keep_other_entries() -> None:
    data = ChatDataset(make_rows(8), PreferenceTokenizer(make_tokenizer()))
    mixture = Mixture({"first": data, "second": data}, weights=[0.5, 0.5])
    (batch,) = DataLoader(mixture, batch_size=len(mixture), collate_fn=PreferenceCollator())
    assert sorted(batch["source"].tolist()) == [0] * 8 + [1] * 8
    samples = [{**data[at], "reference_chosen": -1.5 * at} for at in range(3)]
    assert PreferenceCollator()(samples)["reference_chosen"].tolist() == [0, -1.5, -3]
    with pytest.raises(DataError, match="different entries"):
        PreferenceCollator()([samples[0], data[1]])
    with pytest.raises(DataError, match="entry 'id' of the pairs is not one number"):
        PreferenceCollator()([{**data[0], "id": "a"}])


def test_stored_table_has_the_samples() -> None:
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_list(make_rows(4))
    pairs = PreferenceTokenizer(make_tokenizer())
    tokens = table.map(pairs, remove_columns=table.column_names)
    data = ChatDataset(table, pairs)
    assert [tokens[at] for at in range(4)] == [data[at] for at in range(4)]
    for stored in (tokens, tokens.with_format("torch")):
        stored_batch = PreferenceCollator()([stored[at] for at in range(4)])
        expected = PreferenceCollator()([data[at] for at in range(4)])
        assert stored_batch.keys() == expected.keys()
        assert all(torch.equal(stored_batch[name], expected[name]) for name in expected)


def test_long_pairs() -> None:
    tokenizer = make_tokenizer()
    rows = make_rows(4)
    lengths = ChatDataset(rows, PreferenceTokenizer(tokenizer)).lengths
    limit = int(sorted(lengths)[2]) // 2  # the fourth pair is longer

    def build(**options: Any) -> ChatDataset:
        return ChatDataset(rows, PreferenceTokenizer(ChatTokenizer(tokenizer, max_length=limit, **options)))

    dropped = build(too_long="drop")
    assert (len(dropped), dropped.num_dropped) == (3, 1)
    with pytest.raises(DataError, match=rf"pair 3: its chosen conversation: it has {lengths[3] // 2} tokens"):
        build()[3]
    with pytest.raises(DataError, match=r"pair .* has a conversation with more than max_length"):
        dropped.tokenizer(rows[3])
    assert len(build(too_long="truncate")[3]["chosen_input_ids"]) == limit
    same = {"prompt": "1?", "chosen": "It is 4, of course.", "rejected": "It is 4, I think."}
    tokens = PreferenceTokenizer(tokenizer)(same)
    both = zip(tokens["chosen_input_ids"], tokens["rejected_input_ids"], strict=False)
    num_equal = next(at for at, (chosen, rejected) in enumerate(both) if chosen != rejected)
    short = PreferenceTokenizer(ChatTokenizer(tokenizer, max_length=num_equal, too_long="truncate"))
    with pytest.raises(DataError, match=f"the same tokens, of which at most max_length={num_equal} are kept"):
        short(same)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a", "chosen": "b"}, "pair .*: a row has no 'rejected', only prompt, chosen"),
        ([1], "give a dict with 'prompt', 'chosen' and 'rejected'"),
        ({"chosen": "Human: a", "rejected": "Human: b"}, "no 'prompt', and .* add the prompt"),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "'chosen' and 'rejected' are equal"),
        ({**ROW, "chosen": make_messages("Hello", "Hi.")}, "'chosen' begins with a message of the role 'user'"),
        ({**ROW, "chosen": []}, "the row has no messages"),
        ({"chosen": QUESTION, "rejected": QUESTION + WRONG}, "after the prompt, 'chosen' has no message"),
        ({**ROW, "rejected": [{**WRONG[0], "weight": 0}]}, "its rejected conversation: it has no message of the role"),
    ],
)
def test_unusable_rows(row: Any, message: str) -> None:
    pairs = PreferenceTokenizer(make_tokenizer())
    with pytest.raises(DataError, match=message):
        pairs(row)
    assert pairs.find_problem(row) is not None
    assert pairs.find_problem(ROW) is None
    with pytest.raises(DataError, match="pair 1: "):
        ChatDataset([ROW, row], pairs)[1]


def test_wrong_settings() -> None:
    tokenizer = make_tokenizer()
    with pytest.raises(ConfigError, match="train_on='all', which also labels the prompt"):
        PreferenceTokenizer(ChatTokenizer(tokenizer, train_on="all"))
    with pytest.raises(ConfigError, match=r"messages_column='text'.*rename"):
        PreferenceTokenizer(ChatTokenizer(tokenizer, messages_column="text"))
    with pytest.raises(ConfigError, match="pad_token_id=None"):
        PreferenceCollator(None)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="pad_to_multiple_of=0"):
        PreferenceCollator(pad_to_multiple_of=0)
    data = ChatDataset([ROW], PreferenceTokenizer(tokenizer))
    with pytest.raises(ConfigError, match="preference pairs, which cannot be packed"):
        PackedDataset(data, 128)
    with pytest.raises(DataError, match="samples of a PreferenceTokenizer"):
        PreferenceCollator()([ChatTokenizer(tokenizer)(QUESTION + RIGHT)])

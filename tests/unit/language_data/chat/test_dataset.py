"""Test `ChatDataset` with packing, mixtures, token batches, sharded files and workers."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset
from transformers import LlamaConfig, LlamaForCausalLM

from headway import (
    ChatDataset,
    ChatTokenizer,
    Mixture,
    PackedDataset,
    PackingCollator,
    ShardedDataset,
    TokenBatchSampler,
)
from headway.errors import ConfigError, DataError
from headway.language_data.packing import measure_lengths
from tests.unit.language_data.chat.chat_tokenizers import make_messages, make_tokenizer

ANSWERS = ["Hi.", "It is sunny and warm.", "4", "The answer is 4, of course.", "Be brief, please.", "Hello there!"]
ROWS = [{"messages": make_messages("Hello", "Hi.", f"What is {at}?", answer)} for at, answer in enumerate(ANSWERS)]


def make_dataset(rows: Any = ROWS, **options: Any) -> ChatDataset:
    return ChatDataset(rows, ChatTokenizer(make_tokenizer(), **options))


def test_samples_are_those_of_the_tokenizer() -> None:
    dataset = make_dataset()
    assert len(dataset) == 6
    assert [dataset[at] for at in range(6)] == [dataset.tokenizer(row) for row in ROWS]
    assert dataset[-1] == dataset[5]
    assert dataset.lengths.tolist() == [len(dataset[at]["input_ids"]) for at in range(6)]
    assert dataset.show(2).endswith("assistant\n[train]4<|im_end|>[/train]\n")
    for index in (6, -7):
        with pytest.raises(IndexError, match="of 6"):
            dataset[index]
    assert ChatDataset(ROWS, make_tokenizer())[1] == dataset[1]


def test_table_of_the_datasets_library() -> None:
    datasets = pytest.importorskip("datasets")
    assert list(make_dataset(datasets.Dataset.from_list(ROWS))) == list(make_dataset())


def test_too_long_conversations_are_dropped() -> None:
    lengths = make_dataset().lengths
    limit = int(sorted(lengths)[3])
    dataset = make_dataset(max_length=limit, too_long="drop")
    kept = [at for at in range(6) if lengths[at] <= limit]
    assert len(dataset) == len(kept) < 6
    assert dataset.num_dropped == 6 - len(kept)
    assert [dataset[at] for at in range(len(kept))] == [make_dataset()[at] for at in kept]
    assert dataset.lengths.tolist() == lengths[kept].tolist()
    with pytest.raises(DataError, match="all 6 conversations have more than max_length=5"):
        make_dataset(max_length=5, too_long="drop")


def test_errors_name_the_row() -> None:
    dataset = make_dataset([*ROWS, {"messages": make_messages("Hello")}])
    with pytest.raises(DataError, match="conversation 6: it has no message of the role 'assistant'"):
        dataset[6]
    with pytest.raises(DataError, match="conversation 6: "):
        _ = dataset.lengths
    with pytest.raises(DataError, match="conversation 6: "):
        make_dataset(dataset.dataset, max_length=99, too_long="drop")


class Stream(IterableDataset[Any]):
    """Stream of conversations."""

    def __iter__(self) -> Any:
        return iter(ROWS)


@pytest.mark.parametrize("rows", [Stream(), iter(ROWS)])
def test_streams_are_refused(rows: Any) -> None:
    with pytest.raises(DataError, match=r"stream\.map\(ChatTokenizer"):
        make_dataset(rows)


def test_mixture_of_conversations_is_refused() -> None:
    with pytest.raises(ConfigError, match="a ChatDataset for each source"):
        make_dataset(Mixture({"a": ROWS}))


def test_packed_conversations_keep_their_labels() -> None:
    dataset = make_dataset()
    packed = PackedDataset(dataset, 128, strategy="in_order")
    sequences = [packed[at] for at in range(len(packed))]
    labels = [label for sequence in sequences for label in sequence["labels"].tolist() if label != -100]
    assert labels == [label for sample in dataset for label in sample["labels"] if label != -100]
    assert len(packed) < 6
    assert "[train]Hi.<|im_end|>[/train]" in dataset.tokenizer.mark_trained(sequences[0])


def test_packing_measures_without_reading_the_samples_again(monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = make_dataset(max_length=200, too_long="drop")
    expected = dataset.lengths.tolist()
    monkeypatch.setattr(ChatTokenizer, "__call__", None)
    assert measure_lengths(dataset).tolist() == expected


def make_llama(dataset: ChatDataset) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=len(dataset.tokenizer.tokenizer), use_cache=False, **sizes)
    return LlamaForCausalLM(config).double()


def test_packed_loss_equals_unpacked_loss() -> None:
    dataset = make_dataset()
    model = make_llama(dataset)
    total, count = 0.0, 0
    for sample in dataset:
        tokens, labels = (torch.tensor([sample[name]]) for name in ("input_ids", "labels"))
        number = int((labels[:, 1:] != -100).sum())
        total += float(model(input_ids=tokens, labels=labels).loss.detach()) * number
        count += number
    packed = PackedDataset(dataset, 128)
    batch = next(iter(DataLoader(packed, batch_size=len(packed), collate_fn=PackingCollator())))
    assert int((batch["labels"][:, 1:] != -100).sum()) == count
    assert float(model(**batch).loss.detach()) == pytest.approx(total / count, rel=1e-6)  # in float32


def test_mixture_of_chat_and_text() -> None:
    chat = make_dataset()
    text = [{"input_ids": [5, 6, 7], "labels": [5, 6, 7]}] * 6
    mixture = Mixture({"chat": chat, "text": text}, weights=[0.5, 0.5])
    packed = PackedDataset(mixture, 256)
    batch = next(iter(DataLoader(packed, batch_size=1, collate_fn=PackingCollator())))
    is_chat = batch["source"] == 0
    trained = batch["labels"] != -100
    assert 0 < int((trained & is_chat).sum()) < int(is_chat.sum())
    assert int((trained & (batch["source"] == 1)).sum()) == 2 * packed[0]["source"].count(1)


def test_token_batches() -> None:
    dataset = make_dataset()
    sampler = TokenBatchSampler(dataset.lengths, 2 * int(dataset.lengths.max()), shuffle=False)
    assert sorted(index for batch in sampler for index in batch) == list(range(6))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_sharded_files_with_workers_in_two_epochs(tmp_path: Path, num_workers: int) -> None:
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    records = ShardedDataset(tmp_path / "rows.jsonl", shuffle=True, seed=1, cache_dir=tmp_path / "cache")
    dataset = make_dataset(records)
    assert dataset.orders_samples
    loader = DataLoader(
        dataset, batch_size=2, num_workers=num_workers, collate_fn=list, persistent_workers=num_workers > 0
    )
    orders = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for epoch in range(2):
            dataset.set_epoch(epoch)
            samples = [sample for batch in loader for sample in batch]
            assert samples == [dataset.tokenizer(records[at]) for at in range(6)]
            assert dataset.lengths.tolist() == [len(sample["input_ids"]) for sample in samples]
            orders.append(samples)
    assert orders[0] != orders[1]
    with pytest.raises(ConfigError, match="too_long='drop' with a ShardedDataset"):
        make_dataset(records, max_length=50, too_long="drop")

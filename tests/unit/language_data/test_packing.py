"""Test packed datasets and their batches: entries, labels, positions, sources, and samples that cannot be packed."""

import random
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, SequentialSampler

from headway import Mixture, PackedDataset, PackingCollator, TrainingArguments
from headway.errors import ConfigError, DataError
from headway.language_data.packing import measure_lengths
from headway.trainer.data import make_train_sampler

DOCUMENTS = [[5, 6, 7], [8, 9], [4, 5, 6, 7, 8]]


def make_samples(**more: Any) -> list[dict[str, Any]]:
    return [{"input_ids": document, **{name: make(document) for name, make in more.items()}} for document in DOCUMENTS]


def pack_samples(samples: Any, length: int = 8, **given: Any) -> PackedDataset:
    return PackedDataset(samples, length, **{"strategy": "in_order", **given})


def test_documents_are_joined_with_their_own_positions_and_labels() -> None:
    packed = pack_samples(make_samples(), pad_token_id=1)
    assert len(packed) == 2
    assert {name: value.tolist() for name, value in packed[0].items()} == {
        "input_ids": [5, 6, 7, 8, 9, 1, 1, 1],
        "labels": [-100, 6, 7, -100, 9, -100, -100, -100],
        "position_ids": [0, 1, 2, 0, 1, 0, 1, 2],
    }
    assert packed[1]["input_ids"].tolist() == packed[-1]["input_ids"].tolist() == [4, 5, 6, 7, 8, 1, 1, 1]
    with pytest.raises(IndexError):
        packed[2]


@pytest.mark.parametrize(
    "convert", [list, tuple, torch.tensor, lambda ids: torch.tensor(ids).numpy(), lambda ids: {"input_ids": ids}]
)
def test_samples_may_be_sequences_of_tokens(convert: Any) -> None:
    packed = pack_samples([convert(document) for document in DOCUMENTS])
    assert packed[0]["input_ids"].tolist() == [5, 6, 7, 8, 9, 0, 0, 0]


def test_entries_with_one_number_per_token_are_joined() -> None:
    samples = make_samples(
        labels=lambda ids: [-100, *ids[1:-1], -100],
        shift_labels=lambda ids: [*ids[1:], -100],
        loss_scale=lambda ids: [0.5] * len(ids),
        attention_mask=lambda ids: [1] * len(ids),
        text=lambda ids: "a" * len(ids),
        length=len,
    )
    found = pack_samples(samples)[0]
    assert set(found) == {"input_ids", "labels", "position_ids", "shift_labels", "loss_scale"}
    assert found["labels"].tolist() == [-100, 6, -100, -100, -100, -100, -100, -100]
    assert found["shift_labels"].tolist() == [6, 7, -100, 9, -100, -100, -100, -100]
    assert found["loss_scale"].tolist() == [0.5] * 5 + [0.0] * 3
    assert samples[0]["labels"] == [-100, 6, -100]  # samples are unchanged


def test_pieces_of_a_long_sample_are_documents() -> None:
    packed = PackedDataset(DOCUMENTS, 4, strategy="split")
    assert [sequence["input_ids"].tolist() for sequence in packed] == [[5, 6, 7, 8], [9, 4, 5, 6], [7, 8, 0, 0]]
    assert [sequence["position_ids"].tolist() for sequence in packed] == [[0, 1, 2, 0], [0, 0, 1, 2], [0, 1, 0, 1]]
    assert packed[1]["labels"].tolist() == [-100, -100, 5, 6]


def test_sources_of_documents_are_kept() -> None:
    samples = [{"input_ids": document, "source": name} for document, name in zip(DOCUMENTS, ("web", "code", "web"))]
    packed = pack_samples(samples)
    assert packed[0]["source"] == ["web", "code"]
    batch = next(iter(DataLoader(packed, batch_size=2, collate_fn=PackingCollator())))
    assert batch["source"] == [["web", "code"], ["web"]]
    assert batch["input_ids"].shape == (2, 8)


def test_lengths_function_is_called_again_in_each_epoch() -> None:
    class Growing(list):
        def set_epoch(self, epoch: int) -> None:
            self[:] = DOCUMENTS[: epoch + 1]

    samples = Growing(DOCUMENTS[:1])
    packed = pack_samples(samples, lengths=lambda: [len(sample) for sample in samples])
    assert len(packed) == 1
    packed.set_epoch(2)
    assert len(packed) == 2


def test_tables_are_measured_without_reading_rows() -> None:
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_list(make_samples(text=str))
    assert measure_lengths(table.select([2, 0])).tolist() == [5, 3]
    assert pack_samples(table.shuffle(seed=0)).plan.num_tokens == 10


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        return iter(DOCUMENTS)


@pytest.mark.parametrize(
    ("samples", "given", "kind", "text"),
    [
        (Stream(), {}, DataError, "Stream, which has no length"),
        (DOCUMENTS, {"lengths": [3, 2]}, ConfigError, "2 entries for 3 samples"),
        (DOCUMENTS, {"lengths": [3, 4, 5]}, DataError, "sample 1 has tokens of the shape"),
        ([{"text": "a"}], {}, DataError, "sample 0 has no 'input_ids', only text"),
        (make_samples(attention_mask=lambda ids: [1] * (len(ids) - 1) + [0]), {}, DataError, "sample 0 is padded"),
        (make_samples(position_ids=lambda ids: [1] * len(ids)), {}, DataError, "'position_ids' other than 0, 1, 2"),
        (make_samples(labels=lambda ids: ids[1:]), {}, DataError, "3 tokens, but labels of the shape"),
        (make_samples(labels=lambda ids: [*ids, 1]), {}, DataError, "3 tokens, but labels of the shape"),
        (make_samples(labels=lambda ids: [0.5] * len(ids)), {}, DataError, "labels of the shape .* type float64"),
        ([[0.5, 1.5]], {}, DataError, "tokens of the type float64"),
        ([DOCUMENTS[0], {"input_ids": [4, 5], "extra": [1, 2]}], {}, DataError, "extra is not in all of them"),
    ],
)
def test_samples_that_cannot_be_packed_are_errors(samples: Any, given: dict, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        pack_samples(samples, **given)[0]


def test_sample_longer_than_its_given_length_is_an_error() -> None:
    with pytest.raises(DataError, match="its length was given as 2;"):
        pack_samples(DOCUMENTS, lengths=[2, 2, 5])[0]


def test_no_order_of_epochs_or_workers_loses_a_token() -> None:
    chooser = random.Random(0)
    samples = [[chooser.randrange(1000) for _ in range(chooser.randint(1, 20))] for _ in range(50)]
    for workers in (0, 2):
        loader = DataLoader(
            PackedDataset(samples, 16, long_samples="split", seed=1), 3, shuffle=True, num_workers=workers,
            collate_fn=PackingCollator(),
        )  # fmt: skip
        found = [token for batch in loader for token in batch["input_ids"].flatten().tolist()]
        assert sorted(filter(None, found)) == sorted(token for sample in samples for token in sample if token)


def test_other_samples_are_not_collated() -> None:
    with pytest.raises(DataError, match="sequences of a PackedDataset"):
        PackingCollator()([{"input_ids": [1]}])
    with pytest.raises(ConfigError, match="allowed: position_ids, varlen, mask"):
        PackingCollator("flash")
    documents = [{"input_ids": [4, 5]}, {"input_ids": [6, 7], "weights": [0.5, 1.0]}]
    for samples in (documents, documents[::-1]):
        packed = pack_samples(samples, 2)
        with pytest.raises(DataError, match="weights is not in all of them"):
            PackingCollator()([packed[0], packed[1]])


def test_packed_mixture_is_planned_again_in_each_epoch():
    sources = {
        name: [{"input_ids": [n] * (1 + (3 * n + first) % 7)} for n in range(9)] for first, name in enumerate("ab")
    }
    mixture = Mixture(sources, weights=[2, 1], num_samples=12, seed=4)
    packed = PackedDataset(mixture, 8)
    loader = DataLoader(packed, batch_size=1, collate_fn=PackingCollator(), num_workers=1, persistent_workers=True)
    for epoch in range(3):
        packed.set_epoch(epoch)
        batches = list(loader)
        owners = torch.cat([batch["source"].flatten() for batch in batches])
        tokens = torch.cat([batch["input_ids"].flatten() for batch in batches])
        pairs = sorted(zip(owners[owners >= 0].tolist(), tokens[owners >= 0].tolist()))
        assert pairs == sorted(
            (sample["source"], token) for sample in map(mixture.__getitem__, range(12)) for token in sample["input_ids"]
        )


def make_curriculum() -> Mixture:
    """Return 600 samples. None of the first 400 is from the source "code"."""
    sources = {name: [{"input_ids": [at] * (1 + n % 5)} for n in range(300)] for at, name in enumerate(("web", "code"))}
    return Mixture(sources, weights={0: [1, 0], 100: [1, 1]}, samples_per_update=4, num_samples=600, seed=1)


def test_packed_mixture_keeps_the_changes_of_its_weights() -> None:
    packed = PackedDataset(make_curriculum(), 16)
    first = next(
        number for number, sequence in enumerate(packed) if (PackingCollator()([sequence])["source"] == 1).any()
    )
    assert first >= len(packed) // 2
    assert isinstance(make_train_sampler(packed, TrainingArguments(use_cpu=True), 4), SequentialSampler)


def test_seed_that_would_shuffle_a_curriculum_is_refused() -> None:
    with pytest.raises(ConfigError, match="whose weights change, so the changes would be lost"):
        PackedDataset(make_curriculum(), 16, seed=1)
    PackedDataset(Mixture({"a": DOCUMENTS, "b": DOCUMENTS}, weights=[1, 1]), 64, seed=1)

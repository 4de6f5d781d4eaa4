"""Test boundaries of documents for each kind of attention against single documents and against transformers."""

from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from headway import PackedDataset, PackingCollator
from headway.language_data.document_attention import (
    find_documents,
    make_block_mask,
    make_document_mask,
    make_varlen_arguments,
)

SIZES = [[3, 1, 4], [8], [1, 1, 6]]
POSITIONS = torch.tensor([[place for size in row for place in range(size)] for row in SIZES])


def test_documents_are_counted_in_each_row() -> None:
    expected = [[number for number, size in enumerate(row) for _ in range(size)] for row in SIZES]
    assert find_documents(POSITIONS).tolist() == expected


@pytest.mark.parametrize("is_causal", [True, False])
def test_masked_attention_equals_that_of_single_documents(is_causal: bool) -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 3, 2, 8, 4, dtype=torch.float64)
    found = scaled_dot_product_attention(query, key, value, attn_mask=make_document_mask(POSITIONS, is_causal))
    for row, sizes in enumerate(SIZES):
        start = 0
        for size in sizes:
            part = (slice(row, row + 1), slice(None), slice(start, start + size))
            alone = scaled_dot_product_attention(query[part], key[part], value[part], is_causal=is_causal)
            torch.testing.assert_close(found[part], alone)
            start += size


@pytest.mark.parametrize("is_causal", [True, False])
def test_block_mask_of_flex_attention_allows_the_same_tokens(is_causal: bool) -> None:
    found = make_block_mask(POSITIONS, is_causal)
    places = torch.arange(8)
    rows = torch.arange(3)
    dense = found.mask_mod(rows[:, None, None], 0, places[:, None], places[None, :])
    assert torch.equal(dense, make_document_mask(POSITIONS, is_causal)[:, 0])
    assert found.shape == (3, 1, 8, 8)


def test_varlen_arguments_equal_those_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    documents = [[4] * size for row in SIZES for size in row]
    collate = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    expected = collate([{"input_ids": document} for document in documents])
    batch = PackingCollator("varlen")(list(PackedDataset(documents, 8, strategy="in_order")))
    assert batch.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert batch[name].dtype == value.dtype
            assert torch.equal(batch[name], value), name
        else:
            assert batch[name] == value, name


def attend_varlen(query: Any, key: Any, value: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, **given: Any) -> Any:
    """Compute causal attention within each document, like flash_attn_varlen_func."""
    assert given["causal"]
    assert given["max_seqlen_q"] == given["max_seqlen_k"] == int(cu_seqlens_q.diff().max())
    parts = []
    for start, stop in zip(cu_seqlens_q.tolist(), cu_seqlens_q.tolist()[1:]):
        q, k, v = (each[start:stop].transpose(0, 1)[None] for each in (query, key, value))
        parts.append(scaled_dot_product_attention(q, k, v, is_causal=True)[0].transpose(0, 1))
    return torch.cat(parts)


def test_flash_attention_of_transformers_gets_the_boundaries_of_joined_rows_only(monkeypatch: Any) -> None:
    """The kernels need a GPU, so transformers chooses among stand-ins for them."""
    pytest.importorskip("transformers")
    from transformers import modeling_flash_attention_utils as flash

    calls = []

    def attend_rows(query: Any, *_: Any, **__: Any) -> Any:
        calls.append("whole rows")
        return query

    def attend_documents(*args: Any, **kwargs: Any) -> Any:
        calls.append("documents")
        return attend_varlen(*args, **kwargs)

    def choose_arguments(is_causal: bool, **given: Any) -> dict[str, Any]:
        lengths = {name: given[name] for name in ("max_seqlen_q", "max_seqlen_k") if name in given}
        return {"causal": is_causal, **lengths}

    kernels = (attend_rows, attend_documents, None, None, None), (choose_arguments, choose_arguments)
    monkeypatch.setattr(flash, "lazy_import_flash_attention", lambda *_, **__: kernels)
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 3, 8, 2, 4)  # (rows, tokens, heads, width)
    attend = flash._flash_attention_forward
    attend(query, key, value, None, 8, True, position_ids=POSITIONS)
    assert calls == [
        "whole rows"
    ]  # transformers ignores the boundaries of several rows, so the collator joins the rows
    arguments = make_varlen_arguments(POSITIONS)
    joined = (each.reshape(1, 24, 2, 4) for each in (query, key, value))
    found = attend(
        *joined, None, 24, True, cu_seq_lens_q=arguments.cu_seqlens, cu_seq_lens_k=arguments.cu_seqlens,
        max_length_q=arguments.max_length, max_length_k=arguments.max_length,
    )  # fmt: skip
    assert calls == ["whole rows", "documents"]
    mask = make_document_mask(POSITIONS)
    expected = scaled_dot_product_attention(*(each.transpose(1, 2) for each in (query, key, value)), attn_mask=mask)
    torch.testing.assert_close(found.view(3, 8, 2, 4), expected.transpose(1, 2))

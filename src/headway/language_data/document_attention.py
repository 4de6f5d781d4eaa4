"""Document boundaries in packed sequences, in the forms that attention functions accept.

All functions take `position_ids` of shape (rows, tokens), in which a new document begins wherever a position is not the
previous one plus 1. `PackedDataset` makes such positions.

========================================  ==========================================================
attention                                 boundaries
========================================  ==========================================================
transformers: sdpa, eager, flex           `position_ids`, without `attention_mask` and without a cache
transformers: flash attention             `make_varlen_arguments`, on one row
torch.nn.attention.varlen.varlen_attn     `make_varlen_arguments`, on one row
torch.nn.attention.flex_attention         `make_block_mask`
scaled_dot_product_attention              `make_document_mask`
========================================  ==========================================================
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention.flex_attention import create_block_mask


@dataclass(frozen=True)
class VarlenArguments:
    """Arguments for variable-length attention kernels over documents that are concatenated in one row.

    Attributes:
        cu_seqlens: Index of each document's first token, followed by the total number of tokens (int32).
        max_length: Number of tokens in the longest document.
    """

    cu_seqlens: torch.Tensor
    max_length: int


def find_documents(position_ids: torch.Tensor) -> torch.Tensor:
    """Return the index of each token's document in its row, counted from 0.

    Args:
        position_ids: Positions, of shape (rows, tokens).
    """
    # The prepended position makes the first difference 1, so that the first token does not begin a second document.
    is_first_token = torch.diff(position_ids, dim=-1, prepend=position_ids[..., :1] - 1) != 1
    return is_first_token.cumsum(-1)


def make_document_mask(position_ids: torch.Tensor, is_causal: bool = True) -> torch.Tensor:
    """Return a boolean mask of shape (rows, 1, tokens, tokens) that is True where a token may attend to another.

    Args:
        position_ids: Positions, of shape (rows, tokens).
        is_causal: Whether tokens attend only to earlier tokens of their document and to themselves. Default: True.
    """
    documents = find_documents(position_ids)
    mask = documents[:, :, None] == documents[:, None, :]
    return (mask.tril() if is_causal else mask)[:, None]


def make_block_mask(position_ids: torch.Tensor, is_causal: bool = True) -> Any:
    """Return a `BlockMask` for torch's `flex_attention` that keeps attention within each document.

    Args:
        position_ids: Positions, of shape (rows, tokens).
        is_causal: Whether tokens attend only to earlier tokens of their document and to themselves. Default: True.
    """
    documents = find_documents(position_ids)
    num_rows, num_tokens = position_ids.shape

    def may_attend(row: Any, head: Any, query: Any, key: Any) -> Any:
        is_same = documents[row, query] == documents[row, key]
        return is_same & (key <= query) if is_causal else is_same

    return create_block_mask(may_attend, num_rows, None, num_tokens, num_tokens, device=position_ids.device)


def make_varlen_arguments(position_ids: torch.Tensor) -> VarlenArguments:
    """Return the arguments for variable-length attention over a batch whose rows are concatenated into one.

    The host waits for the device, because it needs the length of the longest document as a number.

    Args:
        position_ids: Positions, of shape (rows, tokens). Each row begins with a new document.
    """
    documents = find_documents(position_ids)
    # Make the documents' numbers unique over all rows. A row has at most as many documents as tokens.
    rows = torch.arange(len(documents), device=documents.device)[:, None]
    unique_documents = (documents + rows * documents.shape[-1]).flatten()
    _, sizes = torch.unique_consecutive(unique_documents, return_counts=True)
    cu_seqlens = torch.nn.functional.pad(sizes.cumsum(0), (1, 0)).to(torch.int32)
    return VarlenArguments(cu_seqlens, int(sizes.max()))

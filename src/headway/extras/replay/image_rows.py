"""Split batches of vision-language models, whose image tensors have one entry per image or patch, not per row.

The processors of transformers concatenate the images of all rows. `pixel_values` of Qwen2.5-VL, for example, has one
entry per patch, and `image_grid_thw` has one per image. A row can have any number of images. The entries of a row are
those of its placeholders: the tokens in `input_ids` that the model replaces with image features, in the same order.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch

from headway.core.runtime.collectives.tree import Tree, rebuild_mapping, slice_rows
from headway.errors import DataError


class _Medium(NamedTuple):
    """Kind of visual input (images or videos), with its names in transformers.

    Attributes:
        values: Key of the pixels in a batch.
        entries: Keys of tensors that have one entry per image (video), or one per patch.
        grid: Key of a tensor of shape (images, 3) with the numbers of patches of each image: time, height and width.
        config_names: Attributes of a model's config that contain the placeholder's token ID.
        token_type: Value of `mm_token_type_ids` at placeholders.
    """

    values: str
    entries: tuple[str, ...]
    grid: str
    config_names: tuple[str, ...]
    token_type: int


_MEDIA = (
    _Medium(
        values="pixel_values",
        entries=("pixel_values", "image_sizes", "pixel_attention_mask", "image_grid_thw"),
        grid="image_grid_thw",
        config_names=("image_token_id", "image_token_index"),
        token_type=1,
    ),
    _Medium(
        values="pixel_values_videos",
        entries=("pixel_values_videos", "second_per_grid_ts", "video_grid_thw"),
        grid="video_grid_thw",
        config_names=("video_token_id", "video_token_index"),
        token_type=2,
    ),
)

_PADDED_IMAGES_NDIM = 5
"""Dimensions of `pixel_values` with padded images per row: (rows, images, channels, height, width), as in Idefics."""
_POSITION_SECTIONS = (3, 4)
"""Sizes of dim 0 of `position_ids` with several sections (M-RoPE), of shape (sections, rows, length)."""


def has_images(batch: Tree, num_rows: int | None, models: Sequence[torch.nn.Module]) -> bool:
    """Whether a batch has images or videos that `make_image_slicer` can assign to rows.

    The batch must be a mapping with `input_ids` of shape (rows, length), and it must be known which tokens are
    placeholders.

    Args:
        batch: Batch of this rank.
        num_rows: Number of rows of the batch, or None if it has no rows.
        models: Prepared models. Their transformers configs contain the token IDs of placeholders.
    """
    if not isinstance(batch, Mapping):
        return False
    input_ids = batch.get("input_ids")
    if not isinstance(input_ids, torch.Tensor) or input_ids.ndim != 2 or len(input_ids) != num_rows:
        return False
    media = _list_media(batch)
    return bool(media) and all(
        _has_token_types(batch) or _find_token_id(medium, models) is not None for medium in media
    )


def make_image_slicer(
    batch: Mapping[Any, Any], models: Sequence[torch.nn.Module], *, needs_images: bool
) -> Callable[[int, int], Tree]:
    """Return a function from (start, stop) to these rows of a batch, together with their images.

    In a piece whose rows have no images, the values of the images are None, as for a batch without images.

    Args:
        batch: Batch for which `has_images` is true. Its values are read on the CPU, so the host waits for the device.
        models: Prepared models. Their transformers configs contain the token IDs of placeholders.
        needs_images: Whether each piece must have images, because other ranks wait in the collectives of the encoder.

    Raises:
        DataError: If the entries of a tensor cannot be assigned to rows. Also, from the returned function, if a piece
            needs images but has none.
    """
    num_rows = len(batch["input_ids"])
    offsets_by_key: dict[str, list[int]] = {}
    for medium in _list_media(batch):
        placeholders = _find_placeholders(batch, medium, models)
        for key in medium.entries:
            if isinstance(batch.get(key), torch.Tensor | list):
                counts = _count_entries(key, batch[key], placeholders, batch.get(medium.grid))
                offsets_by_key[key] = [0, *accumulate(counts)]

    def slice_entries(key: str, start: int, stop: int) -> Any:
        """Return the images or videos of rows `start` to `stop - 1` under a key. None if these rows have none.

        Raises:
            DataError: If these rows have no images or videos, although each piece needs some (`needs_images`).
        """
        first, last = offsets_by_key[key][start], offsets_by_key[key][stop]
        if first < last:
            return batch[key][first:last]
        if needs_images:
            raise DataError(
                f"the batch must be split to fit into memory, but its rows {start} to {stop - 1} have no {key!r}. "
                "In a sharded layout, each rank must run the image encoder in each micro-batch. Give each row an image, use "
                "strategy='ddp', or use a smaller batch size and microbatching=None"
            )
        return None

    def slice_batch(start: int, stop: int) -> Tree:
        piece: dict[Any, Any] = {}
        for key, value in batch.items():
            if key in offsets_by_key:
                piece[key] = slice_entries(key, start, stop)
            elif key == "position_ids" and _has_position_sections(value, num_rows):
                piece[key] = value[:, start:stop]
            else:
                piece[key] = slice_rows(value, start, stop, num_rows)
        return rebuild_mapping(batch, piece)

    return slice_batch


def _list_media(batch: Mapping[Any, Any]) -> list[_Medium]:
    """Return the kinds of media (images, videos) that a batch contains."""
    return [medium for medium in _MEDIA if isinstance(batch.get(medium.values), torch.Tensor | list)]


def _has_token_types(batch: Mapping[Any, Any]) -> bool:
    """Whether a batch has `mm_token_type_ids`, which newer processors return: 1 at images and 2 at videos."""
    token_types = batch.get("mm_token_type_ids")
    return isinstance(token_types, torch.Tensor) and token_types.shape == batch["input_ids"].shape


def _find_token_id(medium: _Medium, models: Sequence[torch.nn.Module]) -> int | None:
    """Return the token ID of a medium's placeholders from the config of a model, or None if no config has one."""
    for model in models:
        config = getattr(model, "config", None)
        for name in medium.config_names:
            token_id = getattr(config, name, None)
            if isinstance(token_id, int):
                return token_id
    return None


def _find_placeholders(batch: Mapping[Any, Any], medium: _Medium, models: Sequence[torch.nn.Module]) -> torch.Tensor:
    """Return which tokens are placeholders of a medium, as a boolean CPU tensor of shape (rows, length)."""
    if _has_token_types(batch):
        is_placeholder: torch.Tensor = batch["mm_token_type_ids"] == medium.token_type
    else:
        is_placeholder = batch["input_ids"] == _find_token_id(medium, models)
    return is_placeholder.cpu()


def _count_entries(key: str, value: Sequence[Any] | torch.Tensor, placeholders: torch.Tensor, grid: Any) -> list[int]:
    """Return how many consecutive entries of a tensor belong to each row.

    Rules, of which the first that fits is used:

    1. Images that are padded to an equal number per row belong to their row.
    2. Entries of an image grid, or of a tensor as long as the grid, are assigned by the grid: an image has as many
       placeholders as its share of all patches.
    3. If there are as many entries as runs of consecutive placeholders, each run is one entry.
    4. If each row's share of all placeholders is a whole number of entries, the row has this number.
    5. One entry per row.

    Args:
        key: Key of the tensor in the batch, for the message.
        value: Tensor or list with one entry per image, patch or row.
        placeholders: Boolean tensor of shape (rows, length).
        grid: Tensor of shape (images, 3) with the patches of each image, or None.

    Raises:
        DataError: If no rule fits.
    """
    num_entries, num_rows = len(value), len(placeholders)
    tokens = placeholders.sum(1).tolist()
    has_one_per_row = num_entries == num_rows
    if has_one_per_row and isinstance(value, torch.Tensor) and value.ndim >= _PADDED_IMAGES_NDIM:
        return [1] * num_rows
    if isinstance(grid, torch.Tensor) and num_entries == len(grid):
        counts = _count_images(tokens, grid.prod(1).tolist())
        if counts is not None:
            return counts
    runs = _count_runs(placeholders)
    if sum(runs) == num_entries:
        return runs
    total = sum(tokens)
    if total and all(num_entries * count % total == 0 for count in tokens):
        return [num_entries * count // total for count in tokens]
    if has_one_per_row:
        return [1] * num_rows
    raise DataError(
        f"the batch must be split to fit into memory, but the {num_entries} entries of {key!r} cannot be assigned to its {num_rows} "
        f"rows, which have {tokens} image tokens. Give a function that slices the batch: "
        "accelerator.microbatches(batch, split=lambda batch, start, stop: ...), also for forward_backward (docs/microbatching.md)"
    )


def _count_images(tokens: Sequence[int], patches: Sequence[int]) -> list[int] | None:
    """Return the number of images in each row, or None if images do not end where rows end.

    Args:
        tokens: Number of placeholders in each row.
        patches: Number of patches of each image. All images have the same number of patches per placeholder.
    """
    total_tokens, total_patches = sum(tokens), sum(patches)
    images_by_end = {end * total_tokens: index for index, end in enumerate(accumulate(patches, initial=0))}
    offsets = [images_by_end.get(end * total_patches) for end in accumulate(tokens, initial=0)]
    known = [offset for offset in offsets if offset is not None]
    if len(known) < len(offsets):
        return None
    return [stop - start for start, stop in pairwise(known)]


def _count_runs(placeholders: torch.Tensor) -> list[int]:
    """Return the number of runs of consecutive placeholders in each row of a boolean tensor of shape (rows, length)."""
    starts = placeholders.clone()
    starts[:, 1:] &= ~placeholders[:, :-1]
    return [int(count) for count in starts.sum(1)]


def _has_position_sections(value: Any, num_rows: int) -> bool:
    """Whether a value contains position IDs of shape (sections, rows, length), as in M-RoPE."""
    return (
        isinstance(value, torch.Tensor)
        and value.ndim == 3
        and value.shape[0] in _POSITION_SECTIONS
        and value.shape[1] == num_rows
    )

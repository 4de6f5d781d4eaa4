"""Test micro-batches of vision-language batches: each piece contains the images of its rows, and no others.

The reference is a plain loop that runs the whole batch at once.
"""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from headway import Accelerator
from headway.errors import ConfigError, DataError
from headway.extras.replay.image_rows import has_images, make_image_slicer

IMAGE, VIDEO, VISION_START, VISION_END = 60, 61, 58, 59
LENGTH = 24
TOKENS_PER_IMAGE = 4


def make_qwen() -> nn.Module:
    """Return a small Qwen2.5-VL, whose `pixel_values` have one entry per patch."""
    transformers = pytest.importorskip("transformers")
    text = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
        "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0},
    }  # fmt: skip
    vision = {
        "depth": 2, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32, "patch_size": 4,
        "spatial_merge_size": 2, "temporal_patch_size": 2, "in_channels": 3, "window_size": 16, "fullatt_block_indexes": [1],
    }  # fmt: skip
    config = transformers.Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=VISION_START,
        vision_end_token_id=VISION_END,
    )
    torch.manual_seed(0)
    model: nn.Module = transformers.Qwen2_5_VLForConditionalGeneration(config)
    return model


def make_llava() -> nn.Module:
    """Return a small LLaVA, whose `pixel_values` have one entry per image. Its images have four tokens."""
    transformers = pytest.importorskip("transformers")
    vision = transformers.CLIPVisionConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=8, patch_size=4
    )
    text = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
    )
    config = transformers.LlavaConfig(
        vision_config=vision, text_config=text, image_token_index=IMAGE, vision_feature_layer=-1
    )
    torch.manual_seed(0)
    model: nn.Module = transformers.LlavaForConditionalGeneration(config)
    return model


def make_input_ids(images_per_row: Sequence[int]) -> torch.Tensor:
    """Return token IDs of shape (rows, LENGTH). Each image has `TOKENS_PER_IMAGE` placeholders between two marks."""
    rows = []
    for row, num_images in enumerate(images_per_row):
        tokens = ([VISION_START] + [IMAGE] * TOKENS_PER_IMAGE + [VISION_END]) * num_images
        rows.append(tokens + [3 + (row * 7 + position) % 50 for position in range(LENGTH - len(tokens))])
    return torch.tensor(rows)


def make_pixels(*shape: int) -> torch.Tensor:
    """Return random values that depend only on the shape."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def collate_for_qwen(images_per_row: Sequence[int]) -> dict[str, torch.Tensor]:
    """Return a batch with 16 patches per image. A placeholder stands for four patches."""
    input_ids, num_images = make_input_ids(images_per_row), sum(images_per_row)
    return {
        "pixel_values": make_pixels(16 * num_images, 3 * 2 * 4 * 4),
        "image_grid_thw": torch.tensor([[1, 4, 4]] * num_images),
        "input_ids": input_ids,
        "attention_mask": torch.ones_like(input_ids),
        "mm_token_type_ids": (input_ids == IMAGE).int(),
        "labels": input_ids.clone(),
    }


def collate_for_llava(images_per_row: Sequence[int]) -> dict[str, torch.Tensor]:
    """Return a batch with one entry of `pixel_values` per image, and without `mm_token_type_ids`."""
    input_ids = make_input_ids(images_per_row)
    return {"input_ids": input_ids, "pixel_values": make_pixels(sum(images_per_row), 3, 8, 8), "labels": input_ids}


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[Sequence[int]], dict[str, torch.Tensor]]]] = {
    "qwen": (make_qwen, collate_for_qwen),
    "llava": (make_llava, collate_for_llava),
}


BATCHES = [(1, 2, 1, 0), (2, 1, 1, 2), (0, 0, 1, 3)]
"""Images per row, for each batch."""


def train_plainly(name: str) -> nn.Module:
    """Train on whole batches with a hand-written loop, and return the model."""
    make_model, collate = MODELS[name]
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for images_per_row in BATCHES:
        model(**collate(images_per_row)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("max_rows", [1, 2])
@pytest.mark.parametrize("loop", ["microbatches", "forward_backward"])
def test_batches_with_images_train_like_whole_batches_after_memory_ran_out(
    name: str, max_rows: int, loop: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Pieces of at most `max_rows` rows fit. Rows have zero to three images, and some pieces have none."""
    make_model, collate = MODELS[name]
    accelerator = Accelerator(cpu=True, microbatching="auto")
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(BATCHES, batch_size=1, collate_fn=lambda batches: collate(batches[0]))
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    sizes: list[int] = []

    def compute_loss(piece: Any) -> torch.Tensor:
        num_rows = len(piece["input_ids"])
        sizes.append(num_rows)
        if num_rows > max_rows:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        loss: torch.Tensor = model(**piece).loss
        return loss

    for batch in loader:
        if loop == "forward_backward":
            accelerator.forward_backward(batch, compute_loss)
            optimizer.step()
            optimizer.zero_grad()
            continue
        for piece in accelerator.microbatches(batch):
            with accelerator.accumulate(model):
                accelerator.backward(compute_loss(piece))
                optimizer.step()
                optimizer.zero_grad()
    assert sizes[0] == 4
    assert max(sizes[3:]) <= max_rows
    assert accelerator.num_updates == len(BATCHES)
    reference = train_plainly(name).state_dict()
    for key, value in model.state_dict().items():
        torch.testing.assert_close(value, reference[key], rtol=1e-4, atol=1e-6)
    assert "split=" not in caplog.text


def test_pieces_contain_the_entries_of_their_rows() -> None:
    """Two rows have images of different sizes, and one row has none."""
    tokens = [[IMAGE] * 4 + [5] + [IMAGE], [5] * 6, [IMAGE] * 2 + [5] * 4]
    patches = torch.arange(28).reshape(28, 1)  # four patches per token
    grid = torch.tensor([[1, 4, 4], [1, 2, 2], [1, 4, 2]])
    positions = torch.arange(3 * 3 * 6).reshape(3, 3, 6)
    batch = {
        "pixel_values": patches,
        "image_grid_thw": grid,
        "input_ids": torch.tensor(tokens),
        "mm_token_type_ids": (torch.tensor(tokens) == IMAGE).int(),
        "position_ids": positions,
    }
    assert has_images(batch, 3, [])
    piece = make_image_slicer(batch, [], needs_images=False)
    assert piece(0, 1)["pixel_values"].flatten().tolist() == list(range(20))
    assert piece(0, 1)["image_grid_thw"].tolist() == grid[:2].tolist()
    assert piece(1, 2)["pixel_values"] is None
    assert piece(1, 3)["image_grid_thw"].tolist() == [[1, 4, 2]]
    assert piece(1, 3)["pixel_values"].flatten().tolist() == list(range(20, 28))
    assert torch.equal(piece(1, 3)["position_ids"], positions[:, 1:3])


def test_videos_and_images_of_a_batch_are_split_by_their_own_tokens() -> None:
    types = torch.tensor([[1, 1, 0, 2], [2, 2, 2, 0]])
    batch = {
        "input_ids": torch.full((2, 4), 9),
        "mm_token_type_ids": types,
        "pixel_values": torch.arange(8),
        "image_grid_thw": torch.tensor([[1, 2, 4]]),
        "pixel_values_videos": torch.arange(16),
        "video_grid_thw": torch.tensor([[1, 2, 2], [3, 2, 2]]),
    }
    piece = make_image_slicer(batch, [], needs_images=False)(1, 2)
    assert piece["pixel_values"] is None
    assert piece["pixel_values_videos"].tolist() == list(range(4, 16))
    assert piece["video_grid_thw"].tolist() == [[3, 2, 2]]


def test_images_that_are_padded_per_row_stay_with_their_row() -> None:
    """Idefics pads each row to the same number of images, so a row without images has an entry, too."""
    tokens = torch.tensor([[5, 5, 5, 5], [IMAGE, IMAGE, 5, IMAGE]])
    batch = {
        "input_ids": tokens,
        "mm_token_type_ids": (tokens == IMAGE).int(),
        "pixel_values": torch.arange(2).reshape(2, 1, 1, 1, 1).expand(2, 2, 3, 8, 8),
    }
    piece = make_image_slicer(batch, [], needs_images=False)(0, 1)
    assert piece["pixel_values"].shape == (1, 2, 3, 8, 8)
    assert piece["pixel_values"].unique().tolist() == [0]


def test_images_that_cannot_be_assigned_to_rows_are_an_error() -> None:
    tokens = torch.tensor([[IMAGE, 5, 5], [IMAGE, IMAGE, 5]])
    batch = {"input_ids": tokens, "mm_token_type_ids": (tokens == IMAGE).int(), "pixel_values": torch.zeros(7, 3)}
    with pytest.raises(
        DataError, match=r"7 entries of 'pixel_values'.*2 rows, which have \[1, 2\] image tokens.*split="
    ):
        make_image_slicer(batch, [], needs_images=False)


def test_pieces_without_images_are_an_error_where_all_ranks_run_the_image_encoder() -> None:
    slice_batch = make_image_slicer(collate_for_qwen((1, 0)), [], needs_images=True)
    assert len(slice_batch(0, 1)["pixel_values"]) == 16
    with pytest.raises(DataError, match="rows 1 to 1 have no 'pixel_values'"):
        slice_batch(1, 2)


# ---------------------------------------------------------------- split=


class SumOfNodes(nn.Module):
    """Model of graphs: sum of a linear function of the nodes of each graph."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(3, 1)

    def forward(self, graphs: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the outputs, of shape (graphs, 1), of graphs with `sizes` nodes each."""
        owners = torch.repeat_interleave(graphs["sizes"])
        return torch.zeros(len(graphs["sizes"]), 1).index_add(0, owners, self.linear(graphs["nodes"]))


def make_graphs() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    nodes, targets = torch.randn(8, 3, generator=generator), torch.randn(4, 1, generator=generator)
    return {"sizes": torch.tensor([3, 1, 2, 2]), "targets": targets, "nodes": nodes}


def split_graphs(graphs: dict[str, torch.Tensor], start: int, stop: int) -> dict[str, torch.Tensor]:
    """Return the graphs from `start` to `stop` - 1."""
    offsets = [0, *graphs["sizes"].cumsum(0).tolist()]
    return {
        "sizes": graphs["sizes"][start:stop],
        "targets": graphs["targets"][start:stop],
        "nodes": graphs["nodes"][offsets[start] : offsets[stop]],
    }


def test_split_function_divides_batches_of_graphs(caplog: pytest.LogCaptureFixture) -> None:
    accelerator = Accelerator(cpu=True, microbatching="auto")
    model = SumOfNodes()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    sizes = []

    def compute_loss(piece: Any) -> torch.Tensor:
        sizes.append((len(piece["targets"]), len(piece["nodes"])))
        if len(piece["targets"]) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return nn.functional.mse_loss(model(piece), piece["targets"])

    accelerator.forward_backward(make_graphs(), compute_loss, split=split_graphs)
    optimizer.step()
    assert sizes == [(4, 8), (2, 4), (2, 4)]
    reference, graphs = SumOfNodes(), make_graphs()
    nn.functional.mse_loss(reference(graphs), graphs["targets"]).backward()
    for parameter, expected in zip(model.parameters(), reference.parameters()):
        torch.testing.assert_close(parameter.detach(), expected.detach() - 0.1 * expected.grad)  # type: ignore[operator]
    assert "split=" not in caplog.text


def test_tensors_that_would_not_be_split_are_named_in_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    """The warning appears in the first batch, before memory runs out."""
    accelerator = Accelerator(cpu=True, microbatching="auto")
    model = accelerator.prepare(SumOfNodes())
    for _ in range(2):
        graphs = make_graphs()
        accelerator.forward_backward(graphs, lambda piece: (model(piece) - piece["targets"]).square().mean())
    warnings = [record.getMessage() for record in caplog.records if "split=" in record.getMessage()]
    assert len(warnings) == 1
    assert "the batch has 4 rows, but contains ['nodes'] of shape (8, 3)." in warnings[0]


@pytest.mark.parametrize("microbatching", ["auto", None])
def test_split_that_is_not_a_function_is_an_error(microbatching: str | None) -> None:
    accelerator = Accelerator(cpu=True, microbatching=microbatching)
    with pytest.raises(ConfigError, match=r"microbatches got split=4; give a function"):
        next(iter(accelerator.microbatches(make_graphs(), split=4)))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"forward_backward got split=4; give a function"):
        accelerator.forward_backward(make_graphs(), lambda piece: piece, split=4)  # type: ignore[arg-type]

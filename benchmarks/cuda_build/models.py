"""Models of every common kind that the forecast's own tests do not use; small enough to trace in seconds."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class Model:
    """A model and its batches.

    Attributes:
        make: Function that builds the model. The model takes `**batch`, and returns a mapping with the loss.
        batch: Function of a number of samples, a device, and optionally a sequence length, that makes a batch.
        size: Samples of a batch.
        is_transformers: Whether the model has `gradient_checkpointing_enable`.
        has_convolutions: Whether the model uses cuDNN, which needs the values of the simulated runtime.
        longest: Largest sequence length, or 0 if the length cannot vary.
    """

    make: Callable[[], nn.Module]
    batch: Callable[..., dict[str, torch.Tensor]]
    size: int
    is_transformers: bool = True
    has_convolutions: bool = False
    longest: int = 0


class WithLoss(nn.Module):
    """A plain module that also computes a loss."""

    def __init__(self, inner: nn.Module, loss: Callable[[Any, Any], torch.Tensor]) -> None:
        super().__init__()
        self.inner, self._loss = inner, loss

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return a mapping with the loss and the outputs."""
        outputs = self.inner(inputs)
        return {"loss": self._loss(outputs, targets), "outputs": outputs}


def make_transformer(name: str, **sizes: Any) -> Callable[[], nn.Module]:
    """Return a function that builds a transformers model, given the name of its class and the sizes of its config."""

    def make() -> nn.Module:
        import transformers

        kind = getattr(transformers, name)
        return kind(kind.config_class(**sizes))  # type: ignore[no-any-return]

    return make


def make_token_batches(length: int, labels: int | None = None) -> Callable[..., dict[str, torch.Tensor]]:
    """Return a function that makes token ids with labels.

    Args:
        length: Tokens of a sample.
        labels: Labels per sample; 0 for one label per sample without a dimension, None for one label per token.
    """

    def batch(size: int, device: str, length: int = length) -> dict[str, torch.Tensor]:
        inputs = {"input_ids": torch.zeros(size, length, dtype=torch.long, device=device)}
        shape = (size, length) if labels is None else (size,) if labels == 0 else (size, labels)
        inputs["labels"] = torch.zeros(shape, dtype=torch.long, device=device)
        return inputs

    return batch


def make_image_batches(width: int) -> Callable[[int, str], dict[str, torch.Tensor]]:
    """Return a function that makes square images with a class label each."""

    def batch(size: int, device: str) -> dict[str, torch.Tensor]:
        pixels = torch.zeros(size, 3, width, width, device=device)
        return {"pixel_values": pixels, "labels": torch.zeros(size, dtype=torch.long, device=device)}

    return batch


def make_pair_batches(shape: tuple[int, ...], target: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Any:
    """Return a function that makes inputs and targets of a plain module."""

    def batch(size: int, device: str) -> dict[str, torch.Tensor]:
        inputs = torch.zeros(size, *shape, device=device)
        return {"inputs": inputs, "targets": torch.zeros(size, *target, dtype=dtype, device=device)}

    return batch


def make_speech_batch(size: int, device: str) -> dict[str, torch.Tensor]:
    """Make Whisper's input features and label tokens."""
    features = torch.zeros(size, 80, 400, device=device)
    return {"input_features": features, "labels": torch.zeros(size, 64, dtype=torch.long, device=device)}


class UNet(nn.Module):
    """Small U-Net: a path down, a path up, and a skip connection."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.first, self.down = self._block(3, width), self._block(width, 2 * width)
        self.deep, self.last = self._block(2 * width, 2 * width), self._block(3 * width, width)
        self.head = nn.Conv2d(width, 3, 1)

    @staticmethod
    def _block(inside: int, outside: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(inside, outside, 3, padding=1), nn.GroupNorm(8, outside), nn.SiLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return an image of the same size."""
        first = self.first(x)
        deep = self.deep(self.down(nn.functional.max_pool2d(first, 2)))
        upsampled = nn.functional.interpolate(deep, scale_factor=2)
        return self.head(self.last(torch.cat([upsampled, first], 1)))  # type: ignore[no-any-return]


class Detector(nn.Module):
    """RetinaNet-like detector that returns classes and boxes at every position of three resolutions; the loss is dense."""

    strides = (8, 16, 32)

    def __init__(self, width: int = 64, classes: int = 20) -> None:
        super().__init__()
        self.classes = classes
        self.stem = nn.Sequential(*self._down(3, width), *self._down(width, width), *self._down(width, width))
        self.stages = nn.ModuleList(
            nn.Sequential(*self._down(width << index, width << index + 1)) for index in range(2)
        )
        self.lateral = nn.ModuleList(nn.Conv2d(width << index, width, 1) for index in range(3))
        self.heads = nn.ModuleList(
            nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, outputs, 3, padding=1))
            for outputs in (classes, 4)
        )

    @staticmethod
    def _down(inside: int, outside: int) -> list[nn.Module]:
        return [nn.Conv2d(inside, outside, 3, 2, 1, bias=False), nn.BatchNorm2d(outside), nn.ReLU(inplace=True)]

    def forward(self, pixels: torch.Tensor, classes: torch.Tensor, boxes: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the loss, logits and boxes. Targets are (samples, positions, classes) and (samples, positions, 4)."""
        levels = [self.stem(pixels)]
        for stage in self.stages:
            levels.append(stage(levels[-1]))
        merged = [lateral(level) for lateral, level in zip(self.lateral, levels)]
        for index in (1, 0):
            merged[index] = merged[index] + nn.functional.interpolate(merged[index + 1], scale_factor=2)
        logits, predicted_boxes = (torch.cat([head(level).flatten(2) for level in merged], 2).mT for head in self.heads)
        entropy = nn.functional.binary_cross_entropy_with_logits(logits, classes, reduction="none")
        confidence = torch.where(classes > 0, logits.sigmoid(), 1 - logits.sigmoid())
        focal = ((1 - confidence) ** 2 * entropy).sum() / classes.sum().clamp(min=1)
        return {
            "loss": focal + nn.functional.smooth_l1_loss(predicted_boxes, boxes),
            "logits": logits,
            "boxes": predicted_boxes,
        }


def make_detection_batches(width: int) -> Callable[[int, str], dict[str, torch.Tensor]]:
    """Return a function that makes images with dense targets."""

    def batch(size: int, device: str) -> dict[str, torch.Tensor]:
        num_positions = sum((width // stride) ** 2 for stride in Detector.strides)
        return {
            "pixels": torch.zeros(size, 3, width, width, device=device),
            "classes": torch.zeros(size, num_positions, 20, device=device),
            "boxes": torch.zeros(size, num_positions, 4, device=device),
        }

    return batch


class Graph(nn.Module):
    """Graph network that sends messages along edges and sums them at the nodes."""

    def __init__(self, width: int = 256, nodes: int = 2048, edges: int = 16384) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.register_buffer("source", torch.zeros(edges, dtype=torch.long))
        self.register_buffer("target", torch.zeros(edges, dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map node features (samples, nodes, width) to node features of the same shape."""
        for layer in self.layers:
            messages = layer(x).index_select(1, self.source).relu()
            x = x + torch.zeros_like(messages[:, : x.shape[1]]).index_add(1, self.target, messages)
        return x


class Mixer(nn.Module):
    """MLP-Mixer: perceptrons over tokens and over channels in turn."""

    def __init__(self, length: int = 196, width: int = 384, depth: int = 6) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * depth))
        self.tokens = nn.ModuleList(self._mlp(length, 2 * length) for _ in range(depth))
        self.channels = nn.ModuleList(self._mlp(width, 4 * width) for _ in range(depth))

    @staticmethod
    def _mlp(width: int, inner: int) -> nn.Module:
        return nn.Sequential(nn.Linear(width, inner), nn.GELU(), nn.Dropout(0.1), nn.Linear(inner, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (samples, tokens, channels) to the same shape."""
        for index, (make_token_batches, channels) in enumerate(zip(self.tokens, self.channels)):
            x = x + make_token_batches(self.norms[2 * index](x).transpose(1, 2)).transpose(1, 2)
            x = x + channels(self.norms[2 * index + 1](x))
        return x


def build_encoder() -> nn.Module:
    """Build torch's own transformer encoder."""
    layer = nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True)
    return WithLoss(nn.TransformerEncoder(layer, 6, enable_nested_tensor=False), nn.functional.mse_loss)


_LLAMA = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 6, "num_attention_heads": 16}
_LLAMA |= {"num_key_value_heads": 4, "vocab_size": 32000, "use_cache": False}
_BERT = {"hidden_size": 768, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 3072}

MODELS = {
    "GPT-2": Model(
        make_transformer("GPT2LMHeadModel", n_layer=6, use_cache=False), make_token_batches(512), 8, longest=512
    ),
    "Llama": Model(make_transformer("LlamaForCausalLM", **_LLAMA), make_token_batches(512), 8, longest=512),
    "Qwen2": Model(make_transformer("Qwen2ForCausalLM", **_LLAMA), make_token_batches(768), 4, longest=768),
    "Gemma2": Model(make_transformer("Gemma2ForCausalLM", **_LLAMA, head_dim=64), make_token_batches(512), 4),
    "OPT": Model(
        make_transformer(
            "OPTForCausalLM",
            hidden_size=768,
            ffn_dim=3072,
            num_hidden_layers=6,
            num_attention_heads=12,
            use_cache=False,
        ),
        make_token_batches(512),
        8,
    ),
    "GPT-NeoX": Model(
        make_transformer(
            "GPTNeoXForCausalLM",
            hidden_size=768,
            intermediate_size=3072,
            num_hidden_layers=6,
            num_attention_heads=12,
            vocab_size=32000,
            use_cache=False,
        ),
        make_token_batches(512),
        8,
    ),
    "BERT": Model(make_transformer("BertForMaskedLM", **_BERT), make_token_batches(384), 16, longest=384),
    "BERT, classes": Model(make_transformer("BertForSequenceClassification", **_BERT), make_token_batches(384, 0), 16),
    "DistilBERT": Model(make_transformer("DistilBertForTokenClassification"), make_token_batches(256), 16),
    "RoBERTa": Model(make_transformer("RobertaForMaskedLM", **_BERT), make_token_batches(384), 16),
    "ELECTRA": Model(make_transformer("ElectraForTokenClassification", **_BERT), make_token_batches(256), 16),
    "T5": Model(
        make_transformer("T5ForConditionalGeneration", num_layers=4, use_cache=False, decoder_start_token_id=0),
        make_token_batches(256, 128),
        16,
    ),
    "BART": Model(
        make_transformer(
            "BartForConditionalGeneration",
            d_model=512,
            encoder_layers=4,
            decoder_layers=4,
            encoder_attention_heads=8,
            decoder_attention_heads=8,
            use_cache=False,
        ),
        make_token_batches(256, 128),
        16,
    ),
    "Whisper": Model(
        make_transformer("WhisperForConditionalGeneration", max_source_positions=200, use_cache=False),
        make_speech_batch,
        4,
        True,
        True,
    ),
    "ViT": Model(
        make_transformer("ViTForImageClassification", num_hidden_layers=6), make_image_batches(224), 4, True, True
    ),
    "DeiT": Model(
        make_transformer(
            "DeiTForImageClassification",
            num_hidden_layers=6,
            hidden_size=384,
            num_attention_heads=6,
            intermediate_size=1536,
        ),
        make_image_batches(224),
        4,
        True,
        True,
    ),
    "Swin": Model(
        make_transformer("SwinForImageClassification", depths=[2, 2], num_heads=[3, 6]),
        make_image_batches(224),
        4,
        True,
        True,
    ),
    "ConvNeXt": Model(make_transformer("ConvNextForImageClassification"), make_image_batches(224), 4, False, True),
    "ResNet": Model(make_transformer("ResNetForImageClassification"), make_image_batches(224), 4, False, True),
    "Mamba": Model(
        make_transformer("MambaForCausalLM", hidden_size=256, num_hidden_layers=2, vocab_size=8000, use_cache=False),
        make_token_batches(48),
        2,
        False,
    ),
    "U-Net": Model(
        lambda: WithLoss(UNet(), nn.functional.mse_loss),
        make_pair_batches((3, 128, 128), (3, 128, 128)),
        2,
        False,
        True,
    ),
    "graph": Model(
        lambda: WithLoss(Graph(), nn.functional.mse_loss), make_pair_batches((2048, 256), (2048, 256)), 4, False
    ),
    "MLP-Mixer": Model(
        lambda: WithLoss(Mixer(), nn.functional.mse_loss), make_pair_batches((196, 384), (196, 384)), 32, False
    ),
    "nn.Transformer": Model(build_encoder, make_pair_batches((256, 512), (256, 512)), 16, False),
    "Qwen3-MoE": Model(
        make_transformer(
            "Qwen3MoeForCausalLM",
            **{**_LLAMA, "hidden_size": 512, "head_dim": 64},
            moe_intermediate_size=512,
            num_experts=8,
            num_experts_per_tok=2,
        ),
        make_token_batches(512),
        8,
    ),
    "detector": Model(Detector, make_detection_batches(256), 4, False, True),
}

"""Models that the tests of forecasts do not use: small enough to trace in seconds, and of every common kind."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class Model:
    """A model, and its batch.

    Attributes:
        make: makes it; called with `**batch`, it returns a mapping with the loss.
        batch: from a number of samples, a device, and of those with `lengths` a length.
        size: samples.
        is_transformers: it has gradient_checkpointing_enable.
        has_convolutions: cuDNN's, which need the values of the simulated runtime.
        longest: the sequences of its batches may be of any length up to this; 0: not.
    """

    make: Callable[[], nn.Module]
    batch: Callable[..., dict[str, torch.Tensor]]
    size: int
    is_transformers: bool = True
    has_convolutions: bool = False
    longest: int = 0


class WithLoss(nn.Module):
    """A plain module with a loss beside its outputs."""

    def __init__(self, inner: nn.Module, loss: Callable[[Any, Any], torch.Tensor]) -> None:
        super().__init__()
        self.inner, self._loss = inner, loss

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
        """Both."""
        outputs = self.inner(inputs)
        return {"loss": self._loss(outputs, targets), "outputs": outputs}


def transformer(name: str, **sizes: Any) -> Callable[[], nn.Module]:
    """A transformers class, by its name, of a config of its kind."""

    def make() -> nn.Module:
        import transformers

        kind = getattr(transformers, name)
        return kind(kind.config_class(**sizes))  # type: ignore[no-any-return]

    return make


def tokens(length: int, labels: int | None = None) -> Callable[..., dict[str, torch.Tensor]]:
    """Token ids, with labels for each of them, or one for each sample."""

    def batch(size: int, device: str, length: int = length) -> dict[str, torch.Tensor]:
        found = {"input_ids": torch.zeros(size, length, dtype=torch.long, device=device)}
        shape = (size, length) if labels is None else (size,) if labels == 0 else (size, labels)
        found["labels"] = torch.zeros(shape, dtype=torch.long, device=device)
        return found

    return batch


def images(width: int) -> Callable[[int, str], dict[str, torch.Tensor]]:
    """Images, and a class for each."""

    def batch(size: int, device: str) -> dict[str, torch.Tensor]:
        pixels = torch.zeros(size, 3, width, width, device=device)
        return {"pixel_values": pixels, "labels": torch.zeros(size, dtype=torch.long, device=device)}

    return batch


def pairs(shape: tuple[int, ...], target: tuple[int, ...], kind: torch.dtype = torch.float32) -> Any:
    """Inputs and targets of plain modules."""

    def batch(size: int, device: str) -> dict[str, torch.Tensor]:
        inputs = torch.zeros(size, *shape, device=device)
        return {"inputs": inputs, "targets": torch.zeros(size, *target, dtype=kind, device=device)}

    return batch


def speech(size: int, device: str) -> dict[str, torch.Tensor]:
    """Whisper's features and words."""
    features = torch.zeros(size, 80, 400, device=device)
    return {"input_features": features, "labels": torch.zeros(size, 64, dtype=torch.long, device=device)}


class UNet(nn.Module):
    """Down, up, and across."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.first, self.down = self._block(3, width), self._block(width, 2 * width)
        self.deep, self.last = self._block(2 * width, 2 * width), self._block(3 * width, width)
        self.head = nn.Conv2d(width, 3, 1)

    @staticmethod
    def _block(inside: int, outside: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(inside, outside, 3, padding=1), nn.GroupNorm(8, outside), nn.SiLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of the same size as its input."""
        first = self.first(x)
        deep = self.deep(self.down(nn.functional.max_pool2d(first, 2)))
        back = nn.functional.interpolate(deep, scale_factor=2)
        return self.head(self.last(torch.cat([back, first], 1)))  # type: ignore[no-any-return]


class Detector(nn.Module):
    """Classes and boxes at every place of three resolutions, as RetinaNet gives them; the loss is dense, too."""

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
        """Images with what is at each place: (samples, places, classes) and (samples, places, 4)."""
        levels = [self.stem(pixels)]
        for stage in self.stages:
            levels.append(stage(levels[-1]))
        merged = [lateral(level) for lateral, level in zip(self.lateral, levels)]
        for index in (1, 0):
            merged[index] = merged[index] + nn.functional.interpolate(merged[index + 1], scale_factor=2)
        logits, found = (torch.cat([head(level).flatten(2) for level in merged], 2).mT for head in self.heads)
        entropy = nn.functional.binary_cross_entropy_with_logits(logits, classes, reduction="none")
        certainty = torch.where(classes > 0, logits.sigmoid(), 1 - logits.sigmoid())
        focal = ((1 - certainty) ** 2 * entropy).sum() / classes.sum().clamp(min=1)
        return {"loss": focal + nn.functional.smooth_l1_loss(found, boxes), "logits": logits, "boxes": found}


def detections(width: int) -> Callable[[int, str], dict[str, torch.Tensor]]:
    """Images with dense targets."""

    def batch(size: int, device: str) -> dict[str, torch.Tensor]:
        places = sum((width // stride) ** 2 for stride in Detector.strides)
        return {
            "pixels": torch.zeros(size, 3, width, width, device=device),
            "classes": torch.zeros(size, places, 20, device=device),
            "boxes": torch.zeros(size, places, 4, device=device),
        }

    return batch


class Graph(nn.Module):
    """Messages along edges, summed at nodes."""

    def __init__(self, width: int = 256, nodes: int = 2048, edges: int = 16384) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.register_buffer("source", torch.zeros(edges, dtype=torch.long))
        self.register_buffer("target", torch.zeros(edges, dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Features of nodes in, features of nodes out."""
        for layer in self.layers:
            messages = layer(x).index_select(1, self.source).relu()
            x = x + torch.zeros_like(messages[:, : x.shape[1]]).index_add(1, self.target, messages)
        return x


class Mixer(nn.Module):
    """Over tokens and over channels in turn."""

    def __init__(self, length: int = 196, width: int = 384, depth: int = 6) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * depth))
        self.tokens = nn.ModuleList(self._mlp(length, 2 * length) for _ in range(depth))
        self.channels = nn.ModuleList(self._mlp(width, 4 * width) for _ in range(depth))

    @staticmethod
    def _mlp(width: int, inner: int) -> nn.Module:
        return nn.Sequential(nn.Linear(width, inner), nn.GELU(), nn.Dropout(0.1), nn.Linear(inner, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(samples, tokens, channels) in and out."""
        for index, (tokens, channels) in enumerate(zip(self.tokens, self.channels)):
            x = x + tokens(self.norms[2 * index](x).transpose(1, 2)).transpose(1, 2)
            x = x + channels(self.norms[2 * index + 1](x))
        return x


def encoder() -> nn.Module:
    """torch's own."""
    layer = nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True)
    return WithLoss(nn.TransformerEncoder(layer, 6, enable_nested_tensor=False), nn.functional.mse_loss)


_LLAMA = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 6, "num_attention_heads": 16}
_LLAMA |= {"num_key_value_heads": 4, "vocab_size": 32000, "use_cache": False}
_BERT = {"hidden_size": 768, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 3072}

MODELS = {
    "GPT-2": Model(transformer("GPT2LMHeadModel", n_layer=6, use_cache=False), tokens(512), 8, longest=512),
    "Llama": Model(transformer("LlamaForCausalLM", **_LLAMA), tokens(512), 8, longest=512),
    "Qwen2": Model(transformer("Qwen2ForCausalLM", **_LLAMA), tokens(768), 4, longest=768),
    "Gemma2": Model(transformer("Gemma2ForCausalLM", **_LLAMA, head_dim=64), tokens(512), 4),
    "OPT": Model(
        transformer(
            "OPTForCausalLM",
            hidden_size=768,
            ffn_dim=3072,
            num_hidden_layers=6,
            num_attention_heads=12,
            use_cache=False,
        ),
        tokens(512),
        8,
    ),
    "GPT-NeoX": Model(
        transformer(
            "GPTNeoXForCausalLM",
            hidden_size=768,
            intermediate_size=3072,
            num_hidden_layers=6,
            num_attention_heads=12,
            vocab_size=32000,
            use_cache=False,
        ),
        tokens(512),
        8,
    ),
    "BERT": Model(transformer("BertForMaskedLM", **_BERT), tokens(384), 16, longest=384),
    "BERT, classes": Model(transformer("BertForSequenceClassification", **_BERT), tokens(384, 0), 16),
    "DistilBERT": Model(transformer("DistilBertForTokenClassification"), tokens(256), 16),
    "RoBERTa": Model(transformer("RobertaForMaskedLM", **_BERT), tokens(384), 16),
    "ELECTRA": Model(transformer("ElectraForTokenClassification", **_BERT), tokens(256), 16),
    "T5": Model(
        transformer("T5ForConditionalGeneration", num_layers=4, use_cache=False, decoder_start_token_id=0),
        tokens(256, 128),
        16,
    ),
    "BART": Model(
        transformer(
            "BartForConditionalGeneration",
            d_model=512,
            encoder_layers=4,
            decoder_layers=4,
            encoder_attention_heads=8,
            decoder_attention_heads=8,
            use_cache=False,
        ),
        tokens(256, 128),
        16,
    ),
    "Whisper": Model(
        transformer("WhisperForConditionalGeneration", max_source_positions=200, use_cache=False), speech, 4, True, True
    ),
    "ViT": Model(transformer("ViTForImageClassification", num_hidden_layers=6), images(224), 4, True, True),
    "DeiT": Model(
        transformer(
            "DeiTForImageClassification",
            num_hidden_layers=6,
            hidden_size=384,
            num_attention_heads=6,
            intermediate_size=1536,
        ),
        images(224),
        4,
        True,
        True,
    ),
    "Swin": Model(
        transformer("SwinForImageClassification", depths=[2, 2], num_heads=[3, 6]), images(224), 4, True, True
    ),
    "ConvNeXt": Model(transformer("ConvNextForImageClassification"), images(224), 4, False, True),
    "ResNet": Model(transformer("ResNetForImageClassification"), images(224), 4, False, True),
    "Mamba": Model(
        transformer("MambaForCausalLM", hidden_size=256, num_hidden_layers=2, vocab_size=8000, use_cache=False),
        tokens(48),
        2,
        False,
    ),
    "U-Net": Model(
        lambda: WithLoss(UNet(), nn.functional.mse_loss), pairs((3, 128, 128), (3, 128, 128)), 2, False, True
    ),
    "graph": Model(lambda: WithLoss(Graph(), nn.functional.mse_loss), pairs((2048, 256), (2048, 256)), 4, False),
    "MLP-Mixer": Model(lambda: WithLoss(Mixer(), nn.functional.mse_loss), pairs((196, 384), (196, 384)), 32, False),
    "nn.Transformer": Model(encoder, pairs((256, 512), (256, 512)), 16, False),
    "Qwen3-MoE": Model(
        transformer(
            "Qwen3MoeForCausalLM",
            **{**_LLAMA, "hidden_size": 512, "head_dim": 64},
            moe_intermediate_size=512,
            num_experts=8,
            num_experts_per_tok=2,
        ),
        tokens(512),
        8,
    ),
    "detector": Model(Detector, detections(256), 4, False, True),
}

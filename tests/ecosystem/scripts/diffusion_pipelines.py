"""A small Stable Diffusion pipeline, offloaded in each way that diffusers supports.

Arguments: the way (none, model, sequential, group, mapped), and the execution device.
"""

import json
import sys
import zlib
from pathlib import Path

import torch
from accelerate import PartialState
from accelerate.hooks import remove_hook_from_module
from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

from tests.scripts.evidence import Evidence

way, device = sys.argv[1:]
if device.startswith("toy"):
    from tests.accelerator.toy import register

    register()

    def convolve(image: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *how: object) -> torch.Tensor:
        """Compute the convolution on the CPU, because the toy accelerator has no kernel for it."""
        moved = (image.cpu(), weight.cpu(), None if bias is None else bias.cpu())
        return torch.convolution(*moved, *how).to(image.device)

    operators = torch.library.Library("aten", "IMPL")
    operators.impl("convolution_overrideable", convolve, "PrivateUse1")
evidence = Evidence("evidence", PartialState(cpu=True).process_index)


def hash_text(words: object) -> float:
    """Return a number that stands for the text."""
    return float(zlib.crc32(str(words).encode()))


def build_pipeline() -> StableDiffusionPipeline:
    """Build a pipeline with random weights and a tokenizer of single letters."""
    letters = [chr(each) for each in range(33, 127)]
    entries = [*letters, *(f"{each}</w>" for each in letters), "<|startoftext|>", "<|endoftext|>"]
    Path("vocab.json").write_text(json.dumps({entry: index for index, entry in enumerate(entries)}))
    Path("merges.txt").write_text("#version: 0.2\n")
    torch.manual_seed(0)
    unet = UNet2DConditionModel(
        sample_size=8, in_channels=4, out_channels=4, layers_per_block=1, block_out_channels=(8, 16), norm_num_groups=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=16, attention_head_dim=4,
    )  # fmt: skip
    vae = AutoencoderKL(
        block_out_channels=(8, 16), in_channels=3, out_channels=3, norm_num_groups=4, latent_channels=4,
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
    )  # fmt: skip
    text = CLIPTextConfig(
        vocab_size=len(entries), hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=20, bos_token_id=len(entries) - 2, eos_token_id=len(entries) - 1,
    )  # fmt: skip
    return StableDiffusionPipeline(
        vae=vae, text_encoder=CLIPTextModel(text), unet=unet, scheduler=DDIMScheduler(num_train_timesteps=20),
        tokenizer=CLIPTokenizer("vocab.json", "merges.txt", model_max_length=20), safety_checker=None,
        feature_extractor=None, requires_safety_checker=False,
    )  # fmt: skip


def draw(pipeline: StableDiffusionPipeline) -> torch.Tensor:
    """Draw two images from a prompt."""
    generator = torch.Generator().manual_seed(2)
    drawn = pipeline("a cat", num_inference_steps=2, num_images_per_prompt=2, generator=generator, output_type="pt")
    return drawn.images.cpu()


pipeline = build_pipeline()
pipeline.set_progress_bar_config(disable=True)
expected = draw(pipeline)
if way == "model":
    pipeline.enable_model_cpu_offload(device=device)
elif way == "sequential":
    pipeline.enable_sequential_cpu_offload(device=device)
elif way == "group":
    pipeline.enable_group_offload(onload_device=torch.device(device), offload_type="leaf_level")
elif way == "mapped":
    pipeline.unet.save_pretrained("unet", max_shard_size="20kB")
    size = sum(each.numel() for each in pipeline.unet.parameters()) * 4
    memory = {"cpu": size // 2} if device == "cpu" else {device: size // 3, "cpu": size // 3}
    pipeline.unet = UNet2DConditionModel.from_pretrained(
        "unet", device_map="auto", max_memory=memory, offload_folder="offload"
    )
    places = set(map(str, pipeline.unet.hf_device_map.values()))
    evidence.add("places", hash_text(sorted(places)))
for _ in range(2):
    images = draw(pipeline)
    evidence.add("images", images)
    evidence.add("as without", torch.equal(images, expected))
evidence.add("execution device", hash_text(pipeline._execution_device))
for part in ("unet", "vae", "text_encoder"):
    root = getattr(pipeline, part)
    for name, module in root.named_modules():
        if hasattr(module, "_hf_hook") and way != "mapped":
            hook = module._hf_hook
            kinds = [type(each).__name__ for each in getattr(hook, "hooks", [hook])]
            evidence.add("hooks", hash_text((part, name, kinds)))
            evidence.add("runs on", hash_text(getattr(hook, "execution_device", None)))
if way in ("model", "sequential"):
    pipeline.remove_all_hooks()
    evidence.add("without hooks", draw(pipeline.to("cpu")))
    pipeline.enable_model_cpu_offload(device=device)
    evidence.add("other way", draw(pipeline))
elif way == "mapped":
    remove_hook_from_module(pipeline.unet, recurse=True)
    evidence.add("hooks left", sum(hasattr(module, "_hf_hook") for module in pipeline.unet.modules()))
evidence.write()

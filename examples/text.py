"""A small byte-level GPT, trained on the source files of Python's standard library.

    headway launch examples/text.py                 every accelerator of this machine
    headway launch --cpu -n 2 examples/text.py      two CPU processes

The hash of a file's contents decides whether it is held out. At the end, the script prints a sample, and compares the bits per
held-out byte with those of a byte-bigram model of all training files. With the default 450 updates, the GPT is better.
"""

import argparse
import hashlib
import math
import sysconfig
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, Dataset

from headway import Accelerator, set_seed, track

SKIPPED_FOLDERS = {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "pydoc_data", "encodings"}

# ------------------------------------------------------------------------------------------------------------- data


def read_sources(max_bytes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the library's files as two strings of bytes: (training, held out). Each file is in only one of them.

    Every process reads the same files in the same order: that of their hashes.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    files: dict[bytes, bytes] = {}  # by hash, so that equal files count once
    for path in root.rglob("*.py"):
        if not SKIPPED_FOLDERS & set(path.relative_to(root).parts):
            text = path.read_bytes()
            files[hashlib.sha256(text).digest()] = text
    training, held_out = bytearray(), bytearray()
    for digest, text in sorted(files.items()):
        is_held_out = digest[-1] < 26  # one file in ten: the last byte of a hash is below 26 with probability 26/256
        (held_out if is_held_out else training).extend(text + b"\0")
    return (
        torch.frombuffer(training[:max_bytes], dtype=torch.uint8),
        torch.frombuffer(held_out[: max_bytes // 32], dtype=torch.uint8),
    )


class Chunks(Dataset):
    """Consecutive chunks of a text: (bytes, the bytes that follow them), each int64[length]."""

    def __init__(self, text: torch.Tensor, length: int) -> None:
        self.text, self.length = text, length

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        chunk = self.text[index * self.length : (index + 1) * self.length + 1].long()
        return chunk[:-1], chunk[1:]


def measure_bigram_bits(training: torch.Tensor, held_out: Chunks) -> float:
    """Return the bits per byte of a bigram model, counted on `training` and evaluated on the same bytes as the GPT.

    Witten-Bell smoothing: if n different bytes followed a byte, n counts go to the plain byte frequencies,
    which are smoothed by adding one.
    """
    text = training.long()
    pairs = torch.bincount(text[:-1] * 256 + text[1:], minlength=65536).view(256, 256).double()
    single = (torch.bincount(text, minlength=256) + 1).double()
    num_followers = (pairs > 0).sum(1, keepdim=True).clamp(min=1)
    probabilities = (pairs + num_followers * (single / single.sum())) / (pairs.sum(1, keepdim=True) + num_followers)
    text = held_out.text[: len(held_out) * held_out.length + 1].long()
    return -probabilities[text[:-1], text[1:]].log2().mean().item()


# ------------------------------------------------------------------------------------------------------------ model


class Block(nn.Module):
    """Transformer block with rotary positions."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention_norm = nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.RMSNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        heads = self.qkv(self.attention_norm(x)).view(batch, length, 3, self.num_heads, -1)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(
            rotate(query, cos, sin), rotate(key, cos, sin), value.contiguous(), is_causal=True
        )
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.mlp_norm(x))


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Apply rotary positions (Su et al. 2021): rotate each pair of channels by an angle that grows with the position."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1).to(x.dtype)


class GPT(nn.Module):
    """Map int64[batch, length] bytes to float[batch, length, 256] logits of the next byte."""

    def __init__(self, width: int = 128, num_layers: int = 4, num_heads: int = 4, max_length: int = 512) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.blocks = nn.ModuleList(Block(width, num_heads) for _ in range(num_layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, 256, bias=False)
        half = width // num_heads // 2
        angles = torch.outer(torch.arange(max_length), 1000 ** -(torch.arange(half) / half))
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        nn.init.normal_(self.embed.weight, std=0.5)
        nn.init.zeros_(self.head.weight)
        for block in self.blocks:
            nn.init.zeros_(block.out.weight)
            nn.init.zeros_(block.mlp[2].weight)

    def forward(self, bytes_in: torch.Tensor) -> torch.Tensor:
        length = bytes_in.shape[1]
        x = self.embed(bytes_in)
        for block in self.blocks:
            x = block(x, self.cos[:length], self.sin[:length])
        return self.head(self.norm(x))


@torch.no_grad()
def sample(model: GPT, prompt: str, num_bytes: int, temperature: float = 0.7) -> str:
    """Return the prompt with `num_bytes` generated bytes."""
    device = next(model.parameters()).device
    text = torch.tensor([list(prompt.encode())], device=device)
    for _ in range(num_bytes):
        probabilities = (model(text[:, -256:])[:, -1].float() / temperature).softmax(-1)
        text = torch.cat([text, torch.multinomial(probabilities, 1)], dim=1)
    return bytes(text[0].tolist()).decode(errors="replace")


# ------------------------------------------------------------------------------------------------- train and evaluate


def iterate_batches(accelerator: Accelerator, loader: DataLoader, num_updates: int):
    """Yield batches, passing over the loader until `num_updates` updates have run."""
    while accelerator.num_updates < num_updates:
        for batch in loader:
            yield batch
            if accelerator.num_updates >= num_updates:
                return


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction=reduction)


def train(accelerator: Accelerator, model: GPT, loader: DataLoader, args: argparse.Namespace) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.05)
    warm_up = max(1, args.steps // 20)

    def compute_lr_factor(update: int) -> float:
        """Return the factor of the learning rate: linear warm-up, then a cosine to a twentieth.

        `scheduler_ticks="updates"` makes the schedule count updates of this run.
        """
        progress = max(0, update - warm_up) / max(1, args.steps - warm_up)
        return min((update + 1) / warm_up, 0.525 + 0.475 * math.cos(math.pi * min(1.0, progress)))

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, compute_lr_factor)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    bar = track(
        iterate_batches(accelerator, loader, args.steps), description="training",
        total=args.steps * accelerator.gradient_accumulation_steps,
    )  # fmt: skip
    model.train()
    for inputs, targets in bar:
        with accelerator.accumulate(model):
            with accelerator.autocast():
                loss = cross_entropy(model(inputs), targets)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                bar.show(loss=loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        bar.add(tokens=targets.numel() * accelerator.num_data_shards)


@torch.no_grad()
def measure_held_out_bits(accelerator: Accelerator, model: GPT, loader: DataLoader) -> float:
    """Return the bits per byte over all held-out chunks. Each chunk counts once on any number of processes."""
    model.eval()
    total, count = 0.0, 0
    for inputs, targets in track(loader, description="held-out"):
        with accelerator.autocast():
            losses = cross_entropy(model(inputs), targets, reduction="none").view_as(targets)
        valid = losses[: loader.num_valid]  # without the rows that only fill up the last batch
        total += valid.double().sum().item()
        count += valid.numel()
    return accelerator.reduce_mean(total, count).item() / math.log(2)


def reload(accelerator: Accelerator, model: GPT, folder: Path) -> GPT:
    """Save the weights, and load them into a new model."""
    accelerator.save_model(model, folder)
    reloaded = GPT()
    reloaded.load_state_dict(load_file(folder / "model.safetensors"))
    return accelerator.prepare_model(reloaded, evaluation_mode=True)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=450, help="updates (default: 450)")
    parser.add_argument("--batch-size", type=int, default=4, help="chunks per process and micro-batch (default: 4)")
    parser.add_argument("--accumulate", type=int, default=2, help="micro-batches per update (default: 2)")
    parser.add_argument("--length", type=int, default=128, help="bytes per chunk (default: 128)")
    parser.add_argument("--lr", type=float, default=3e-3, help="highest learning rate (default: 0.003)")
    parser.add_argument("--max-bytes", type=int, default=4_000_000, help="bytes of training text (default: 4 million)")
    parser.add_argument("--mixed-precision", choices=["no", "bf16", "fp16"], help="default: that of `headway launch`")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/text"), help="folder of the weights (default: runs/text)"
    )
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    start = time.monotonic()
    set_seed(args.seed)
    accelerator = Accelerator(
        mixed_precision=args.mixed_precision, gradient_accumulation_steps=args.accumulate, scheduler_ticks="updates"
    )
    training, held_out = read_sources(args.max_bytes)
    chunks, held_out_chunks = Chunks(training, args.length), Chunks(held_out, args.length)
    model = GPT()
    accelerator.print(
        f"GPT of {sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters; {len(training) / 1e6:.1f} MB of "
        f"Python to train on, {len(held_out) / 1e3:.0f} kB of other files held out; {accelerator.num_processes} x "
        f"{accelerator.device.type}, {args.steps} updates of "
        f"{args.batch_size * args.accumulate * accelerator.num_data_shards * args.length:,} bytes"
    )
    train(accelerator, model, DataLoader(chunks, batch_size=args.batch_size, shuffle=True), args)
    evaluation = accelerator.prepare(DataLoader(held_out_chunks, batch_size=2 * args.batch_size))
    bits = measure_held_out_bits(accelerator, model, evaluation)
    reloaded = reload(accelerator, model, args.out)
    reloaded_bits = measure_held_out_bits(accelerator, reloaded, evaluation)
    if bits != reloaded_bits:
        raise SystemExit(f"the weights read back evaluate to {reloaded_bits} bits per byte, the trained ones to {bits}")
    if accelerator.is_main_process:
        bigram = measure_bigram_bits(training, held_out_chunks)
        prompt = "def read(self"
        print(f"\nA sample:\n\n{sample(reloaded, prompt, 250)}\n")
        print(f"weights: {args.out / 'model.safetensors'}, read back into a new model with the same evaluation")
        print(f"held-out bits per byte: GPT {bits:.3f}, byte bigram {bigram:.3f} ({time.monotonic() - start:.0f} s)")
    accelerator.end_training()


if __name__ == "__main__":
    main()

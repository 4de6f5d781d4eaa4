"""A GPT trained on a packed mixture of Python, C++ and prose, and continued on another number of processes.

    python examples/mixture.py                             kill a run on one process, continue it on two, and compare the losses
    headway launch --cpu -n 2 examples/mixture.py --train  only train, on two processes

The three sources come with Python and torch: the standard library, torch's C++ headers, and Python's help texts. The share of
Python falls from 80 % to 40 % in the middle of the run. Samples of different lengths are packed into sequences, and attention
stays within a document. The log has the loss of each source. The first command prints how far the sums of the weights of both
runs differ, which is rounding only.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from headway import Accelerator, Mixture, PackedDataset, PackingCollator, ProjectConfiguration, SourceLosses, set_seed

LENGTH = 256
"""Bytes per sequence."""

# ------------------------------------------------------------------------------------------------------------- data


def read_texts(num_files: int) -> dict[str, list[str]]:
    """Return the texts of each source. The order is the same in every process."""
    from pydoc_data.topics import topics

    python_files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    headers = sorted((Path(torch.__file__).parent / "include" / "c10").rglob("*.h"))
    return {
        "python": [path.read_text(errors="replace") for path in python_files[:num_files]],
        "c++": [path.read_text(errors="replace") for path in headers[:num_files]],
        "prose": [topics[name] for name in sorted(topics)[:num_files]],
    }


def split_text(text: str) -> list[torch.Tensor]:
    """Return the paragraphs of a text as bytes that end with a zero byte. Long paragraphs are cut."""
    samples = []
    for paragraph in re.split(r"\n\s*\n", text):
        content = paragraph.strip("\n").encode()[: LENGTH - 1]
        if len(content) > 8:  # shorter ones have little to learn from
            samples.append(torch.tensor([*content, 0]))
    return samples


def build_data(num_files: int, samples_per_update: int, num_updates: int) -> tuple[Mixture, PackedDataset]:
    """Return the mixture, and the dataset of packed sequences."""
    sources: dict[str, list[dict[str, torch.Tensor]]] = {}
    for name, texts in read_texts(num_files).items():
        sources[name] = [{"input_ids": sample} for text in texts for sample in split_text(text)]
    mixture = Mixture(
        sources,
        weights={
            0: {"python": 0.8, "c++": 0.1, "prose": 0.1},
            num_updates // 2: {"python": 0.4, "c++": 0.3, "prose": 0.3},
        },
        samples_per_update=samples_per_update,
        num_samples=samples_per_update * num_updates,
        seed=1,
    )
    # Windows of a few updates, so that the weights of an update apply to its sequences.
    return mixture, PackedDataset(mixture, LENGTH, window=8 * samples_per_update)


# ------------------------------------------------------------------------------------------------------------ model


class Block(nn.Module):
    """Transformer block whose attention stays within documents."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention_norm = nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.RMSNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        heads = self.qkv(self.attention_norm(x)).view(rows, length, 3, self.num_heads, -1)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        x = x + self.out(attended.transpose(1, 2).reshape(rows, length, width))
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """Map bytes, their positions in their documents and the documents' attention mask to logits of the next byte."""

    def __init__(self, width: int = 96, num_layers: int = 3, num_heads: int = 4) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(256, width)
        self.position_embedding = nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(Block(width, num_heads) for _ in range(num_layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, 256, bias=False)

    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, attention_mask: torch.Tensor
    ) -> torch.Tensor:
        x = self.token_embedding(input_ids) + self.position_embedding(position_ids)
        for block in self.blocks:
            x = block(x, attention_mask)
        return self.head(self.norm(x))


# ------------------------------------------------------------------------------------------------------------ train


def train(args: argparse.Namespace) -> None:
    """Train from the newest checkpoint, or from the beginning."""
    set_seed(0)
    project = ProjectConfiguration(str(args.out), str(args.out), automatic_checkpoint_naming=True, total_limit=2)
    # An update always has 8 sequences, on any number of processes.
    accelerator = Accelerator(cpu=args.cpu or None, project_config=project, global_batch_size=8)
    mixture, packed = build_data(args.files, args.samples_per_update, args.updates)
    model = GPT()
    model, optimizer, loader = accelerator.prepare(
        model,
        torch.optim.AdamW(model.parameters(), lr=2e-3),
        DataLoader(packed, batch_size=4, collate_fn=PackingCollator("mask"), drop_last=True),
    )
    source_losses = SourceLosses(accelerator, mixture.names)
    accelerator.print(f"{len(packed)} sequences of {LENGTH} bytes, {packed.plan.padding_share:.1%} of them padding")
    accelerator.resume()
    accelerator.init_trackers("mixture")
    for _ in accelerator.epochs(1):
        for batch in loader:
            labels, sources = batch.pop("labels")[:, 1:], batch.pop("source")[:, 1:]
            with accelerator.accumulate(model):
                logits = model(**batch)[:, :-1]
                token_losses = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")  # 0 at labels of -100
                count = (labels != -100).sum()
                accelerator.backward(token_losses.sum() / count, weight=count)
                source_losses.add(token_losses, sources, mask=labels != -100)
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients and accelerator.num_updates % args.save_every == 0:
                values = source_losses.compute()
                accelerator.log(values, step=accelerator.num_updates)
                accelerator.print(accelerator.num_updates, *(f"{name} {value:.4f}" for name, value in values.items()))
                accelerator.save_state()  # after compute(), so that the checkpoint contains no unlogged losses
            if accelerator.num_updates == args.kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
    if accelerator.is_main_process:
        weights = {name: parameter.double().sum().item() for name, parameter in model.named_parameters()}
        (args.out / "weights.json").write_text(json.dumps(weights))
    accelerator.end_training()


# ---------------------------------------------------------------------------------------------- kill and continue


def launch(num_processes: int, *options: str) -> int:
    """Train in new processes, and return the exit code."""
    launcher = [sys.executable, "-m", "headway", "launch", "--cpu", "-n", str(num_processes)]
    return subprocess.run([*launcher, __file__, "--train", "--cpu", *options]).returncode


def compare_runs(args: argparse.Namespace) -> None:
    """Kill a run on one process, continue it on two, and compare it with an undisturbed run."""
    sizes = [
        f"--updates={args.updates}",
        f"--samples-per-update={args.samples_per_update}",
        f"--files={args.files}",
        f"--save-every={args.save_every}",
    ]
    undisturbed, stopped = args.out / "undisturbed", args.out / "stopped"
    if launch(1, *sizes, f"--out={undisturbed}"):
        raise SystemExit("the undisturbed run failed")
    if not launch(1, *sizes, f"--out={stopped}", f"--kill-at={args.kill_at}"):
        raise SystemExit("the run ended before it was killed")
    if launch(2, *sizes, f"--out={stopped}"):
        raise SystemExit("the continued run failed")
    expected = json.loads((undisturbed / "weights.json").read_text())
    continued = json.loads((stopped / "weights.json").read_text())
    distance = max(abs(expected[name] - continued[name]) for name in expected)
    print(
        f"killed at update {args.kill_at} on 1 process, continued on 2: the sums of the weights differ by {distance:.1e}"
    )
    print(f"one page of both: headway report {undisturbed} {stopped}")
    if distance > 1e-2:
        raise SystemExit("the continued run differs from the undisturbed one")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=160, help="updates for which there is data (default: 160)")
    parser.add_argument(
        "--samples-per-update", type=int, default=15, help="paragraphs per update, on average (default: 15)"
    )
    parser.add_argument("--files", type=int, default=60, help="files per source (default: 60)")
    parser.add_argument("--save-every", type=int, default=10, help="updates between checkpoints (default: 10)")
    parser.add_argument("--kill-at", type=int, help="update at which the run kills itself (default: none)")
    parser.add_argument("--train", action="store_true", help="only train")
    parser.add_argument("--cpu", action="store_true", help="train on the CPU")
    parser.add_argument("--out", type=Path, default=Path("runs/mixture"), help="folder (default: runs/mixture)")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    if args.train:
        train(args)
    else:
        args.kill_at = args.kill_at or args.updates // 2 + 3
        compare_runs(args)


if __name__ == "__main__":
    main()

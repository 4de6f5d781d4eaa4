"""A small Llama is pretrained on token files that `headway tokenize` writes.

    python examples/pretrain.py                            on one process
    headway launch --cpu -n 2 examples/pretrain.py         on two processes, with the same updates

The text is the source of Python's standard library, as JSON lines. The script trains a tokenizer, tokenizes the text with the
command, and trains on blocks of the token file. Kill it and start it again: it continues with the next block. It needs
`pip install transformers`.
"""

import argparse
import json
import subprocess
import sys
import sysconfig
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from headway import Accelerator, ProjectConfiguration, TokenDataset, set_seed

LENGTH = 128
"""Tokens per block."""
VOCABULARY = 1024


def write_texts(path: Path, num_files: int) -> None:
    """Write the first files of the standard library as JSON lines."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:num_files]
    with path.open("w") as target:
        for file in files:
            target.write(json.dumps({"text": file.read_text(errors="replace")}) + "\n")


def train_tokenizer(data: Path, folder: Path) -> None:
    """Train a byte-level BPE tokenizer on JSON lines, and save it in the format of transformers."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    with data.open() as lines:
        inner.train_from_iterator((json.loads(line)["text"] for line in lines), trainer)
    PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|endoftext|>").save_pretrained(folder)


def prepare_tokens(folder: Path, num_files: int) -> None:
    """Write the text, the tokenizer and the token files, unless they exist."""
    if (folder / "stdlib.idx").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    write_texts(folder / "stdlib.jsonl", num_files)
    train_tokenizer(folder / "stdlib.jsonl", folder / "tokenizer")
    command = [sys.executable, "-m", "headway", "tokenize", str(folder / "stdlib.jsonl")]
    command += ["--tokenizer", str(folder / "tokenizer"), "--output", str(folder / "stdlib")]
    subprocess.run([*command, "--cache_dir", str(folder / "cache")], check=True)


def main(out: Path = Path("runs/pretrain"), num_updates: int = 120, num_files: int = 60) -> float:
    set_seed(0)
    project = ProjectConfiguration(str(out), str(out), automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(
        project_config=project, global_batch_size=8
    )  # blocks per update, on any number of processes
    with accelerator.main_process_first():  # the other processes then find the files
        prepare_tokens(out / "data", num_files)
    blocks = TokenDataset(out / "data" / "stdlib", LENGTH, vocab_size=VOCABULARY)
    accelerator.print(f"{blocks.num_tokens:,} tokens, {len(blocks):,} blocks of {LENGTH}")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=LENGTH, **sizes))
    model, optimizer, loader = accelerator.prepare(
        model,
        torch.optim.AdamW(model.parameters(), lr=5e-3),
        DataLoader(blocks, batch_size=4, shuffle=True, num_workers=1, drop_last=True),
    )
    accelerator.register_for_checkpointing(blocks)  # a resumed run checks that the files are the same
    accelerator.resume()
    loss = torch.tensor(float("nan"))
    for _ in accelerator.epochs(100):
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients and accelerator.num_updates % 20 == 0:
                accelerator.print(f"update {accelerator.num_updates}: loss {loss.item():.3f}")
                accelerator.save_state()
            if accelerator.num_updates >= num_updates:
                break
        if accelerator.num_updates >= num_updates:
            break
    accelerator.end_training()
    return loss.item()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/pretrain"), help="folder (default: runs/pretrain)")
    parser.add_argument("--updates", type=int, default=120, help="optimizer updates (default: 120)")
    parser.add_argument("--files", type=int, default=60, help="files of the standard library (default: 60)")
    arguments = parser.parse_args()
    main(arguments.out, arguments.updates, arguments.files)

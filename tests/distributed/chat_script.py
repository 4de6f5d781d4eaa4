"""Script that trains a small Llama on packed conversations with the Trainer, and may kill itself.

Arguments: folder of the run, update after which the process is killed (0: never).
"""

import hashlib
import json
import os
import signal
import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from headway import ChatDataset, Trainer, TrainerCallback, TrainingArguments
from tests.unit.language_data.chat.chat_tokenizers import make_messages, make_tokenizer


class KillItself(TrainerCallback):
    """Callback that kills the process after an update."""

    def __init__(self, update: int) -> None:
        self.update = update

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.update:
            os.kill(os.getpid(), signal.SIGKILL)


def main(folder: str, kill_after: int) -> None:
    """Train, starting from the newest checkpoint, and write a digest of the weights."""
    rows = [{"messages": make_messages("Hello", "Hi.", f"{at} + 1?", f"It is {at + 1}.")} for at in range(40)]
    tokenizer = make_tokenizer("llama")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes))
    args = TrainingArguments(
        folder, per_device_train_batch_size=2, max_steps=12, save_steps=2, learning_rate=0.01, use_cpu=True,
        packing=True, packing_length=160, disable_tqdm=True,
    )  # fmt: skip
    data = ChatDataset(rows, tokenizer)
    trainer = Trainer(model, args, train_dataset=data, processing_class=tokenizer, callbacks=[KillItself(kill_after)])
    trainer.train(resume_from_checkpoint=True)
    weights = b"".join(parameter.detach().numpy().tobytes() for parameter in trainer.model.parameters())
    result = {"weights": hashlib.sha256(weights).hexdigest(), "updates": trainer.state.global_step}
    Path(folder, "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))

"""The Trainer of transformers on a tiny BERT, with tokens that the collator masks at random.

Run: --as accelerate

Fault: the collator draws from a numpy Generator without a seed, which neither set_seed nor TrainingArguments(seed=) reaches.
Expect: a run repeats itself: same rows and weights, other input_ids in batch 1; default_rng() in the collator has no seed.
"""

from pathlib import Path

import numpy
import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint

MASK = 1


class MaskingCollator:
    def __init__(self):
        self.generator = numpy.random.default_rng()

    def __call__(self, rows):
        tokens = torch.stack([row["input_ids"] for row in rows])
        is_masked = torch.from_numpy(self.generator.random(tuple(tokens.shape)) < 0.2)
        return {
            "input_ids": tokens.masked_fill(is_masked, MASK),
            "labels": torch.tensor([row["labels"] for row in rows]),
        }


def main():
    set_seed(0)
    config = BertConfig(
        vocab_size=40,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=16,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    tokens = torch.randint(2, 40, (96, 8))
    rows = [{"input_ids": row, "labels": int(row[0] > row[1])} for row in tokens]
    arguments = TrainingArguments(
        output_dir="runs/masking_trainer",
        per_device_train_batch_size=8,
        max_steps=10,
        learning_rate=1e-3,
        save_steps=2,
        save_total_limit=2,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    model = BertForSequenceClassification(config)
    trainer = Trainer(model, arguments, train_dataset=rows, data_collator=MaskingCollator())
    folder = Path(arguments.output_dir)
    trainer.train(resume_from_checkpoint=get_last_checkpoint(str(folder)) if folder.is_dir() else None)


if __name__ == "__main__":
    main()

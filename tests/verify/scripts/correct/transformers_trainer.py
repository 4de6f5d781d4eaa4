"""The Trainer of transformers on a tiny BERT, with checkpoints every two updates.

Run: --as accelerate
"""

from pathlib import Path

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint


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
    tokens = torch.randint(0, 40, (96, 8))
    rows = [{"input_ids": row, "labels": int(row[0] > row[1])} for row in tokens]
    arguments = TrainingArguments(
        output_dir="runs/transformers_trainer",
        per_device_train_batch_size=4,
        max_steps=10,
        learning_rate=1e-3,
        save_steps=2,
        save_total_limit=2,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        # Otherwise training_step multiplies the loss by the number of processes, and this model's loss is a plain mean.
        average_tokens_across_devices=False,
    )
    trainer = Trainer(BertForSequenceClassification(config), arguments, train_dataset=rows)
    folder = Path(arguments.output_dir)
    trainer.train(resume_from_checkpoint=get_last_checkpoint(str(folder)) if folder.is_dir() else None)


if __name__ == "__main__":
    main()

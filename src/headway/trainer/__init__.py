"""A complete training loop: `TrainingArguments` and `Trainer`."""

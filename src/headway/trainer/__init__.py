"""The whole loop for those who do not want to write one: `TrainingArguments` and `Trainer`."""

"""DeepSpeed as a strategy: its settings, its engine, and what of the user's model and optimizer each part stands for."""

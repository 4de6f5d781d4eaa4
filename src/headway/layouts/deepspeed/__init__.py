"""DeepSpeed's ZeRO as a strategy: its configuration, its engine, and the user's optimizer and scheduler."""

"""torch.compile of models as a transform before they are wrapped: whole, or their repeated blocks."""

"""Activations dropped and computed again in backward, or kept in host memory."""

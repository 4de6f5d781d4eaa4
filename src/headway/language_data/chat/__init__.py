"""Conversations as training data: tokens from a chat template, and labels on the responses only."""

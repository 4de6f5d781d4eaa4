"""A training's arguments: what they are, their checks, and names of transformers' Trainer."""

"""Typed settings that record where each value was set. This package does not import torch."""

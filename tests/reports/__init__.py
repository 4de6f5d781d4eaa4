"""Tests of bugs that users reported, and of related cases. Expected values come from plain PyTorch or from Accelerate."""

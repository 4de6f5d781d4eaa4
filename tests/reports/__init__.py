"""Reports from outside, each as a test with its siblings: the expected value comes from plain PyTorch or from Accelerate."""

"""What prepare() returns, and the step: windows, weights, clock."""

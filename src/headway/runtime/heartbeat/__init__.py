"""What each process writes of itself while it runs, for the launcher to read."""

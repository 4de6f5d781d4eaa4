"""What a machine and its cluster say of themselves."""

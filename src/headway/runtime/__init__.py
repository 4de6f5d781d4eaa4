"""What this process is: its hardware, its place among the others, its generators."""

"""Context parallelism: sequences split across the ranks of one mesh axis."""

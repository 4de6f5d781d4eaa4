"""A checkpoint's files read, verified, and put back into objects."""

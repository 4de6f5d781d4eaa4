"""Tables of Accelerate's names, their lookup, and import finders for Accelerate's module paths."""

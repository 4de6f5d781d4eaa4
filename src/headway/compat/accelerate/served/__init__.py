"""Which of Accelerate's names are served, from where, and how `import accelerate` finds them."""

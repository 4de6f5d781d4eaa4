"""Where the parts of a model lie: built without memory, sized, surveyed, and placed within budgets."""

"""How fast a loop is, and which rank holds up the others."""

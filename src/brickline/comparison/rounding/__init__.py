"""How large a difference rounding explains, and whether a difference has a direction."""

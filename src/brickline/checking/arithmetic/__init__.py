"""Where precision is lost: each side in its own dtype against itself in float64."""

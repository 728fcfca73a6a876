"""What an op should have produced: re-execution in float64, and what rounding may do to it."""

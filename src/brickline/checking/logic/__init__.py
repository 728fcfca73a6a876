"""Whether both sides of a check compute the same function: in float64, without rounding."""

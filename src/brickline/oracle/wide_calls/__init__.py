"""The float64 room: one call of a model made again in float64, from the state before it."""

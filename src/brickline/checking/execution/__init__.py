"""How both sides of a check are run: tapes of their operations in float64, and interventions."""

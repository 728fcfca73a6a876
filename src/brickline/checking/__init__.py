"""How `check` works: run a candidate, hold every brick of it against what it should have made."""

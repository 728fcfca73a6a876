"""Which values of two sides belong together: by name, by a mapping, by being equal."""

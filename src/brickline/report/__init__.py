"""Reports: a Profile becomes text, JSON or CSV. Each module owns one form and measures nothing."""

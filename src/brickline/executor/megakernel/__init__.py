"""A whole plan, or a queue that is fed while it runs, as one persistent launch."""

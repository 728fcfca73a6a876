"""What was found in two runs, in words and figures."""

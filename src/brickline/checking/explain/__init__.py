"""Why a region of the candidate computes something else: causes, repairs and repros."""

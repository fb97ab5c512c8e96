"""Random programs, each held against other ways to compute the same: see `checks`."""

"""Steps on several processes, each of which computes its rows of every batch, on any framework."""

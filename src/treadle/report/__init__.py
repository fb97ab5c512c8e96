"""What runs did, read from their directories. Nothing here imports Keras or a framework."""

"""Which versions of Keras the library works with: its names, the main jobs, and the tests there."""

"""`Task` and its steps: gradients, state, loss scaling, and compilation."""

"""What a `Task` and its steps are made of: gradients, state, loss scale, and the compiled step."""

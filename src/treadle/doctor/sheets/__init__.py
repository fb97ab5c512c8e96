"""The sheet of a task: facts about one step, measured while it runs uncompiled."""

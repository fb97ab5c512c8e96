"""Data sets of other libraries as sources: `tf.data`, `DataLoader`, `PyDataset`, Grain."""

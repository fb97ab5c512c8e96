"""Conversion of other libraries' data sets: `tf.data`, `DataLoader`, `PyDataset`, Grain."""

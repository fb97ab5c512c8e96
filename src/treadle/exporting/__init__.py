"""Export of trained tasks: `predict_step` as a file that another runtime loads without Treadle.

Keras' own exporters write the files. This package makes `predict_step` a Keras model, and compares
the outputs of the written file with those of `Loop.predict`.
"""

"""Execution on Keras' backends: protocols, the eager reference, one package per framework."""

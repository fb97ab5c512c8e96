"""Shared basic types: progress, options, logs, hooks, triggers and run identity.

This package imports no framework, and Keras only inside functions.
"""

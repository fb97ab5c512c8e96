"""Capturing a PyTorch step: record it, simplify the record, generate code, prove it, replay it."""

"""Damage done to every file of run directories, and what each command makes of it."""

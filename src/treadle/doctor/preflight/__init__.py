"""Preflight: a few uncompiled steps, recorded and repeated with changes, to find silent mistakes.

`examining` runs `trials` under the spies of `recording`, and gives them to the `checks_…` modules,
which return the findings of a `report`.
"""

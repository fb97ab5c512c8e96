"""Types that every other package uses: progress, options, logs, hooks, triggers, identity.

Imports no framework, and Keras only inside functions.
"""

"""Certificates: verify that a task resumes bit for bit with its own data, in separate processes."""

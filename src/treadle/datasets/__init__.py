"""Small data sets: digits, wine and a text (shipped with the package), MNIST and CIFAR-10."""

from .loaders import Arrays, Table, alice, cifar10, digits, mnist, wine

__all__ = ["Arrays", "Table", "alice", "cifar10", "digits", "mnist", "wine"]

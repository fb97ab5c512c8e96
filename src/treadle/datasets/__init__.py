"""Small data sets: arrays of digits and wines, a text (all shipped), MNIST and CIFAR-10."""

from .loaders import Arrays, Table, alice, cifar10, digits, mnist, wine

__all__ = ["Arrays", "Table", "alice", "cifar10", "digits", "mnist", "wine"]

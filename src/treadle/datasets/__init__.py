"""Small data sets as NumPy arrays: digits (shipped with the package), MNIST and CIFAR-10."""

from .loaders import Arrays, cifar10, digits, mnist

__all__ = ["Arrays", "cifar10", "digits", "mnist"]

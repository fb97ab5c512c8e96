"""Import everything that commands use, before they run in forks."""

import importlib


def import_all() -> None:
    """Import Keras, PyTorch and the modules of all commands, and run nothing in threads."""
    import torch

    torch.set_num_threads(1)
    for name in ("treadle.cli", "treadle.loop", "treadle.doctor", "treadle.checkpoint"):
        importlib.import_module(name)
    for name in ("matplotlib.figure", "matplotlib.backends.backend_agg", "treadle.hooks"):
        importlib.import_module(name)
    import treadle

    for name in treadle.__all__:
        getattr(treadle, name)

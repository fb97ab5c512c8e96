"""Hyperparameter search: train a task many times, with settings suggested by earlier trials.

- `space` defines the search space, `suggestions` chooses the settings of the next trial (with
  Optuna), `study` hands out trials and records them, `storage` is the directory with the database,
  `workers` manages the worker processes, and `trial` trains one trial.
- A trial is an ordinary run in its own directory: `treadle evaluate`, `replay` and `resume` work on
  it. A search is resumed from the database and these directories; nothing else is needed.
- Only the main process opens the database (`storage` says why). Worker processes report to it
  through pipes, in lines of JSON. Nothing is pickled.
"""

from .results import Trial, Tuned
from .search import tune

__all__ = ["Trial", "Tuned", "tune"]

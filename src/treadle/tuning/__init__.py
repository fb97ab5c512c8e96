"""Hyperparameter search: train a task many times, with settings suggested by earlier trials.

- `space` defines the search space, `study` suggests settings and stores the trials (with Optuna, in
  a database), `workers` manages the worker processes, and `trial` trains one trial.
- A trial is an ordinary run in its own directory: `treadle evaluate`, `replay` and `resume` work on
  it. A search is resumed from the database and these directories; nothing else is needed.
- Only the main process opens the database. Worker processes report to it through pipes, in lines of
  JSON. Nothing is pickled.
"""

from .results import Trial, Tuned
from .search import tune

__all__ = ["Trial", "Tuned", "tune"]

"""Which settings of a task are best: many runs of it, each with what the ones before suggest.

- `space` is what is tried, `study` which settings come next and what is kept of them (Optuna, in a
  database), `workers` are the processes that try them, and `trial` is how one is tried.
- A trial is a run like any other, in a directory of its own: `treadle evaluate`, `replay` and
  `resume` take it. With the database, these directories are all that is needed to go on.
- Only the process that was started opens the database; those that train tell it how they stand
  through pipes, in lines of JSON. Nothing is pickled.
"""

from .results import Trial, Tuned
from .search import tune

__all__ = ["Trial", "Tuned", "tune"]

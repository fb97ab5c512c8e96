"""Settings of the next trial, suggested by Optuna from the earlier trials.

Each trial gets a new sampler, which is seeded by the number of the trial and sees only the earlier
trials. So a resumed search suggests the same settings as one that was never interrupted.
"""

import copy
import hashlib
import math
from collections.abc import Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

from ..core.ranges import Choice, Space
from .orders import Configuration
from .storage import quiet

if TYPE_CHECKING:
    import optuna
    from optuna.trial import FrozenTrial

STARTUP = 10
"""Number of random trials before the sampler suggests settings; Optuna's default."""
LISTED = 1_000
"""Maximum number of combinations that are listed, so that none is tried twice. In larger spaces
duplicates are rare."""


def next_settings(configuration: Configuration, trials: "Sequence[FrozenTrial]") -> dict[str, Any]:
    """Return the searched settings of the trial after those given, by name."""
    if not trials and configuration.defaults:
        return dict(configuration.defaults)
    import optuna

    text = f"{configuration.order.seed or 0}/{len(trials)}"
    seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4])
    sampler = optuna.samplers.TPESampler(
        seed=seed, n_startup_trials=STARTUP, multivariate=True, constant_liar=True
    )
    # A copy of the study in memory: in the database, a trial would get one setting after another,
    # and the process could be killed in between.
    with quiet():
        known = optuna.create_study(direction=configuration.objective, sampler=sampler)
    known.add_trials([_for_sampler(trial) for trial in trials])
    suggested = known.ask()
    suggest(suggested, configuration.spaces)
    left = untried(configuration.spaces, trials)
    if left and suggested.params not in left:
        return left[seed % len(left)]
    return suggested.params


def suggest(trial: "optuna.Trial", spaces: Mapping[str, Space]) -> None:
    """Let a trial of Optuna suggest a value for each setting, which it records."""
    for name, space in spaces.items():
        if isinstance(space, Choice):
            trial.suggest_categorical(name, space.values)
        elif space.whole:
            low, high, step = int(space.low), int(space.last), int(space.step or 1)
            trial.suggest_int(name, low, high, step=step, log=space.log)
        else:
            trial.suggest_float(name, space.low, space.last, step=space.step, log=space.log)


def untried(
    spaces: Mapping[str, Space], trials: "Sequence[FrozenTrial]"
) -> list[dict[str, Any]] | None:
    """Return the combinations that were not tried; None if there are too many to list."""
    listed = [_values(space) for space in spaces.values()]
    sizes = [len(values) if values is not None else LISTED + 1 for values in listed]
    if math.prod(sizes) > LISTED:
        return None
    tried = [trial.params for trial in trials]
    rows = product(*filter(None, listed))
    every = (dict(zip(spaces, row, strict=True)) for row in rows)
    return [parameters for parameters in every if parameters not in tried]


def _values(space: Space) -> list[Any] | None:
    """Return the values of a choice or a range of whole numbers; None if there are too many."""
    if isinstance(space, Choice):
        return list(space.values)
    if not space.whole or (space.last - space.low) / (space.step or 1) >= LISTED:
        return None
    return list(range(int(space.low), int(space.last) + 1, int(space.step or 1)))


def _for_sampler(trial: "FrozenTrial") -> "FrozenTrial":
    """Return a trial in the form that is passed to the sampler.

    Optuna's sampler ranks pruned trials by their number of reports and then by their last value, so
    a trial that diverged late would rank among the best of them. Without reported values it ranks
    last.
    """
    if trial.user_attrs.get("outcome", {}).get("ended") != "diverged":
        return trial
    seen = copy.copy(trial)
    seen.intermediate_values = {}
    return seen

"""Renamed settings of recipes, so that runs recorded under the earlier names can be resumed."""

from collections.abc import Mapping
from typing import Any, Final

RENAMED: Final[Mapping[str, Mapping[str, str]]] = {
    "treadle.recipes.actor_critic": {
        "actor_rate": "actor_learning_rate",
        "critic_rate": "critic_learning_rate",
        "trace": "gae_lambda",
        "entropy": "entropy_coefficient",
        "moves": "rollout_steps",
    },
    "treadle.recipes.char_lm": {
        "length": "context_length",
        "updates": "decay_updates",
        "warm_up": "warmup_updates",
        "clip": "clip_norm",
        "accumulate": "accumulation_steps",
    },
    "treadle.recipes.custom_gradients": {"noise": "noise_variance"},
    "treadle.recipes.distillation": {"trust": "distillation_weight"},
    "treadle.recipes.dqn": {
        "follow": "target_update_rate",
        "trying_ends": "epsilon_end",
        "trying_steps": "epsilon_decay_steps",
    },
    "treadle.recipes.maml": {"inner_rate": "inner_learning_rate"},
    "treadle.recipes.self_supervised": {
        "projected": "projection_size",
        "smallest": "min_crop_size",
        "erased": "erase_size",
    },
    "treadle.recipes.teacher_forcing": {
        "truth_begins": "teacher_forcing_start",
        "truth_ends": "teacher_forcing_end",
    },
    "treadle.recipes.vae": {"code": "latent_size"},
    "treadle.recipes.wgan_gp": {"penalty": "penalty_weight"},
}
"""Current names by earlier names, by the module of the recipe."""


def with_current_names(configuration: Mapping[str, Any], module: str | None) -> dict[str, Any]:
    """Return a recorded configuration with the current names of its settings.

    Args:
        configuration: The configuration in a `run.json`.
        module: The module that defines the task's class; None if it does not come with Treadle.

    Example:
        >>> old = {"recipe": "vae", "settings": {"code": 8, "units": 64}}
        >>> with_current_names(old, "treadle.recipes.vae")["settings"]
        {'latent_size': 8, 'units': 64}
    """
    names = RENAMED.get(module or "", {})
    settings = configuration.get("settings")
    if not names or not isinstance(settings, Mapping):
        return dict(configuration)
    return {**configuration, "settings": {names.get(k, k): v for k, v in settings.items()}}

"""Search the settings of task.py with Ray Tune: python ray_tune.py DIRECTORY [BACKEND].

Each trial is a run in a folder of DIRECTORY, an absolute path on a disk that all machines share. If
its process is lost, Ray starts the trial again, and the run resumes.
"""

import os
import sys
from pathlib import Path

import ray
from ray import tune
from ray.tune.schedulers import ASHAScheduler
from ray.tune.search import BasicVariantGenerator

import treadle


class Report(treadle.Hook):
    """Reports the values of each epoch to Ray, whose scheduler may then stop the trial."""

    def record(self, loop, record):
        if record.kind == "epoch":
            tune.report({"epoch": loop.progress.epoch + 1, **record.values})


def trial(settings):
    """Train with some settings."""
    from task import train  # of the working directory that Ray copies to each machine

    directory = settings.pop("directory")
    train(f"{directory}/{tune.get_context().get_trial_id()}", hooks=[Report()], **settings)


def main(directory, backend="torch"):
    """Run eight trials, and print the best settings."""
    files = {"working_dir": str(Path(__file__).parent), "excludes": ["runs"]}  # to each machine
    ray.init(runtime_env={**files, "env_vars": {"KERAS_BACKEND": backend}})
    space = {"units": tune.choice([16, 32, 64]), "learning_rate": tune.loguniform(1e-3, 1e-1)}
    found = tune.Tuner(
        trial,  # with a GPU each: tune.with_resources(trial, {"gpu": 1})
        param_space={"directory": os.path.abspath(directory), **space},
        tune_config=tune.TuneConfig(
            num_samples=8,
            search_alg=BasicVariantGenerator(random_state=0),
            scheduler=ASHAScheduler("epoch", "val_loss", "min", grace_period=2),
        ),
        run_config=tune.RunConfig(
            storage_path=os.path.abspath(directory) + "-ray",  # of Ray's own records
            failure_config=tune.FailureConfig(max_failures=10),
        ),
    ).fit()
    best = found.get_best_result("val_loss", "min")
    print("best:", best.metrics["val_loss"], {name: best.config[name] for name in space})


if __name__ == "__main__":
    main(*sys.argv[1:])

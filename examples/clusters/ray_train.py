"""Train task.py with Ray Train: python ray_train.py DIRECTORY [BACKEND].

Ray starts the processes, and starts all of them again if one is lost. The run then resumes from
DIRECTORY, an absolute path on a disk that all machines of the cluster share. WORKERS=4 starts four.
"""

import importlib
import os
import sys
from pathlib import Path

import ray
import ray.train

import treadle

TRAINERS = {
    "torch": ("ray.train.torch", "TorchTrainer"),
    "tensorflow": ("ray.train.tensorflow", "TensorflowTrainer"),
    "jax": ("ray.train.v2.jax", "JaxTrainer"),
}


class Report(treadle.Hook):
    """Reports the values of each epoch to Ray, in every process, as Ray requires."""

    def record(self, loop, record):
        if record.kind == "epoch":
            ray.train.report({"epoch": loop.progress.epoch + 1, **record.values})


def worker(config):
    """Train in one of the processes."""
    from task import train  # of the working directory that Ray copies to each machine

    train(config["directory"], hooks=[Report()])


def main(directory, backend="torch"):
    """Start the processes, and print the last values that they reported."""
    files = {"working_dir": str(Path(__file__).parent), "excludes": ["runs"]}  # to each machine
    ray.init(runtime_env={**files, "env_vars": {"KERAS_BACKEND": backend}})
    module, name = TRAINERS[backend]
    trainer = getattr(importlib.import_module(module), name)(
        worker,
        train_loop_config={"directory": os.path.abspath(directory)},
        # With use_gpu=True each worker gets a GPU: otherwise Ray hides them all.
        scaling_config=ray.train.ScalingConfig(num_workers=int(os.environ.get("WORKERS", "2"))),
        run_config=ray.train.RunConfig(
            storage_path=os.path.abspath(directory) + "-ray",  # of Ray's own records
            failure_config=ray.train.FailureConfig(max_failures=10),
        ),
    )
    print(trainer.fit().metrics)


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Knowledge distillation: a student network with a teacher, and a control student without one.

The method is that of Hinton, Vinyals & Dean 2015 (https://arxiv.org/abs/1503.02531). The teacher is
trained on all digits during the first steps and then frozen; `treadle.cond` switches from teacher
training to distillation. The students see only one digit in a hundred, so the teacher's soft
targets carry more information than the labels (section 6 of the paper). Both students start from
the same weights and see the same batches: the difference in accuracy is the effect of the teacher.
"""

from typing import Any

import keras
import numpy as np
from keras import layers, ops

import treadle
from treadle import data, datasets


class Distillation(treadle.Task):
    """Distill a large MNIST classifier into a small one, compared with training on labels only.

    Args:
        units: Width of the students' hidden layer.
        temperature: Softmax temperature of the distillation loss.
        distillation_weight: Weight of the distillation loss, from 0 (labels only) to 1 (teacher
            only).
        examples: Number of training digits of the students.
        teacher_steps: Steps in which the teacher is trained, before the students.
        learning_rate: Learning rate of Adam, for all three networks.
        batch_size: The teacher's examples per step; the students get a quarter of it.
    """

    epochs = 12

    def __init__(
        self,
        units: int = 32,
        temperature: float = 4.0,
        distillation_weight: float = 0.9,
        examples: int = 600,
        teacher_steps: int = 2345,
        learning_rate: float = 1e-3,
        batch_size: int = 128,
    ) -> None:
        self.teacher = keras.Sequential(
            [
                keras.Input((784,)),
                layers.Dropout(0.2),
                layers.Dense(512, activation="relu"),
                layers.Dropout(0.5),
                layers.Dense(512, activation="relu"),
                layers.Dropout(0.5),
                layers.Dense(10),
            ]
        )
        self.student, self.alone = student(units), student(units)
        self.alone.set_weights(self.student.get_weights())
        self.optimizers = {
            name: keras.optimizers.Adam(learning_rate) for name in ("teacher", "student", "alone")
        }
        self.cross_entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self.metrics = {
            f"{name}_accuracy": keras.metrics.SparseCategoricalAccuracy()
            for name in ("teacher", "student", "alone")
        }
        self.temperature, self.distillation_weight = temperature, distillation_weight
        self.examples, self.teacher_steps, self.batch_size = examples, teacher_steps, batch_size

    def train_step(self, batch: Any) -> dict[str, Any]:
        """Train the teacher in the first `teacher_steps` steps, and the students afterwards."""
        teacher_batch, student_batch = batch
        distilling = treadle.step() >= self.teacher_steps
        loss = treadle.cond(
            distilling,
            lambda: self.train_students(*student_batch),
            lambda: self.train_teacher(*teacher_batch),
        )
        # Each loss is averaged only over the steps that minimized it.
        weight = ops.cast(distilling, "float32")
        return {
            "teacher_loss": treadle.weighted(loss, 1 - weight),
            "student_loss": treadle.weighted(loss, weight),
        }

    def train_teacher(self, x: Any, y: Any) -> Any:
        """Train the teacher on labels."""
        return treadle.minimize(
            lambda: self.cross_entropy(y, self.teacher(x, training=True)),
            self.teacher,
            self.optimizers["teacher"],
        )

    def train_students(self, x: Any, y: Any) -> Any:
        """Train one student on teacher and labels, and the other on labels only."""
        soft_targets = ops.softmax(self.teacher(x, training=False) / self.temperature)

        def objective() -> Any:
            logits = self.student(x, training=True)
            log_probabilities = ops.log_softmax(logits / self.temperature)
            soft_loss = -ops.mean(ops.sum(soft_targets * log_probabilities, axis=-1))
            # Gradients scale with 1 / temperature²; this keeps the balance with the label loss.
            soft_loss = soft_loss * self.temperature**2
            hard_loss, weight = self.cross_entropy(y, logits), self.distillation_weight
            return weight * soft_loss + (1 - weight) * hard_loss

        treadle.minimize(
            lambda: self.cross_entropy(y, self.alone(x, training=True)),
            self.alone,
            self.optimizers["alone"],
        )
        return treadle.minimize(objective, self.student, self.optimizers["student"])

    def eval_step(self, batch: Any) -> None:
        """Measure the accuracy of all three networks."""
        x, y = batch
        for name in self.optimizers:
            self.metrics[f"{name}_accuracy"].update_state(y, getattr(self, name)(x, training=False))

    def datasets(self) -> treadle.Datasets:
        """Return MNIST as rows of 784 numbers from 0 to 1: batches for teacher and students."""
        mnist = datasets.mnist()
        train, test = (
            x.reshape(-1, 784).astype("float32") / 255 for x in (mnist.x_train, mnist.x_test)
        )
        batches = -(-len(train) // self.batch_size)
        student_batch_size = max(1, self.batch_size // 4)
        rows = np.arange(batches * student_batch_size) % self.examples
        return treadle.Datasets(
            train=data.zipped(
                data.from_arrays(train, mnist.y_train, batch_size=self.batch_size),
                data.from_arrays(train[rows], mnist.y_train[rows], batch_size=student_batch_size),
            ),
            validation=data.from_arrays(
                test, mnist.y_test, batch_size=self.batch_size, shuffle=False
            ),
        )


def student(units: int) -> Any:
    """Return a network with one small hidden layer."""
    return keras.Sequential(
        [keras.Input((784,)), layers.Dense(units, activation="relu"), layers.Dense(10)]
    )

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
        trust: Weight of the distillation loss, from 0 (labels only) to 1 (teacher only).
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
        trust: float = 0.9,
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
        self.student, self.alone = small(units), small(units)
        self.alone.set_weights(self.student.get_weights())
        self.optimizers = {
            name: keras.optimizers.Adam(learning_rate) for name in ("teacher", "student", "alone")
        }
        self.cross_entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self.metrics = {
            f"{name}_accuracy": keras.metrics.SparseCategoricalAccuracy()
            for name in ("teacher", "student", "alone")
        }
        self.temperature, self.trust = temperature, trust
        self.examples, self.teacher_steps, self.batch_size = examples, teacher_steps, batch_size

    def train_step(self, batch: Any) -> dict[str, Any]:
        """Train the teacher in the first `teacher_steps` steps, and the students afterwards."""
        all_digits, few = batch
        taught = treadle.step() >= self.teacher_steps
        loss = treadle.cond(taught, lambda: self.distil(*few), lambda: self.teach(*all_digits))
        counts = ops.cast(taught, "float32")
        return {
            "teacher_loss": treadle.weighted(loss, 1 - counts),
            "student_loss": treadle.weighted(loss, counts),
        }

    def teach(self, x: Any, y: Any) -> Any:
        """Train the teacher on labels."""
        return treadle.minimize(
            lambda: self.cross_entropy(y, self.teacher(x, training=True)),
            self.teacher,
            self.optimizers["teacher"],
        )

    def distil(self, x: Any, y: Any) -> Any:
        """Train one student on teacher and labels, and the other on labels only."""
        soft = ops.softmax(self.teacher(x, training=False) / self.temperature)

        def objective() -> Any:
            logits = self.student(x, training=True)
            likeness = ops.sum(soft * ops.log_softmax(logits / self.temperature), axis=-1)
            # Gradients scale with 1 / temperature²; this keeps the balance with the label loss.
            from_teacher = -ops.mean(likeness) * self.temperature**2
            from_labels = self.cross_entropy(y, logits)
            return self.trust * from_teacher + (1 - self.trust) * from_labels

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
        batches, part = -(-len(train) // self.batch_size), max(1, self.batch_size // 4)
        few = np.arange(batches * part) % self.examples
        return treadle.Datasets(
            train=data.zipped(
                data.from_arrays(train, mnist.y_train, batch_size=self.batch_size),
                data.from_arrays(train[few], mnist.y_train[few], batch_size=part),
            ),
            validation=data.from_arrays(
                test, mnist.y_test, batch_size=self.batch_size, shuffle=False
            ),
        )


def small(units: int) -> Any:
    """Return a network with one small hidden layer."""
    return keras.Sequential(
        [keras.Input((784,)), layers.Dense(units, activation="relu"), layers.Dense(10)]
    )

"""What each recipe must show, and how that is read off its log."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from treadle.hooks.log_file import read_log

Settings = tuple[str, ...]
PLAIN = ""  # the name of the run with the recipe's own settings


class Run:
    """What a run of a recipe has left in its directory.

    Attributes:
        directory: The directory.
        seconds: How long the command took.
    """

    def __init__(self, directory: Path, seconds: float) -> None:
        self.directory, self.seconds = directory, seconds
        self._steps, self._records = read_log(directory / "log.jsonl")

    def steps(self, name: str) -> list[float]:
        """Return what each step returned as this."""
        return [line[name] for line in self._steps if name in line]

    def each(self, name: str) -> list[Any]:
        """Return what the records of epochs, and those of hooks, hold as this."""
        kinds = ("epoch", "log")
        return [line[name] for line in self._records if line["kind"] in kinds and name in line]

    def last(self) -> dict[str, float]:
        """Return the newest number under every name."""
        own = ("kind", "epoch", "step", "seconds")
        return {
            name: value
            for line in self._records
            for name, value in line.items()
            if name not in own and isinstance(value, (int, float))
        }

    def picture(self, name: str) -> Path:
        """Return the file of the newest picture of a name."""
        return self.directory / self.each(name)[-1]


Verdict = tuple[bool | None, str]
Judge = Callable[[Mapping[str, Run]], Verdict]


@dataclass(frozen=True)
class Program:
    """A recipe, and what it must show.

    Attributes:
        must: That, in words.
        judge: Given the runs by name, says whether it was shown, and what was measured.
        others: Runs with other settings than the plain one, by name.
        pictures: Names of logged pictures to be shown.
        backend: What it runs on by default.
    """

    must: str
    judge: Judge
    others: Mapping[str, Settings] = field(default_factory=dict[str, Settings])
    pictures: tuple[str, ...] = ()
    backend: str = "tensorflow"

    @property
    def runs(self) -> dict[str, Settings]:
        """Settings of all runs, by name."""
        return {PLAIN: (), **self.others}


def unknown() -> Program:
    """Return what stands for a recipe that is not in the table."""
    return by_test("")


def by_test(must: str) -> Program:
    """Return what stands for a recipe whose numbers a test holds, and no run."""
    return Program(must, lambda runs: (None, told(runs[PLAIN].last())))


def told(values: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in values.items())


def linear(runs: Mapping[str, Run]) -> Verdict:
    loss, last = runs[PLAIN].steps("loss"), runs[PLAIN].last()
    three, seven = last["prediction_of_3"], last["prediction_of_7"]
    shown = loss[-1] < 0.01 * loss[0] and abs(three - 3) < 0.3 and abs(seven - 7) < 0.3
    return shown, f"loss {loss[-1] / loss[0]:.4f} times its start; {three:.2f} and {seven:.2f}"


def accuracy(least: float, most: float = 1.0) -> Judge:
    def judge(runs: Mapping[str, Run]) -> Verdict:
        found = runs[PLAIN].each("val_accuracy")[-1]
        return least < found <= most, f"validation accuracy {found:.1%}"

    return judge


def wide_start(runs: Mapping[str, Run]) -> Verdict:
    loss, found = runs[PLAIN].each("loss"), runs[PLAIN].each("val_accuracy")[-1]
    # Weights from normal(0, 1): where it begins differs by as much from seed to seed.
    shown = abs(loss[0] - 17) < 17 / 4 and 0.6 < loss[-1] < 1.0 and found > 0.91
    return shown, f"training loss {loss[0]:.1f} → {loss[-1]:.2f}, validation accuracy {found:.1%}"


def cifar10(runs: Mapping[str, Run]) -> Verdict:
    run = runs[PLAIN]
    loss, trained, test = run.each("loss"), run.each("accuracy"), run.each("val_accuracy")
    shown = abs(trained[-1] - 0.760) < 0.015 and abs(test[-1] - 0.697) < 0.015
    return shown, (
        f"training loss {loss[0]:.3f} → {loss[-1]:.3f}, training accuracy {trained[0]:.1%} → "
        f"{trained[-1]:.1%}, test {test[-1]:.1%}"
    )


def penalty(runs: Mapping[str, Run]) -> Verdict:
    found = runs[PLAIN].each("regularization")
    shown = 0 < found[-1] < found[0]
    return shown, f"regularization {found[0]:.2f} → {found[-1]:.2f}, on a line of its own"


def gan(runs: Mapping[str, Run]) -> Verdict:
    run = runs[PLAIN]
    d, g, grids = run.each("d_loss"), run.each("g_loss"), run.each("samples")
    return len(d) == len(g) == len(grids), (
        f"d_loss {d[0]:.2f} → {d[-1]:.2f}, g_loss {g[0]:.2f} → {g[-1]:.2f}, {len(grids)} grids; "
        "the picture is below"
    )


def wasserstein(runs: Mapping[str, Run]) -> Verdict:
    run = runs[PLAIN]
    distance, norm, penalty = (
        run.each(name) for name in ("wasserstein", "gradient_norm", "gradient_penalty")
    )
    shown = distance[-1] < 0.5 * max(distance) and abs(norm[-1] - 1) < 0.1 and penalty[-1] < 0.1
    return shown, (
        f"estimate {max(distance):.2f} → {distance[-1]:.2f}, mean gradient norm {norm[-1]:.3f} "
        f"(target 1), penalty {penalty[-1]:.4f} (target 0)"
    )


def elbo(runs: Mapping[str, Run]) -> Verdict:
    found = runs[PLAIN].each("val_elbo")
    return found[-1] > found[0], f"ELBO on test digits {found[0]:.1f} → {found[-1]:.1f} nats"


def student(runs: Mapping[str, Run]) -> Verdict:
    names = ("student", "alone", "teacher")
    ours, alone, teacher = (runs[PLAIN].each(f"val_{name}_accuracy")[-1] for name in names)
    return ours > alone, f"student {ours:.2%}, alone {alone:.2%}, teacher {teacher:.2%}"


def robust(runs: Mapping[str, Run]) -> Verdict:
    names = ("robust_attacked", "plain_attacked", "robust_clean", "plain_clean")
    robust, plain, *clean = (runs[PLAIN].each(f"val_{name}")[-1] for name in names)
    return robust > plain + 0.5, (
        f"attacked: {robust:.1%}, the plain one {plain:.1%}; not attacked: {clean[0]:.1%} and "
        f"{clean[1]:.1%}"
    )


def translated(runs: Mapping[str, Run]) -> Verdict:
    exact = {name: run.each("val_exact_match")[-1] for name, run in runs.items()}
    ours = exact.pop(PLAIN)
    others = "; ".join(f"{name} {value:.1%}" for name, value in exact.items())
    return ours > 0.95 and ours > exact["no forcing"], f"exact match {ours:.1%}; {others}"


def bits(runs: Mapping[str, Run]) -> Verdict:
    trained, found = (runs[PLAIN].each(f"{name}bits_per_character") for name in ("", "val_"))
    return trained[-1] < trained[0] and found[-1] < found[0] and found[-1] < 3.0, (
        f"bits per character on the end of the book {found[0]:.2f} → {found[-1]:.2f}, on what it "
        f"learns from {trained[0]:.2f} → {trained[-1]:.2f}"
    )


def rare(runs: Mapping[str, Run]) -> Verdict:
    ours = runs[PLAIN]
    best, final = max(ours.each("val_balanced_accuracy")), ours.each("final_balanced_accuracy")[-1]
    plain = runs["unweighted"].each("test_balanced_accuracy")[-1]
    found, recall = (ours.each(f"test_{name}")[-1] for name in ("balanced_accuracy", "recall"))
    epochs = len(ours.each("val_balanced_accuracy"))
    return abs(best - final) < 1e-6 and found > plain + 0.1, (
        f"best validation {best:.1%}, that of the weights left after {epochs} epochs {final:.1%}; "
        f"test {found:.1%}, recall of the rare {recall:.1%}; unweighted {plain:.1%}, recall "
        f"{runs['unweighted'].each('test_recall')[-1]:.1%}"
    )


def probes(runs: Mapping[str, Run]) -> Verdict:
    pixels, untrained, probe = (
        runs[PLAIN].each(name)[-1]
        for name in ("pixels_accuracy", "untrained_accuracy", "probe_accuracy")
    )
    return probe > pixels + 0.03 and probe > untrained + 0.03, (
        f"1,000 labels: features {probe:.1%}, raw pixels {pixels:.1%}, features of the untrained "
        f"encoder {untrained:.1%}"
    )


def adapts(runs: Mapping[str, Run]) -> Verdict:
    """Errors of new curves before any gradient step on them, and after 1, 5 and 10."""
    errors = {
        name: [run.each(f"val_error_{steps}")[-1] for steps in (0, 1, 5, 10)]
        for name, run in runs.items()
    }
    before, one, five, ten = errors[PLAIN]
    alike = errors["trained on all curves alike"]
    shown = (
        one < before / 4
        and ten <= five < one
        and five < 0.5
        and one < alike[1] / 3
        and five < alike[2] / 3
        and errors["first order"][1] < errors["first order"][0] / 3
    )
    lines = {
        name or "MAML": " → ".join(f"{e:.2f}" for e in found) for name, found in errors.items()
    }
    return shown, "error " + "; ".join(f"{name} {line}" for name, line in lines.items())


def balanced(runs: Mapping[str, Run]) -> Verdict:
    """A return is logged as the mean over 100 consecutive episodes."""
    found = runs[PLAIN].each("return")
    return max(found) > 195, (
        f"mean return over 100 episodes {found[0]:.0f} → {found[-1]:.0f}, at most {max(found):.0f}"
    )


WIDE = "mean training loss from about 17 to about 0.8, validation accuracy about 92 %"
BALANCED = "mean return above 195 over 100 consecutive episodes of CartPole"
LINE = "loss below 0.01 times its start, predictions near 3 and 7"

PROGRAMS: dict[str, Program] = {
    "linear": Program(LINE, linear),
    "linear-native": Program(LINE, linear),
    "digits": Program("above 96 % on held-out rows", accuracy(0.96)),
    "mnist-functional": Program(
        "about 63 % validation accuracy after 2 epochs, as [a hand-written loop](results.md); six "
        "points more or less from start to start: 60 to 72 %",
        accuracy(0.60, 0.72),
    ),
    "mnist-mlp": Program(WIDE, wide_start),
    "mnist-mlp-native": Program(WIDE, wide_start),
    "cifar10-cnn": Program(
        "76.0 % training and 69.7 % test accuracy within 1.5 points, as [a hand-written "
        "loop](results.md)",
        cifar10,
    ),
    "activity-regularization": Program("the penalty is logged, and falls", penalty),
    "whole-loop": by_test("the same numbers as step by step (a test)"),
    "custom-gradients": by_test("the same step on every backend, each gradient's norm logged"),
    "custom-optimizer": by_test("Lion and SAM as in their papers, by hand on numbers (tests)"),
    "cyclic-lr": by_test("the rates of the papers, by hand on numbers (tests); plots"),
    "mnist-gan": Program(
        "both losses logged, a grid of samples per epoch, digits to a person",
        gan,
        pictures=("samples",),
    ),
    "wgan-gp": Program(
        "the Wasserstein estimate falls, the penalty is near its target",
        wasserstein,
        pictures=("samples",),
    ),
    "vae": Program("the ELBO improves; a grid of samples", elbo, pictures=("samples",)),
    "distillation": Program("the student beats the same student alone", student),
    "adversarial-training": Program(
        "robust accuracy far above the plain model's (here: by 50 points)", robust
    ),
    "teacher-forcing": Program(
        "free-running exact match above 95 %, more than without teacher forcing at equal steps",
        translated,
        others={
            "no forcing": ("teacher_forcing_start=0", "teacher_forcing_end=0"),
            "forcing to the end": ("teacher_forcing_start=1", "teacher_forcing_end=1"),
        },
        backend="jax",
    ),
    "char-lm": Program(
        "bits per character fall, also on a part of the book that it never saw", bits
    ),
    "tabular": Program(
        "the weights it leaves are the best; balanced accuracy on rare wines far above the "
        "unweighted model's (here: by 10 points)",
        rare,
        others={"unweighted": ("weighted=false",)},
    ),
    "self-supervised": Program(
        "a linear probe on frozen features beats one on raw pixels (here: by 3 points)", probes
    ),
    "maml": Program(
        "error on new curves before, and after 1, 5 and 10 gradient steps: a quarter after the "
        "first one, as in figure 3 of the paper, and below a third of that of a network trained on "
        "all curves alike",
        adapts,
        others={
            "first order": ("first_order=true",),
            "trained on all curves alike": ("inner_steps=0",),
        },
        pictures=("curve",),
    ),
    "reinforce": Program(BALANCED, balanced),
    "actor-critic": Program(BALANCED, balanced),
    "dqn": Program(BALANCED, balanced),
}

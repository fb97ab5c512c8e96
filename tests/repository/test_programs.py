"""The benchmark of the recipes: its judgements, its page, and a run."""

import json
from pathlib import Path
from types import SimpleNamespace

import keras
import pytest

from benchmarks import programs
from benchmarks.programs_musts import PLAIN, PROGRAMS, Run
from treadle.recipes import find


def run_of(folder: Path, epochs: list[dict], steps: list[dict] | None = None) -> Run:
    folder.mkdir(exist_ok=True)
    lines = [{"step": i, **values} for i, values in enumerate(steps or [], start=1)]
    for number, values in enumerate(epochs, start=1):
        head = {"kind": "epoch", "epoch": number, "step": 10 * number, "seconds": 1.0}
        lines.append(head | values)
    (folder / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return Run(folder, 1.0)


STARTS = {
    "wgan-gp": {"wasserstein": 8.0, "gradient_norm": 1.3, "gradient_penalty": 0.3},
    "vae": {"val_elbo": -130.0},
    "activity-regularization": {"regularization": 4.0},
    "mnist-mlp": {"loss": 17.1, "val_accuracy": 0.8},
    "mnist-gan": {"d_loss": 1.3, "g_loss": 0.8, "samples": "images/samples-10.png"},
    "cifar10-cnn": {"loss": 1.6, "accuracy": 0.4, "val_accuracy": 0.5},
    "char-lm": {"bits_per_character": 4.0, "val_bits_per_character": 3.5},
    "self-supervised": {"pixels_accuracy": 0.86, "untrained_accuracy": 0.8, "probe_accuracy": 0.8},
    **{name: {"return": 20.0} for name in ("reinforce", "actor-critic", "dqn")},
}
ENDS = [
    ("digits", {"val_accuracy": 0.97}, {"val_accuracy": 0.96}, "validation accuracy 97.0%"),
    ("mnist-functional", {"val_accuracy": 0.64}, {"val_accuracy": 0.9}, "accuracy 64.0%"),
    (
        "mnist-mlp",
        {"loss": 0.81, "val_accuracy": 0.925},
        {"loss": 0.81, "val_accuracy": 0.9},
        "training loss 17.1 → 0.81, validation accuracy 92.5%",
    ),
    (
        "cifar10-cnn",
        {"loss": 0.7, "accuracy": 0.75, "val_accuracy": 0.7},
        {"loss": 0.7, "accuracy": 0.7, "val_accuracy": 0.7},
        "training accuracy 40.0% → 75.0%, test 70.0%",
    ),
    (
        "activity-regularization",
        {"regularization": 1.0},
        {"regularization": 5.0},
        "regularization 4.00 → 1.00",
    ),
    (
        "mnist-gan",
        {"d_loss": 1.0, "g_loss": 1.1, "samples": "images/samples-20.png"},
        {"d_loss": 1.0, "g_loss": 1.1},
        "d_loss 1.30 → 1.00, g_loss 0.80 → 1.10, 2 grids",
    ),
    (
        "wgan-gp",
        {"wasserstein": 2.0, "gradient_norm": 1.01, "gradient_penalty": 0.02},
        {"wasserstein": 2.0, "gradient_norm": 1.3, "gradient_penalty": 0.02},
        "estimate 8.00 → 2.00, mean gradient norm 1.010",
    ),
    ("vae", {"val_elbo": -105.0}, {"val_elbo": -140.0}, "-130.0 → -105.0 nats"),
    (
        "distillation",
        {"val_student_accuracy": 0.97, "val_alone_accuracy": 0.96, "val_teacher_accuracy": 0.98},
        {"val_student_accuracy": 0.96, "val_alone_accuracy": 0.96, "val_teacher_accuracy": 0.98},
        "student 97.00%, alone 96.00%, teacher 98.00%",
    ),
    (
        "adversarial-training",
        {
            "val_robust_attacked": 0.9,
            "val_plain_attacked": 0.1,
            "val_robust_clean": 0.97,
            "val_plain_clean": 0.98,
        },
        {
            "val_robust_attacked": 0.5,
            "val_plain_attacked": 0.1,
            "val_robust_clean": 0.97,
            "val_plain_clean": 0.98,
        },
        "attacked: 90.0%, the plain one 10.0%; not attacked: 97.0% and 98.0%",
    ),
    (
        "char-lm",
        {"bits_per_character": 1.6, "val_bits_per_character": 2.1},
        {"bits_per_character": 1.6, "val_bits_per_character": 3.6},
        "on the end of the book 3.50 → 2.10, on what it learns from 4.00 → 1.60",
    ),
    (
        "self-supervised",
        {"probe_accuracy": 0.91},
        {"probe_accuracy": 0.87},
        "features 91.0%, raw pixels 86.0%, features of the untrained encoder 80.0%",
    ),
    *(
        (name, {"return": 475.0}, {"return": 194.0}, "mean return over 100 episodes 20 → 475, at")
        for name in ("reinforce", "actor-critic", "dqn")
    ),
]


@pytest.mark.parametrize(("name", "good", "bad", "text"), ENDS, ids=[end[0] for end in ENDS])
def test_a_program_is_judged_by_its_log(name, good, bad, text, tmp_path):
    begin = STARTS.get(name, {})
    shown, told = PROGRAMS[name].judge({PLAIN: run_of(tmp_path / "good", [begin, good])})
    assert shown is True
    assert text in told
    assert PROGRAMS[name].judge({PLAIN: run_of(tmp_path / "bad", [begin, bad])})[0] is False


def test_teacher_forcing_is_compared_with_its_absence(tmp_path):
    def runs(**exact):
        names = {PLAIN: "plain", "no forcing": "none", "forcing to the end": "all"}
        return {
            name: run_of(tmp_path / short, [{"val_exact_match": exact[short]}])
            for name, short in names.items()
        }

    program = PROGRAMS["teacher-forcing"]
    assert set(program.runs) == set(runs(plain=1, none=1, all=1))
    shown, told = program.judge(runs(plain=0.97, none=0.5, all=0.9))
    assert shown is True
    assert told == "exact match 97.0%; no forcing 50.0%; forcing to the end 90.0%"
    assert program.judge(runs(plain=0.94, none=0.5, all=0.9))[0] is False
    assert program.judge(runs(plain=0.97, none=0.98, all=0.9))[0] is False


def test_rare_wines_are_judged_by_the_weights_that_are_left(tmp_path):
    def runs(final, ours, plain):
        epochs = [{"val_balanced_accuracy": score} for score in (0.6, 0.75, 0.7)]
        after = {"final_balanced_accuracy": final, "test_balanced_accuracy": ours}
        unweighted = {"test_balanced_accuracy": plain, "test_recall": 0.0}
        return {
            PLAIN: run_of(tmp_path / "plain", [*epochs, {**after, "test_recall": 0.5}]),
            "unweighted": run_of(tmp_path / "unweighted", [unweighted]),
        }

    program = PROGRAMS["tabular"]
    assert program.others == {"unweighted": ("weighted=false",)}
    shown, told = program.judge(runs(0.75, 0.7, 0.5))
    assert shown is True
    assert told == (
        "best validation 75.0%, that of the weights left after 3 epochs 75.0%; test 70.0%, recall "
        "of the rare 50.0%; unweighted 50.0%, recall 0.0%"
    )
    assert program.judge(runs(0.7, 0.7, 0.5))[0] is False
    assert program.judge(runs(0.75, 0.55, 0.5))[0] is False


def test_maml_is_compared_with_its_variants(tmp_path):
    def runs(**errors):
        names = {PLAIN: "plain", "first order": "first", "trained on all curves alike": "alike"}
        return {
            name: run_of(
                tmp_path / short,
                [{f"val_error_{n}": e for n, e in zip((0, 1, 5, 10), errors[short], strict=True)}],
            )
            for name, short in names.items()
        }

    good = {"plain": (3, 0.4, 0.2, 0.1), "first": (3, 0.9, 0.5, 0.4), "alike": (3, 2, 1, 1)}
    program = PROGRAMS["maml"]
    assert set(program.runs) == set(runs(**good))
    shown, told = program.judge(runs(**good))
    assert shown is True
    assert told == (
        "error MAML 3.00 → 0.40 → 0.20 → 0.10; first order 3.00 → 0.90 → 0.50 → 0.40; trained on "
        "all curves alike 3.00 → 2.00 → 1.00 → 1.00"
    )
    for bad in (
        {"plain": (3, 0.8, 0.2, 0.1)},
        {"plain": (3, 0.4, 0.5, 0.1)},
        {"plain": (3, 0.4, 0.2, 0.3)},
        {"alike": (3, 1, 1, 1)},
        {"alike": (3, 2, 0.5, 0.5)},
        {"first": (3, 1.5, 0.5, 0.4)},
    ):
        assert program.judge(runs(**(good | bad)))[0] is False


def test_every_entry_is_of_a_recipe():
    assert set(PROGRAMS) <= set(find())


@pytest.mark.long
def test_a_recipe_is_run_by_the_command_line(tmp_path):
    backend = keras.config.backend()
    found = programs.measured("linear", backend, minutes=10, docs=tmp_path)
    assert found["shown"] is True
    assert "times its start" in found["measured"]
    assert found["seconds"] > 0
    assert set(found["versions"]) == {"keras", backend}


@pytest.mark.long
def test_failures_and_timeouts_are_reported(tmp_path, monkeypatch):
    found = programs.measured("linear", "jax", minutes=0.001, docs=tmp_path)
    assert (found["shown"], found["measured"]) == (None, "not done after 0.001 minutes")
    monkeypatch.setenv("TREADLE_DATA", str(tmp_path))
    found = programs.measured("mnist-mlp", keras.config.backend(), minutes=10, docs=tmp_path)
    assert found["shown"] is False
    assert found["measured"].startswith("failed: ")
    assert "mnist.npz" in found["measured"]


def test_a_killed_run_is_reported(tmp_path, monkeypatch):
    done = SimpleNamespace(returncode=-9, stderr="the last words were about something else")
    monkeypatch.setattr(programs.subprocess, "run", lambda *arguments, **options: done)
    found = programs.measured("linear", "jax", minutes=1, docs=tmp_path)
    assert (found["shown"], found["measured"]) == (False, "killed by SIGKILL")


def test_the_page_has_a_row_for_each_result_and_shows_the_pictures():
    versions = {"keras": "3.15.1", "jax": "0.10.1"}
    facts = {"shown": True, "measured": "good", "seconds": 12.3, "versions": versions}
    kept = {
        "mnist-gan jax": facts
        | {"pictures": [{"name": "samples", "file": "images/mnist-gan-samples.png"}]},
        "digits jax": facts | {"shown": False},
        "whatever-was jax": facts,
    }
    page = programs.page(kept)
    must = PROGRAMS["digits"].must
    assert f"| `digits` | jax | {must} | good | **no** | 12 |" in page
    assert "![mnist-gan: samples](images/mnist-gan-samples.png)" in page
    assert "whatever-was" not in page
    (missing,) = [line for line in page.splitlines() if line.startswith("Not measured yet: ")]
    assert "`linear`" in missing
    assert "`digits`" not in missing
    assert "jax 0.10.1, keras 3.15.1" in page
    assert "Not measured yet on" not in page
    page = programs.page({**kept, "digits torch": facts})
    assert "Not measured yet on tensorflow: `digits`, `mnist-gan`." in page
    assert "Not measured yet on torch: `mnist-gan`." in page
    assert "Not measured yet on jax" not in page


def test_the_backends_that_a_recipe_runs_on():
    assert programs._backends("linear-native", ("jax", "torch")) == ("tensorflow",)
    assert programs._backends("linear", ("jax", "torch")) == ("jax", "torch")
    assert programs._backends("linear", None) == (PROGRAMS["linear"].backend,)

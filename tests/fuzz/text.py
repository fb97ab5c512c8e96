"""The source text of a program: its task, its data, its hooks, and how it is run.

The text is what runs, and what is printed where a program fails. The hand-written loop has the same
text, where `treadle` is the module `byhand`.
"""

from typing import Any

from .program import (
    CALLBACKS,
    CLASSES,
    FEATURES,
    FORMS,
    LOSSES,
    PREDICATES,
    ROWS,
    TOKENS,
    Form,
    Network,
    Part,
    Program,
)

HEAD = """\
import shutil
import time

import keras
import numpy as np
from keras import layers, ops

import treadle
from treadle.checkpoint import Checkpoints
from treadle.hooks import Checkpoint, FinalModel, KerasCallbacks, LearningCurve, NonFinite
"""

HEAD_BY_HAND = """\
import keras
import numpy as np
from keras import layers, ops

from tests.fuzz import byhand as treadle
"""

HELPERS = """
L2 = keras.regularizers.L2(0.01)
Adam, AdamW, Nadam = keras.optimizers.Adam, keras.optimizers.AdamW, keras.optimizers.Nadam
SGD, RMSprop, Adagrad = keras.optimizers.SGD, keras.optimizers.RMSprop, keras.optimizers.Adagrad
falling = keras.optimizers.schedules.CosineDecay


def squares(y, out, sample_weight=None):
    each = ops.mean((ops.tanh(out) - y) ** 2, axis=-1)
    return ops.mean(each if sample_weight is None else each * sample_weight)


class SelfAttention(layers.Layer):
    def __init__(self, **options):
        super().__init__(**options)
        # With a seed: the layer would draw one each time it is built.
        seeded = keras.initializers.GlorotUniform(7)
        self.heads = layers.MultiHeadAttention(2, 3, kernel_initializer=seeded)

    def build(self, shape):
        self.heads.build(shape, shape)

    def call(self, x):
        return self.heads(x, x)


def dtype_of(x):
    return keras.backend.standardize_dtype(x.dtype)
"""


def source(program: Program, task: bool = True) -> str:
    """Return the text of the class `Program`, its data and its hooks.

    Args:
        program: What it is the text of.
        task: The class is a task of Treadle; else a plain one, for `byhand`.
    """
    base = "(treadle.Task)" if task else ""
    head = HEAD if task else HEAD_BY_HAND
    lines = [
        *head.splitlines(),
        *HELPERS.splitlines(),
        "",
        "",
        f"class Program{base}:",
        "    def __init__(self):",
    ]
    lines += [" " * 8 + line for line in _init(program)]
    lines += ["", "    def train_step(self, batch):"]
    for form in program.forms:
        lines += [f"        if {FORMS[form.kind]}:"]
        lines += [" " * 12 + line for line in _step(program, form)]
    lines += ["        raise AssertionError(batch)"]
    if program.validated:
        lines += ["", "    def eval_step(self, batch):"]
        lines += [" " * 8 + line for line in _evaluation(program)]
    lines += ["", *_data(program, task), ""]
    for number, change in enumerate(program.changes):
        lines += ["", f"def change{number}(loop):", f"    task = loop.task\n    {change.code}", ""]
    if not task:
        pairs = ", ".join(f"({change.step}, change{i})" for i, change in enumerate(program.changes))
        return "\n".join([*lines, "", f"changes = [{pairs}]"]) + "\n"
    hooks = ", ".join(
        f'treadle.at("{change.step} steps", change{number})'
        for number, change in enumerate(program.changes)
    )
    lines += ["", "def hooks():", f"    return [{hooks}]", *_run(program)]
    return "\n".join(lines) + "\n"


def _run(program: Program) -> list[str]:
    calls = "\n        ".join(_call(program, unit, count) for unit, count in program.calls)
    guard = callback = ""
    if program.callback is not None:
        options = "model=task.net0, optimizer=task.opt0"
        callback = f"\n    watching += [KerasCallbacks({CALLBACKS[program.callback]}, {options})]"
    if program.nonfinite is not None:
        guard = f'\n    watching += [NonFinite("{program.nonfinite}")]'
    text = f'''

copies = []  # where to keep what a process would leave that is killed after step {program.killed}


def killed(loop):
    if not copies or copies[0].exists():
        return
    for _ in range(40):  # until what is being saved is on the disk
        newest = Checkpoints(loop.directory / "checkpoints").latest()
        if newest is not None and newest.progress.step >= {_saved_before(program)}:
            break
        time.sleep(0.05)
    while not copies[0].exists():
        try:
            shutil.copytree(loop.directory, copies[0], ignore=shutil.ignore_patterns(".lock"))
        except shutil.Error:  # a checkpoint was removed meanwhile
            shutil.rmtree(copies[0])


class NoModel(FinalModel):  # which takes longer than the run
    def end(self, loop, error):
        pass


class NoCurve(LearningCurve):
    def end(self, loop, error):
        pass


def run(directory=None, **options):
    keras.utils.clear_session(free_memory=False)
    treadle.setup(seed={program.seed}, precision="{program.precision}")
    task = Program()
    watching = [*hooks(), treadle.at("{program.killed} steps", killed)]{callback}
    if directory is not None:
        watching += [Checkpoint(every="{program.every} steps"), NoModel(), NoCurve()]{guard}
    how = treadle.Options(**{_options(program)} | options)
    with treadle.Loop(task, directory, watching, how, console=False) as loop:
        {calls}
    return loop
'''
    return text.splitlines()


def _call(program: Program, unit: str, count: int) -> str:
    if not program.looped:
        return f"loop.fit(train, validation, {unit}={count})"
    return f"""for _ in loop.epochs({count}):
            for _ in loop.steps(train, every="{program.every} steps"):
                pass"""


def _saved_before(program: Program) -> int:
    """The newest step that is saved when hooks run after the step of the kill, if all went well."""
    return (program.killed - 1) // program.every * program.every


def _options(program: Program) -> dict[str, Any]:
    options = {"window": program.window, "data_on_device": program.on_device, "jit": program.jit}
    return {name: value for name, value in options.items() if value is not None}


def _init(program: Program) -> list[str]:
    lines: list[str] = []
    for number, network in enumerate(program.networks):
        lines += [f"self.net{number} = keras.Sequential(["]
        lines += [f"    {layer}," for layer in network.layers] + ["])"]
        if network.frozen:
            lines += [f"self.net{number}.layers[{_with_weights(network)}].trainable = False"]
        if network.average:
            lines += [f"self.slow{number} = treadle.frozen_copy(self.net{number})"]
    for number, optimizer in enumerate(program.optimizers):
        lines += [f"self.opt{number} = {optimizer}"]
    for number in _with_kind(program, "accumulate"):
        lines += [f"self.accumulator{number} = treadle.Accumulator(2)"]
    for number in _with_kind(program, "parts"):
        lines += [f"self.head{number} = SGD(0.05, momentum=0.5)"]
    lines += ["self.scale = 1.0", "self.noise = keras.random.SeedGenerator(11)"]
    lines += ['self.count = keras.Variable(0, dtype="int32", trainable=False)']
    lines += ["self.error = keras.metrics.MeanSquaredError()"]
    if program.precision == "mixed_float16":
        lines += [f"self.loss_scale = treadle.LossScale({program.scale!r}, growth_steps=3)"]
    return lines


def _with_weights(network: Network) -> int:
    """The position, among `Sequential.layers`, of the first layer that has weights."""
    kept = [layer for layer in network.layers if not layer.startswith("keras.Input")]
    bare = ("Reshape", "Flatten", "Dropout", "GlobalAverage", "GaussianNoise")
    return next(i for i, layer in enumerate(kept) if not any(name in layer for name in bare))


def _with_kind(program: Program, kind: str) -> list[int]:
    """The numbers of the networks that have a part of this kind."""
    parts = [part for form in program.forms for part in form.parts]
    return sorted({part.network for part in parts if part.kind == kind})


def _step(program: Program, form: Form) -> list[str]:
    x, y = {"renamed": ("u", "z"), "wide": ("d", "y")}.get(form.kind, ("x", "y"))
    lines = [f'x = ops.cast(batch["{x}"], "float32")', f'y = ops.one_hot(batch["{y}"], {CLASSES})']
    weight = ', sample_weight=batch["w"]' if form.kind == "weighted" else ""
    if form.noise is not None:
        seed = ", seed=self.noise" if form.noise == "seeded" else ""
        lines += [f"x = x + 0.1 * keras.random.normal(ops.shape(x){seed})"]
    losses: list[str] = []
    for number, part in enumerate(form.parts):
        lines += _part(program, part, number, weight, x)
        losses += [f"loss{number}"]
    for number, network in enumerate(program.networks):
        if network.average and any(_uses(part, number) for part in form.parts):
            lines += [f"treadle.blend(self.slow{number}, self.net{number}, 0.25)"]
    lines += ["self.count.assign_add(1)"]
    learned = form.parts[0].network
    lines += [f"out = {_forward(program, learned, 'x', False)}", "self.error.update_state(y, out)"]
    rest = " + ".join(losses[1:]) or "ops.mean(out)"
    return [*lines, f'return {{"loss": loss0, "rest": {rest}, "count": self.count.value}}']


def _uses(part: Part, network: int) -> bool:
    return part.network == network or (part.kind == "chain" and part.network + 1 == network)


def _forward(program: Program, number: int, x: str, training: bool) -> str:
    if program.networks[number].of_tokens:
        x = f'ops.cast(ops.clip(ops.floor({x} * 2) + 3, 0, {TOKENS - 1}), "int32")'
    called = f"self.net{number}({x}, training={training})"
    # What a network returns is of half precision, and losses are computed in float32.
    return called if program.precision == "float32" else f'ops.cast({called}, "float32")'


def _part(program: Program, part: Part, number: int, weight: str, key: str) -> list[str]:
    if part.only is None:
        return _learning(program, part, number, weight)
    network = part.network
    inside = ["    " + line for line in _learning(program, part, number, weight)]
    look = f"{LOSSES[part.loss]}(y, {_forward(program, network, 'x', False)}{weight})"
    predicate = PREDICATES[part.only].replace("KEY", f'"{key}"')
    return [
        f"def learn{number}():",
        *inside,
        f"    return loss{number}",
        f"def look{number}():",
        f"    return {look}",
        f"loss{number} = treadle.cond({predicate}, learn{number}, look{number})",
    ]


def _learning(program: Program, part: Part, i: int, weight: str) -> list[str]:
    n, net = part.network, f"self.net{part.network}"
    optimizer, loss = f"self.opt{n}", LOSSES[part.loss]
    extra = f" + sum({net}.losses)" if program.networks[n].regularized else ""
    out = f"out = {_forward(program, n, 'x', True)}"
    value = f"self.scale * {loss}(y, out{weight}){extra}"
    simple = [f"def objective{i}():", f"    {out}", f"    return {value}"]
    if part.kind == "minimize":
        return [*simple, f"loss{i} = treadle.minimize(objective{i}, {net}, {optimizer})"]
    if part.kind == "gradients":
        return [
            *simple,
            f"variables = {net}.trainable_variables",
            f"loss{i}, grads = treadle.gradients(objective{i}, variables)",
            "grads, norm = treadle.clip_by_global_norm(grads, 0.5)",
            # Read again: the objective may have built the network.
            f"{optimizer}.apply(grads, {net}.trainable_variables)",
        ]
    if part.kind == "penalty":
        return [
            f"def objective{i}():",
            f"    {out}",
            "    _, (slope,) = treadle.input_gradients(",
            f"        lambda x: ops.sum({_forward(program, n, 'x', True)} ** 2), x",
            "    )",
            f"    return {value} + 0.1 * ops.mean(slope**2)",
            f"loss{i} = treadle.minimize(objective{i}, {net}, {optimizer})",
        ]
    if part.kind == "inner":
        inner = f"lambda: {loss}(y, {_forward(program, n, 'x', True)}{weight})"
        return [
            f"variables{i} = {net}.trainable_variables",
            f"def objective{i}():",
            f"    _, slopes = treadle.gradients({inner}, variables{i})",
            f"    moved = [v - 0.1 * g for v, g in zip(variables{i}, slopes, strict=True)]",
            f"    with treadle.substituted(variables{i}, moved):",
            f"        {out}",
            f"        return {value}",
            f"loss{i} = treadle.minimize(objective{i}, {net}, {optimizer})",
        ]
    if part.kind == "rows":
        one = _forward(program, n, "row[0][None]", True)
        return [
            f"def row{i}(row):",
            f"    loss = lambda: self.scale * {loss}(row[1][None], {one})",
            f"    return treadle.gradients(loss, {net})",
            f"losses, grads = treadle.for_each(row{i}, (x, y))",
            "grads = [ops.mean(g, axis=0) for g in grads]",
            f"{optimizer}.apply(grads, {net}.trainable_variables)",
            f"loss{i} = ops.mean(losses)",
        ]
    if part.kind == "accumulate":
        return [
            *simple,
            f"loss{i}, grads = treadle.gradients(objective{i}, {net})",
            f"self.accumulator{n}.add(",
            f"    grads, lambda mean: {optimizer}.apply(mean, {net}.trainable_variables)",
            ")",
        ]
    if part.kind == "parts":
        return [
            *simple[:-1],
            f"    loss = {value}",
            '    return {"body": loss, "head": loss}',
            f"layers_of = {net}.layers",
            "body = [v for layer in layers_of[:-1] for v in layer.trainable_variables]",
            f"loss{i} = treadle.minimize(",
            f'    objective{i}, {{"body": body, "head": layers_of[-1]}}, '
            f'{{"body": {optimizer}, "head": self.head{n}}}',
            ')["body"]',
        ]
    assert part.kind == "chain"
    return [
        f"def objective{i}():",
        f"    {out}",
        f"    after = {_forward(program, n + 1, 'ops.tanh(out)', True)}",
        f'    return {{"a": {value}, "b": {loss}(y, after{weight})}}',
        f"both = treadle.minimize(objective{i}, "
        f'{{"a": {net}, "b": self.net{n + 1}}}, {{"a": {optimizer}, "b": self.opt{n + 1}}})',
        f'loss{i} = both["a"] + both["b"]',
    ]


def _evaluation(program: Program) -> list[str]:
    network = program.forms[0].parts[0].network
    return [
        'x, y = batch["x"], ops.one_hot(batch["y"], 4)',
        f"out = {_forward(program, network, 'x', False)}",
        "self.error.update_state(y, out)",
        'return {"loss": squares(y, out)}',
    ]


def _data(program: Program, task: bool) -> list[str]:
    lines = [
        "",
        f"rng = np.random.default_rng({program.seed})",
        "",
        "",
        'def batch_of(rows, kind="plain", bad=False):',
        f'    x = rng.normal(size=(rows, {FEATURES})).astype("float32")',
        f'    y = rng.integers({CLASSES}, size=rows).astype("int32")',
        "    if bad:",
        "        x[-1, -1] = np.nan",
    ]
    made = {
        "renamed": '{"u": x, "z": y}',
        "narrow": '{"x": x.astype("float16"), "y": y}',
        "whole": '{"x": np.round(2 * x).astype("int32"), "y": y}',
        "weighted": '{"x": x, "y": y, "w": np.abs(x[:, 0])}',
        "wide": '{"d": x.astype("float64"), "y": y}',
    }
    for kind in (form.kind for form in program.forms if form.kind in made):
        lines += [f'    if kind == "{kind}":', f"        return {made[kind]}"]
    lines += ['    return {"x": x, "y": y}', "", "", "batches = ["]
    for position, (form, rows) in enumerate(program.order):
        kind = program.forms[form].kind
        more = "" if kind == "plain" else f', "{kind}"'
        more += ", bad=True" if position in program.bad else ""
        lines += [f"    batch_of({rows}{more}),"]
    lines += ["]"]
    if program.validated:
        lines += [f"validation = [batch_of({ROWS}), batch_of(3)]"]
    else:
        lines += ["validation = None"]
    if not task:
        return lines
    if program.source == "arrays":
        lines += [
            "joined = {key: np.concatenate([b[key] for b in batches]) for key in batches[0]}",
            f"train = treadle.data.from_arrays(joined, batch_size={ROWS}, "
            f"shuffle={program.shuffled})",
        ]
    elif program.source == "function":
        lines += ["", "", "def train():", "    yield from batches"]
    else:
        lines += ["train = batches"]
    return lines

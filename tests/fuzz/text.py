"""The source text of a program: its task, its data, its hooks, and how it is run.

The text is what runs, and what is printed where a program fails. The hand-written loop has the same
text, where `treadle` is the module `byhand`.
"""

from typing import Any

from .helpers import head
from .program import CALLBACKS, CLASSES, FEATURES, ROWS, SETTINGS, Network, Outputs, Program
from .steps import forward, train_step


def source(program: Program, task: bool = True) -> str:
    """Return the text of the class `Program`, its data and its hooks.

    Args:
        program: What it is the text of.
        task: The class is a task of Treadle; else a plain one, for `byhand`.
    """
    base = "(treadle.Task)" if task else ""
    base = base if program.outputs is None else "(treadle.Supervised)"
    lines = [
        *head(program, task).splitlines(),
        "",
        "",
        f"class Program{base}:",
        "    def __init__(self):",
    ]
    lines += [" " * 8 + line for line in _init(program)]
    lines += ["", "    def train_step(self, batch):"]
    lines += [" " * 8 + line for line in train_step(program)]
    if program.validated:
        lines += ["", "    def eval_step(self, batch):"]
        lines += [" " * 8 + line for line in _evaluation(program)]
    lines += ["", *_data(program, task), ""]
    for number, change in enumerate(program.changes):
        code = change.code.replace("task.scale", f"task.{SETTINGS[program.settings][1]}")
        lines += ["", f"def change{number}(loop):", f"    task = loop.task\n    {code}", ""]
    lines += _memories(program)
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
    calls = "\n".join(line for i in range(len(program.calls)) for line in _call(program, i))
    calls = calls.replace("\n", "\n        ")
    guard = callback = early = late = ""
    if program.memories:
        early = "\n    watching += memories(process)"
    if program.moved:
        early = '\n    watching += memories(process) if process != "killed" else []'
        late = '\n    watching += memories(process)[::-1] if process == "killed" else []'
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
        if newest is not None and newest.progress.step >= {program.saved}:
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


def run(directory=None, {'process="whole", ' if program.memories else ""}**options):
    {_beginning(program)}keras.utils.clear_session(free_memory=False)
    treadle.setup(seed={program.seed}, precision="{program.precision}")
    task = Program()
    watching = [*hooks(), treadle.at("{program.killed} steps", killed)]{callback}{early}
    if directory is not None:
        watching += [Checkpoint(every="{program.every} steps"), NoModel(), NoCurve()]{guard}{late}
    how = treadle.Options(**{_options(program)} | options)
    with treadle.Loop(task, directory, watching, how, console=False) as loop:
        {calls}
    return loop
'''
    return text.splitlines()


def _beginning(program: Program) -> str:
    """Return what a run does first: the data are as they were."""
    if program.changing:
        return "alter(0)\n    "
    # A source that has failed in a process that was killed does not fail again.
    return (
        ""
        if program.retried is None
        else "fails[:] = [directory is None or not directory.exists()]\n    "
    )


def _call(program: Program, number: int) -> list[str]:
    """Return the lines of a call of the loop."""
    unit, count, source = program.calls[number]
    name, other = ("train", "second")[:: 1 if source == 0 else -1]
    alter = [f"alter({number})"] if program.changing and number > 0 else []
    every = f'every="{program.every} steps"'
    if program.looped or unit == "both":
        each = ["    alter(epoch)"] if program.changing and program.looped else []
        for source in (name, other) if unit == "both" else (name,):
            each += [f"    for _ in loop.steps({source}, {every}):", "        pass"]
        return [*alter, f"for epoch in loop.epochs({count}):", *each]
    if unit == "break":
        visits = [visit.call for visit in program.visits_of_steps]
        last = len(visits) - visits[::-1].index(number)
        whole = program.visits_of_steps[last - 1].batch + 1 == len(program.sources[source].order)
        # A resumed process cannot tell a `break` after the last batch from the end of the epoch.
        body = ["    pass"] if whole else [f"    if loop.progress.step == {last}:", "        break"]
        return [*alter, f"for _ in loop.steps({name}):", *body]
    fit = f"loop.fit({name}, validation, {unit}={count})"
    if program.retried is None or source == 1:
        return [*alter, fit]
    return [*alter, "try:", f"    {fit}", "except OSError:", f"    {fit}"]


def _memories(program: Program) -> list[str]:
    """Return the function that makes the hooks with a state.

    Those of a process that is not killed act where the hooks of the two processes act that are
    killed and resume.
    """
    if not program.memories:
        return []
    made: dict[str, list[str]] = {"whole": [], "killed": [], "resumed": []}
    for place, memory in enumerate(program.memories):
        # Each moves a weight of its own: the order of sums would change their rounding.
        shown = f"{memory.identity!r}, {memory.network}, {place}, {memory.amount}, {memory.every}"
        limits = {"always": "", "before": ", last=saved", "after": ", first=saved"}[memory.present]
        made["whole"] += [f"Remember({shown}{limits})"]
        made["killed"] += [f"Remember({shown})"] if memory.present != "after" else []
        made["resumed"] += [f"Remember({shown})"] if memory.present != "before" else []
    lines = ["", f"saved = {program.saved}  # the step that the killed process saved last", "", ""]
    lines += ["def memories(process):", "    return {"]
    lines += [f'        "{name}": lambda: [{", ".join(hooks)}],' for name, hooks in made.items()]
    return [*lines, "    }[process]()"]


def _options(program: Program) -> dict[str, Any]:
    options = {"window": program.window, "data_on_device": program.on_device, "jit": program.jit}
    return {name: value for name, value in options.items() if value is not None}


def _init(program: Program) -> list[str]:
    lines: list[str] = []
    if program.outputs is not None:
        lines += _supervised(program.outputs)
    for number, network in enumerate(program.networks):
        lines += [f"self.net{number} = keras.Sequential(["]
        lines += [f"    {layer}," for layer in network.layers] + ["])"]
        if network.adapted:
            lines += [f"self.net{number}.layers[0].adapt(known)"]
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
    lines += [SETTINGS[program.settings][0], "self.noise = keras.random.SeedGenerator(11)"]
    lines += ['self.count = keras.Variable(0, dtype="int32", trainable=False)']
    lines += ["self.error = keras.metrics.MeanSquaredError()"]
    contents = {control.content for form in program.forms for control in form.controls}
    if contents:  # `while_loop` reads it
        lines += ["self.turns = keras.Variable(0.5, trainable=False)"]
    lines += ["self.drop = layers.Dropout(0.25, seed=13)"] if "dropout" in contents else []
    lines += ["self.seen = keras.metrics.Mean()"] if "metric" in contents else []
    if program.precision == "mixed_float16":
        lines += [f"self.loss_scale = treadle.LossScale({program.scale!r}, growth_steps=3)"]
    return lines


def _supervised(outputs: Outputs) -> list[str]:
    """Return the lines that make a model of two outputs, its losses and metrics."""

    def of_both(values: dict[str, str]) -> str:
        if outputs.kind == "list":
            return f"[{values['z']}, {values['b']}]"
        given = [f'"{name}": {value}' for name, value in values.items() if value != "None"]
        return f"{{{', '.join(given)}}}"

    cross_entropy = "keras.losses.CategoricalCrossentropy(from_logits=True)"
    loss = {
        "one": '"mse"',
        "each": of_both({"z": cross_entropy, "b": '"mse"'}),
        "some": of_both({"z": "squares_of_each", "b": "None"}),
    }[outputs.losses]
    options = f"loss={loss}, optimizer={outputs.optimizer}"
    if outputs.weights:
        options += f", loss_weights={of_both({'z': '0.5', 'b': '2.0'})}"
    if outputs.metrics is not None:
        name = {"plain": "metrics", "weighted": "weighted_metrics"}[outputs.metrics]
        metrics = {"z": '["mse", squares_of_each]', "b": '["mae"]'}
        options += f", {name}={of_both(metrics)}"
    rule = ", kernel_regularizer=L2" if outputs.regularized else ""
    return [
        "inputs = keras.Input((4,))",
        f'hidden = layers.Dense(5, "tanh"{rule})(inputs)',
        'z, b = layers.Dense(4, name="z")(hidden), layers.Dense(4, "sigmoid", name="b")(hidden)',
        f"model = keras.Model(inputs, {of_both({'z': 'z', 'b': 'b'})})",
        f"super().__init__(model, {options})",
    ]


def _with_weights(network: Network) -> int:
    """The position, among `Sequential.layers`, of the first layer that has weights."""
    kept = [layer for layer in network.layers if not layer.startswith("keras.Input")]
    bare = ("Reshape", "Flatten", "Dropout", "GlobalAverage", "GaussianNoise")
    bare += ("layers.Normalization", "Scaled")  # whose weights are not trained
    return next(i for i, layer in enumerate(kept) if not any(name in layer for name in bare))


def _with_kind(program: Program, kind: str) -> list[int]:
    """The numbers of the networks that have a part of this kind."""
    parts = [part for form in program.forms for part in form.parts]
    return sorted({part.network for part in parts if part.kind == kind})


def _evaluation(program: Program) -> list[str]:
    network = program.forms[0].parts[0].network
    return [
        *(["batch = opened(batch)"] if program.structured else []),
        'x, y = batch["x"], ops.one_hot(batch["y"], 4)',
        f"out = {forward(program, network, 'x', False)}",
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
    forms = {
        "renamed": '{"u": x, "z": y}',
        "narrow": '{"x": x.astype("float16"), "y": y}',
        "whole": '{"x": np.round(2 * x).astype("int32"), "y": y}',
        "weighted": '{"x": x, "y": y, "w": np.abs(x[:, 0])}',
        "wide": '{"d": x.astype("float64"), "y": y}',
    }
    for kind in (form.kind for form in program.forms if form.kind in forms):
        lines += [f'    if kind == "{kind}":', f"        return {forms[kind]}"]
    lines += ['    return {"x": x, "y": y}', "", ""]
    for number, source in enumerate(program.sources):
        lines += [f"{_BATCHES[number]} = ["]
        for position, (form, rows) in enumerate(source.order):
            kind = program.forms[form].kind
            more = "" if kind == "plain" else f', "{kind}"'
            more += ", bad=True" if number == 0 and position in program.bad else ""
            made = f"batch_of({rows}{more})"
            packed = made if source.source == "arrays" else _packed(made, program, form)
            lines += [f"    {packed},"]
        lines += ["]"]
    if program.validated:
        made = [_packed(f"batch_of({rows})", program, 0) for rows in (ROWS, 3)]
        lines += [f"validation = [{', '.join(made)}]"]
    else:
        lines += ["validation = None"]
    if task:
        for number in range(len(program.sources)):
            lines += _source(program, number)
    return lines


_BATCHES = ("batches", "seconds")


def _source(program: Program, number: int) -> list[str]:
    """Return the lines that make a source of the loop."""
    source = program.sources[number]
    batches, name = _BATCHES[number], ("train", "second")[number]
    if source.source == "list":
        return [f"{name} = {batches}"]
    if source.source == "function":
        if number > 0 or program.retried is None:
            return ["", "", f"def {name}():", f"    yield from {batches}"]
        return [
            "fails = [True]",
            *["", "", f"def {name}():", f"    for number, batch in enumerate({batches}):"],
            f"        if number == {program.retried} and fails == [True]:",
            "            fails.clear()",
            '            raise OSError("connection lost")',
            "        yield batch",
        ]
    joined = "joined" if number == 0 else "joined_seconds"
    changing = number == 0 and program.changing
    lines = [
        f"{joined} = {{k: np.concatenate([b[k] for b in {batches}]) for k in {batches}[0]}}",
        f"{name} = treadle.data.from_arrays({_packed(joined, program, 0)}, batch_size={ROWS}, "
        f"shuffle={source.shuffled}{', changing=True' if changing else ''})",
    ]
    if changing:
        lines += ['first = joined["x"].copy()', "", "", "def alter(number):"]
        lines += ['    joined["x"][:] = (1.0 + 0.25 * number) * first']
    return lines


def _packed(arrays: str, program: Program, form: int) -> str:
    """Return the text of arrays in the structure of a form."""
    structure = program.forms[form].structure
    return arrays if structure is None else f'packed({arrays}, "{structure}")'

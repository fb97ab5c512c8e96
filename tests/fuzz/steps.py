"""The source text of steps: of each form of batch, and how networks learn in it."""

from .program import (
    CLASSES,
    CONTROLS,
    FORMS,
    LOSSES,
    PREDICATES,
    SETTINGS,
    STRUCTURES,
    TOKENS,
    Control,
    Form,
    Part,
    Program,
)

# What functions of the step return in addition, where structures are drawn: keys in other orders
# than that of the alphabet, and None.
MORE = '{"z": out, "b": [None, Named(ops.mean(out), None, ())]}'


def train_step(program: Program) -> list[str]:
    """Return the body of `train_step`."""
    lines = ["whole, batch = batch, opened(batch)"] if program.structured else []
    for form in program.forms:
        lines += [f"if {FORMS[form.kind]}:"]
        lines += ["    " + line for line in _step(program, form)]
    return [*lines, "raise AssertionError(batch)"]


def _step(program: Program, form: Form) -> list[str]:
    lines = _read(form)
    weight = ", sample_weight=w" if form.kind == "weighted" else ""
    if form.noise is not None:
        seed = ", seed=self.noise" if form.noise == "seeded" else ""
        lines += [f"x = x + ops.cast(0.1 * keras.random.normal(ops.shape(x){seed}), FLOAT)"]
    for number, control in enumerate(form.controls):
        lines += _touch(control, number)
        lines += [_controlled(control, number, "x")] if control.place == "outside" else []
    losses: list[str] = []
    for number, part in enumerate(form.parts):
        lines += _part(program, form, part, number, weight)
        losses += [f"loss{number}"]
    for number, network in enumerate(program.networks):
        if network.average and any(_uses(part, number) for part in form.parts):
            lines += [f"treadle.blend(self.slow{number}, self.net{number}, 0.25)"]
    lines += ["self.count.assign_add(1)"]
    lines += _outputs(program)
    learned = form.parts[0].network
    lines += [f"out = {forward(program, learned, 'x', False)}", "self.error.update_state(y, out)"]
    rest = " + ".join(losses[1:]) or "ops.mean(out)"
    many = "" if program.outputs is None else ', "many": many'
    return [*lines, f'return {{"loss": loss0, "rest": {rest}, "count": self.count.value{many}}}']


def _read(form: Form) -> list[str]:
    """Return how `x`, `y` and `w` are read from a batch: by name, or by position."""
    x, y = {"renamed": ("u", "z"), "wide": ("d", "y")}.get(form.kind, ("x", "y"))
    if form.structure is None:
        read, lines = [f'batch["{x}"]', f'batch["{y}"]', 'batch["w"]'], []
    else:
        read = ["arrays[-1]", "arrays[-2]", "arrays[-3]"]
        lines = [f"assert {STRUCTURES[form.structure]}, whole", "arrays = [*batch.values()]"]
    lines += [f"x = ops.cast({read[0]}, FLOAT)", f"y = ops.one_hot({read[1]}, {CLASSES})"]
    if form.kind == "weighted":
        lines += [f"w = {read[2]}"]
    if form.structure == "scalar":
        lines += ["x = x * (0.5 + ops.cast(arrays[0], FLOAT))"]
    return lines


def _touch(control: Control, number: int) -> list[str]:
    """Return the function with state that a function of `keras.ops` calls."""
    return {
        "variable": [
            f"def touch{number}(t):",
            "    self.turns.assign(0.5 * self.turns + 0.25)",
            "    return t * (0.5 + self.turns)",
        ],
        "dropout": [
            f"def touch{number}(t):",
            "    return ops.cast(self.drop(t, training=True), FLOAT)",
        ],
        "metric": [f"def touch{number}(t):", "    self.seen.update_state(t)", "    return 0.9 * t"],
    }[control.content]


def _controlled(control: Control, number: int, name: str) -> str:
    """Return the statement that changes `x` or `out` by a function of `keras.ops`."""
    f, v = f"touch{number}", name
    assert control.place in CONTROLS[control.kind]
    return {
        "cond": f"{v} = ops.cond(self.count % 2 == 0, lambda: {f}({v}), lambda: 0.8 * {v})",
        "switch": f"{v} = ops.switch(self.count % 3, [{f}, lambda t: 0.8 * t, {f}], {v})",
        "map": f"{v} = ops.map({f}, {v})",
        "scan": f"_, {v} = ops.scan(lambda sum, t: (0.5 * sum + {f}(t), sum + t), "
        f"ops.zeros(({CLASSES},), FLOAT), {v})",
        "fori_loop": f"{v} = ops.fori_loop(0, 3, lambda i, t: {f}(t), {v})",
        "while_loop": f"_, {v} = ops.while_loop(lambda i, t: ops.logical_and(i < 3, "
        f"self.turns < 9.0), lambda i, t: (i + 1, {f}(t)), "
        f"(ops.convert_to_tensor(0), {v}))",
    }[control.kind]


def _outputs(program: Program) -> list[str]:
    if program.outputs is None:
        return []
    targets = {"dict": '{"z": y, "b": ops.sigmoid(x)}', "list": "[y, ops.sigmoid(x)]"}
    weights = ", ops.abs(x[:, 0])" if program.outputs.sample_weights else ""
    return [f'many = super().train_step((x, {targets[program.outputs.kind]}{weights}))["loss"]']


def _uses(part: Part, network: int) -> bool:
    return part.network == network or (part.kind == "chain" and part.network + 1 == network)


def forward(program: Program, number: int, x: str, training: bool) -> str:
    """Return the call of a network."""
    if program.networks[number].of_tokens:
        x = f'ops.cast(ops.clip(ops.floor({x} * 2) + 3, 0, {TOKENS - 1}), "int32")'
    called = f"self.net{number}({x}, training={training})"
    # What a network returns is of half precision, and losses are computed in float32.
    return f"ops.cast({called}, FLOAT)" if program.half else called


def _part(program: Program, form: Form, part: Part, number: int, weight: str) -> list[str]:
    if part.only is None:
        return _learning(program, form, part, number, weight)
    network = part.network
    inside = ["    " + line for line in _learning(program, form, part, number, weight)]
    look = f"{LOSSES[part.loss]}(y, {forward(program, network, 'x', False)}{weight})"
    key = {"renamed": "u", "wide": "d"}.get(form.kind, "x")
    predicate = PREDICATES[part.only].replace("KEY", f'"{key}"')
    module = "ops" if part.by_keras else "treadle"
    lines = [f"def learn{number}():", *inside]
    if not part.structured:
        return [
            *lines,
            f"    return loss{number}",
            f"def look{number}():",
            f"    return {look}",
            f"loss{number} = {module}.cond({predicate}, learn{number}, look{number})",
        ]
    return [
        *lines,
        f'    return {{"z": loss{number}, "b": Named(2.0 * loss{number}, None, [])}}',
        f"def look{number}():",
        f"    seen = {look}",
        '    return {"z": seen, "b": Named(2.0 * seen, None, [])}',
        f"found = {module}.cond({predicate}, learn{number}, look{number})",
        f"loss{number} = [*found.values()][0] + 0.1 * found['b'].targets",
    ]


def _learning(program: Program, form: Form, part: Part, i: int, weight: str) -> list[str]:
    n, net = part.network, f"self.net{part.network}"
    optimizer, loss = f"self.opt{n}", LOSSES[part.loss]
    extra = f" + sum({net}.losses)" if program.networks[n].regularized else ""
    out = [f"    out = {forward(program, n, 'x', True)}"]
    if i == 0:
        out += [
            "    " + _controlled(control, number, "out")
            for number, control in enumerate(form.controls)
            if control.place == "inside"
        ]
    value = f"self.{SETTINGS[program.settings][1]} * {loss}(y, out{weight}){extra}"
    shown, more = f"loss{i}", list[str]()
    if part.structured and part.kind in ("minimize", "gradients", "accumulate"):
        shown = f"(loss{i}, more)"
        more = [f"loss{i} = loss{i} + 0.1 * [*more.values()][1][1].targets"]
    simple = [
        f"def objective{i}():",
        *out,
        f"    return {value}, {MORE}" if more else f"    return {value}",
    ]
    if part.kind == "minimize":
        return [*simple, f"{shown} = treadle.minimize(objective{i}, {net}, {optimizer})", *more]
    if part.kind == "gradients":
        return [
            *simple,
            f"variables = {net}.trainable_variables",
            f"{shown}, grads = treadle.gradients(objective{i}, variables)",
            "grads, norm = treadle.clip_by_global_norm(grads, 0.5)",
            # Read again: the objective may have built the network.
            f"{optimizer}.apply(grads, {net}.trainable_variables)",
            *more,
        ]
    if part.kind == "penalty":
        summed = f"ops.sum({forward(program, n, 'x', True)} ** 2)"
        aux = ', {"z": x, "b": None}' if part.structured else ""
        return [
            f"def objective{i}():",
            *out,
            "    _, (slope,) = treadle.input_gradients(",
            f"        lambda x: ({summed}{aux}), x",
            "    )",
            f"    return {value} + 0.1 * ops.mean(slope**2)",
            f"loss{i} = treadle.minimize(objective{i}, {net}, {optimizer})",
        ]
    if part.kind == "inner":
        inner = f"lambda: {loss}(y, {forward(program, n, 'x', True)}{weight})"
        return [
            f"variables{i} = {net}.trainable_variables",
            f"def objective{i}():",
            f"    _, slopes = treadle.gradients({inner}, variables{i})",
            f"    moved = [v - 0.1 * g for v, g in zip(variables{i}, slopes, strict=True)]",
            f"    with treadle.substituted(variables{i}, moved):",
            *("    " + line for line in out),
            f"        return {value}",
            f"loss{i} = treadle.minimize(objective{i}, {net}, {optimizer})",
        ]
    if part.kind == "rows":
        return _rows(program, part, i)
    if part.kind == "accumulate":
        return [
            *simple,
            f"{shown}, grads = treadle.gradients(objective{i}, {net})",
            f"self.accumulator{n}.add(",
            f"    grads, lambda mean: {optimizer}.apply(mean, {net}.trainable_variables)",
            ")",
            *more,
        ]
    if part.kind == "parts":
        return [
            f"def objective{i}():",
            *out,
            f"    loss = {value}",
            '    return {"head": loss, "body": loss}'
            if part.structured
            else '    return {"body": loss, "head": loss}',
            f"layers_of = {net}.layers",
            "body = [v for layer in layers_of[:-1] for v in layer.trainable_variables]",
            f"loss{i} = treadle.minimize(",
            f'    objective{i}, {{"body": body, "head": layers_of[-1]}}, '
            f'{{"body": {optimizer}, "head": self.head{n}}}',
            ')["body"]',
        ]
    assert part.kind == "chain"
    first, second = ("z", "b") if part.structured else ("a", "b")
    return [
        f"def objective{i}():",
        *out,
        f"    after = {forward(program, n + 1, 'ops.tanh(out)', True)}",
        f'    return {{"{first}": {value}, "{second}": {loss}(y, after{weight})}}',
        f"both = treadle.minimize(objective{i}, "
        f'{{"{first}": {net}, "{second}": self.net{n + 1}}}, '
        f'{{"{first}": {optimizer}, "{second}": self.opt{n + 1}}})',
        f"loss{i} = [*both.values()][0] + 2.0 * [*both.values()][1]",
    ]


def _rows(program: Program, part: Part, i: int) -> list[str]:
    loss, net = LOSSES[part.loss], f"self.net{part.network}"
    read, inputs = ("row[0]", "row[1]"), "(x, y)"
    given, found = "loss, grads", "losses, grads = found"
    if part.structured:
        read, inputs = ("row['z']", "row['b'].targets[0]"), '{"z": x, "b": Named([y], None, [])}'
        given = '{"z": loss, "b": (None, grads)}'
        found = "losses, (_, grads) = found.values()"
    one, scale = (
        forward(program, part.network, f"{read[0]}[None]", True),
        SETTINGS[program.settings][1],
    )
    return [
        f"def row{i}(row):",
        f"    objective = lambda: self.{scale} * {loss}({read[1]}[None], {one})",
        f"    loss, grads = treadle.gradients(objective, {net})",
        f"    return {given}",
        f"found = treadle.for_each(row{i}, {inputs})",
        found,
        "grads = [ops.mean(g, axis=0) for g in grads]",
        f"self.opt{part.network}.apply(grads, {net}.trainable_variables)",
        f"loss{i} = ops.mean(losses)",
    ]

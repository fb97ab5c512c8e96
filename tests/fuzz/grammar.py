"""Random programs: Hypothesis strategies for `Program`.

What is left out, and why:

- Activations with a kink (relu): a rounding error decides on which side of it a number lies.
- Optimizers that divide by gradients next to zero: Adam and its like have epsilon=1e-3, since with
  1e-7 the sign of a rounding error moves a weight by a whole learning rate. Lion is out for that.
- BatchNormalization of four rows multiplies rounding errors; epsilon=0.1 keeps that small. None of
  it with half precision, where compiled and eager steps differ more, as documented.
- NaN where inputs become tokens: what NaN is as a whole number, each backend decides for itself.
- Frozen layers that hooks freeze while gradients are accumulated: the sums have other shapes then.
- Convolutions and recurrent layers in half precision, which not every CPU backend computes.
- Layers with derived state, control flow of Keras and several outputs in half precision, where
  Keras casts in places of its own.
- Attention in float64: on JAX its softmax is float32.
- Averages of an optimizer that is also applied to some variables of a network alone: those of the
  others begin with the weights that they have when Treadle adds them, and in Keras with zeros.
- Structures in `keras.ops.cond`: on JAX, Keras sorts the keys of what branches return.
- Two sources and repeated calls with Keras callbacks, which have no words for unfinished epochs.
- Repeated calls that count steps: how many were trained on before the error depends on windows.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from .program import (
    CONTROLLED,
    CONTROLS,
    FRONTS,
    LOSSES,
    PREDICATES,
    ROWS,
    SETTINGS,
    STRUCTURES,
    Change,
    Control,
    Form,
    Memory,
    Network,
    Outputs,
    Part,
    Program,
    Second,
)

FEATURES = (
    "forms",  # more than one structure of batches
    "lists",  # one optimizer that is applied to several lists of variables
    "hook_constants",  # a kill after a hook changed a Python value
    "changes",  # hooks that change something
    "nonfinite",
    "precision",
    "lazy",
    "random",
    "conditions",
    "nested",  # gradients of gradients
    "rows",  # for_each
    "accumulation",
    "averages",
    "fronts",  # networks that begin with something else than Dense
    "callbacks",  # Keras'
    "replaced",  # hooks that replace a schedule
    "loops",  # `for` loops over `loop.epochs` and `loop.steps`
    "structures",  # batches and results in structures whose keys are not in order
    "derived",  # layers with tensors that they derive from their variables
    "inner_optimizers",  # in other ones
    "controls",  # control flow of `keras.ops`
    "float64",
    "outputs",  # several, with `treadle.Supervised`
    "sources",  # two, in calls one after the other, and in bodies of `loop.epochs`
    "changing",  # arrays that change between calls
    "settings",  # the factor of the losses in an object, whose values hooks change
    "memories",  # hooks with a state, which are added, removed and moved when a run resumes
    "retries",  # a source that fails once, and is read again
)

# Of some features: whether a program has it.
HAS: dict[str, Callable[[Program], bool]] = {
    "structures": lambda program: program.structured,
    "derived": lambda program: any(network.adapted for network in program.networks),
    "inner_optimizers": lambda program: any("(SGD(" in x for x in program.optimizers),
    "controls": lambda program: any(form.controls for form in program.forms),
    "float64": lambda program: program.precision == "float64",
    "outputs": lambda program: program.outputs is not None,
    "sources": lambda program: program.second is not None,
    "changing": lambda program: program.changing,
    "memories": lambda program: bool(program.memories),
    "retries": lambda program: program.retried is not None,
}

ACTIVATIONS = ("tanh", "softplus", "gelu", "sigmoid")

OPTIMIZERS = (
    "SGD(0.1)",
    "SGD(0.05, momentum=0.9)",
    "SGD(0.05, momentum=0.5, nesterov=True)",
    "Adam(0.02, epsilon=1e-3)",
    "Adam(0.02, epsilon=1e-3, amsgrad=True, clipvalue=0.1)",
    "AdamW(falling(0.05, 10), epsilon=1e-3, weight_decay=0.01)",
    "Nadam(0.02, epsilon=1e-3)",
    "RMSprop(0.02, epsilon=1e-3)",
    "RMSprop(0.02, epsilon=1e-3, momentum=0.5, centered=True)",
    "Adagrad(0.05, epsilon=1e-3)",
    "SGD(0.1, global_clipnorm=0.5)",
    "Adam(0.02, epsilon=1e-3, clipnorm=0.3)",
    "SGD(falling(0.2, 8), weight_decay=0.01)",
)

NESTED = (
    "Lookahead(SGD(0.05, momentum=0.9))",
    "Lookahead(Adam(0.02, epsilon=1e-3))",
    "TwoSteps(SGD(0.05, momentum=0.5), RMSprop(0.02, epsilon=1e-3))",
    "Lookahead(TwoSteps(SGD(0.02, momentum=0.9), SGD(falling(0.2, 8))))",
)

AVERAGING = (
    "SGD(0.1, use_ema=True, ema_momentum=0.8, ema_overwrite_frequency=3)",
    "Adam(0.02, epsilon=1e-3, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2)",
)

# Keras counts by batches, whatever the optimizer does in a branch.
ACCUMULATING = (
    "SGD(0.1, gradient_accumulation_steps=2)",
    "Adam(0.02, epsilon=1e-3, gradient_accumulation_steps=3)",
)


def some(values: Any) -> st.SearchStrategy[Any]:
    return st.sampled_from(tuple(values))


QUARTER = some((False, False, False, True))


@st.composite
def layers(draw: Callable[[Any], Any], features: frozenset[str], half: bool) -> tuple[str, ...]:
    made: list[str] = []
    kinds = ["dense", "dense", "layer-norm"]
    kinds += [] if half else ["batch-norm"]
    kinds += ["dropout", "dropout-seeded", "noise"] if "random" in features else []
    for _ in range(draw(st.integers(0, 3))):
        kind = draw(some(kinds))
        seed = draw(st.integers(1, 9)) if kind in ("dropout-seeded", "noise") else 0
        made.append(
            {
                "dense": lambda: (
                    f'layers.Dense({draw(some((3, 5)))}, "{draw(some(ACTIVATIONS))}"'
                    f"{draw(some(('', ', use_bias=False')))})"
                ),
                "layer-norm": lambda: "layers.LayerNormalization(epsilon=0.1)",
                "batch-norm": lambda: "layers.BatchNormalization(momentum=0.8, epsilon=0.1)",
                "dropout": lambda: "layers.Dropout(0.25)",
                "dropout-seeded": lambda seed=seed: f"layers.Dropout(0.25, seed={seed})",
                "noise": lambda seed=seed: f"layers.GaussianNoise(0.1, seed={seed})",
            }[kind]()
        )
    return tuple(made)


@st.composite
def networks(
    draw: Callable[[Any], Any], features: frozenset[str], half: bool, wide: bool, finite: bool
) -> Network:
    fronts = ["vector"]
    if "fronts" in features and not half:
        left_out = ("tokens-flat", "tokens-mean") if not finite else ()
        left_out += ("attention",) if wide else ()
        fronts += [front for front in FRONTS if front not in left_out]
    front, body = draw(some(fronts)), draw(layers(features, half))
    built = draw(st.booleans()) if "lazy" in features else True
    adapted = None
    if "derived" in features and built and not half and not front.startswith("tokens"):
        adapted = draw(some((*(None,) * 4, "Normalization", "Scaled")))
    return Network(
        front=front,
        body=body,
        built=built,
        frozen=has_two(front, body) and draw(QUARTER),
        regularized=draw(st.booleans()),
        average=built and "averages" in features and draw(some((False, False, True))),
        adapted=adapted,
    )


def has_two(front: str, body: tuple[str, ...]) -> bool:
    """Say whether there are weights before the last layer."""
    return front != "vector" or any("Dense" in x or "Normalization" in x for x in body)


@st.composite
def parts(
    draw: Callable[[Any], Any], features: frozenset[str], program: dict[str, Any], weighted: bool
) -> Part:
    made: tuple[Network, ...] = program["networks"]
    number = draw(st.integers(0, len(made) - 1))
    network = made[number]
    kinds = ["minimize", "minimize", "gradients"]
    if "nested" in features:
        # Embeddings have no gradient by their input; cuDNN apart, recurrent layers have. PyTorch
        # has no second derivative of its fused attention.
        fused = network.front == "attention"
        kinds += [] if network.of_tokens or fused else ["penalty"]
        kinds += ["inner"] if network.built and not fused else []
    # A row alone has no statistics, and no weight. What was not built is built by the objective,
    # so that its gradients are not known before.
    if "rows" in features and network.built and not network.has("BatchNorm") and not weighted:
        kinds += ["rows"]
    if "accumulation" in features:
        kinds += ["accumulate"]
    following = made[number + 1] if number + 1 < len(made) else None
    if following is not None and not following.of_tokens and network.built and following.built:
        kinds += ["chain"]
    averages = "use_ema" in program["optimizers"][number]
    two = has_two(network.front, network.body)
    if network.built and not network.frozen and not averages and two:
        kinds += ["parts"]
    only = draw(some((None, None, *PREDICATES))) if "conditions" in features else None
    kind, loss = draw(some(kinds)), draw(some(LOSSES))
    if only and program["controlled"] and draw(st.booleans()):
        return Part(kind, number, loss, only, by_keras=True)
    return Part(kind, number, loss, only, structured=program["structured"])


@st.composite
def forms(
    draw: Callable[[Any], Any],
    features: frozenset[str],
    program: dict[str, Any],
    kind: str,
    short: bool,
) -> Form:
    drawn = st.lists(
        parts(features, program, kind == "weighted"), min_size=1, max_size=1 if short else 2
    )
    learned = tuple(draw(drawn))
    noises = (None, None, "seeded", "unseeded") if "random" in features else (None,)
    noise, structure, made = draw(some(noises)), None, list[Control]()
    if program["structured"]:
        # The arrays of a source have all the same first axis.
        joined = program["source"] == "arrays"
        structure = draw(some(x for x in STRUCTURES if not (joined and x == "scalar")))
    if program["controlled"]:
        simple = learned[0].kind not in ("rows", "inner")
        for _ in range(draw(st.integers(1, 2))):
            function = draw(some(CONTROLS))
            place = draw(some(CONTROLS[function])) if simple else "outside"
            # Dropout may drop the NaN of a batch.
            contents = CONTROLLED if program["finite"] else ("variable", "metric")
            made.append(Control(function, place, draw(some(contents))))
    return Form(kind, learned, noise, structure, tuple(made))


@st.composite
def outputs(draw: Callable[[Any], Any]) -> Outputs:
    """Draw a model of two outputs."""
    losses = draw(some(("one", "each", "each", "some")))
    return Outputs(
        kind=draw(some(("list", "dict"))),
        losses=losses,
        optimizer=draw(some(OPTIMIZERS)),
        weights=losses == "each" and draw(st.booleans()),
        metrics=draw(some((None, "plain", "weighted"))),
        sample_weights=draw(st.booleans()),
        regularized=draw(st.booleans()),
    )


def with_one_list(form: Form) -> Form:
    """Return the form without parts that apply an optimizer to some variables of a network."""
    return replace(
        form,
        parts=tuple(
            replace(part, kind="minimize") if part.kind == "parts" else part for part in form.parts
        ),
    )


@st.composite
def changes(
    draw: Callable[[Any], Any], features: frozenset[str], program: dict[str, Any], steps: int
) -> tuple[Change, ...]:
    made: list[Change] = []
    # These have lists of variables that must stay as long as they are.
    fixed = any(
        part.kind in ("accumulate", "parts") for form in program["forms"] for part in form.parts
    )
    for _ in range(draw(some((0, 0, 1, 2)))):
        number = draw(st.integers(0, len(program["networks"]) - 1))
        network: Network = program["networks"][number]
        kinds = [("task.scale *= 2.0", True), ("task.scale = 0.5", True)]
        # Keras pairs averages with the remaining variables, and ignores the rest.
        averages = "use_ema" in program["optimizers"][number]
        rate = f"task.opt{number}.learning_rate"
        wraps = program["optimizers"][number].startswith(("Lookahead", "TwoSteps"))
        if "falling" not in program["optimizers"][number]:
            kinds += [(f"{rate} = 0.03", False)]
        elif "replaced" in features and not wraps:
            kinds += [(f"{rate} = falling(0.3, 6)", True)]
        if not fixed and not averages and not network.frozen and network.body:
            kinds += [(f"task.net{number}.layers[-2].trainable = False", True)]
        if "Lookahead" in program["optimizers"][number]:
            kinds += [(f"{rate} = 0.6", False)]
        if network.adapted:
            adapted = f"task.net{number}.layers[0].adapt(2.0 * known - 1.0)"
            kinds += [(adapted, False)] * 2
        if network.has("Dropout"):
            layer = f"next(x for x in task.net{number}.layers if isinstance(x, layers.Dropout))"
            kinds += [(f"{layer}.rate = 0.5", True)]
        code, constant = draw(some(kinds))
        made.append(Change(draw(st.integers(1, steps - 1)), code, constant))
    return tuple(made)


ONE_SOURCE = (
    (("epochs", 2, 0),),
    (("epochs", 1, 0), ("steps", 4, 0)),
    (("steps", 7, 0),),
    (("epochs", 1, 0),),
)
SEVERAL_CALLS = (
    *((("epochs", 1, 0), ("steps", 4, 0)), (("steps", 2, 0), ("epochs", 1, 0), ("steps", 3, 0))),
    *((("epochs", 2, 0), ("epochs", 1, 0)), (("steps", 4, 0), ("epochs", 2, 0))),
)


@st.composite
def calls(
    draw: Callable[[Any], Any], features: frozenset[str], program: dict[str, Any]
) -> dict[str, Any]:
    """Draw how the loop is called, and with which sources."""
    fifth, source = some((False, False, False, False, True)), program["source"]
    changing = "changing" in features and source == "arrays" and draw(st.booleans())
    rolls_back = program["nonfinite"] == "rollback"
    retried = None
    if "retries" in features and source == "function" and not rolls_back and draw(st.booleans()):
        retried = draw(st.integers(0, len(program["order"]) - 1))
    several = SEVERAL_CALLS if changing else ONE_SOURCE
    made = draw(some(x for x in several if x[0][0] == "epochs" or retried is None))
    second = None
    if "sources" in features and not rolls_back and draw(fifth):
        second = draw(seconds(program))
        call = st.tuples(
            some(("epochs", "steps", "break", "both")), st.integers(1, 4), st.booleans()
        )
        made = made[:1] if retried is not None else ()
        for unit, count, of in draw(st.lists(call, min_size=2, max_size=4 - len(made))):
            half = max(1, count // 2)
            made += ((unit, half if unit in ("epochs", "both") else count, int(of)),)
    return {"calls": made, "second": second, "changing": changing, "retried": retried}


@st.composite
def seconds(draw: Callable[[Any], Any], program: dict[str, Any]) -> Second:
    """Draw a second source, of the forms of the first one."""
    kinds = ["list", "function"]
    kinds += ["arrays"] if program["forms"][0].structure != "scalar" else []
    source = draw(some(kinds))
    form = st.integers(0, 0 if source == "arrays" else len(program["forms"]) - 1)
    order = [(number, ROWS) for number in draw(st.lists(form, min_size=2, max_size=4))]
    if draw(st.booleans()):
        order[-1] = (order[-1][0], draw(some((1, 3))))
    return Second(tuple(order), source, source == "arrays" and draw(st.booleans()))


@st.composite
def memories(draw: Callable[[Any], Any], program: dict[str, Any]) -> dict[str, Any]:
    """Draw hooks with a state for networks whose weights no averages replace when a call ends.

    A network that is not built has no weights before its first batch.
    """
    averages = ["use_ema" in optimizer for optimizer in program["optimizers"]]
    used = [
        number
        for number, network in enumerate(program["networks"])
        if network.built and not averages[number] and number in Program(**program).used()
    ]
    if not used or draw(some((False, False, True))):
        return {}
    made = tuple(
        Memory(
            identity,
            draw(some(used)),
            draw(some((0.05, -0.03))),
            draw(some((1, 1, 2))),
            draw(some(("always", "before", "after"))),
        )
        for identity in ("one", "two", "three")[: draw(st.integers(1, 3))]
    )
    return {"memories": made, "moved": draw(st.booleans())}


@st.composite
def callbacks(draw: Callable[[Any], Any], program: Program) -> str | None:
    """Draw a callback for the first network, which finds its optimizer in the task."""
    # A callback keeps the optimizer that the run began with, and sets its rate.
    own = "falling" not in program.optimizers[0] and not any(
        "opt0" in change.code for change in program.changes
    )
    kinds = ["stopping"]
    kinds += ["falling-rate", "falling-rate", "plateau"] if own else []
    kinds += ["averages"] if "use_ema" in program.optimizers[0] else []
    if 0 not in program.used() or not program.networks[0].built:
        return None
    return draw(some((None, None, *kinds)))


@st.composite
def programs(draw: Callable[[Any], Any], features: frozenset[str], short: bool) -> Program:
    """Draw a program that uses only these features, or a short one that is sooner compiled."""
    made: dict[str, Any] = {"seed": draw(st.integers(0, 99))}
    precisions = ["float32"] * 6
    if "precision" in features:
        precisions += ["mixed_bfloat16", "mixed_float16"]
    precisions += ["float64"] * 3 if "float64" in features else []
    made["precision"] = draw(some(precisions))
    half = made["precision"].startswith("mixed")
    if made["precision"] == "mixed_float16":
        made["scale"] = draw(some((2.0**10, 2.0**40)))
    nonfinite = None
    if "nonfinite" in features and not half:
        nonfinite = draw(some((None, None, None, "skip", "rollback")))
    count = draw(st.integers(1, 2 if short else 3))
    made["networks"] = tuple(
        draw(networks(features, half, made["precision"] == "float64", nonfinite is None))
        for _ in range(count)
    )
    choices = [*OPTIMIZERS]
    choices += AVERAGING if "averages" in features else []
    choices += ACCUMULATING if "accumulation" in features else []
    inner = "inner_optimizers" in features and draw(QUARTER)
    made["optimizers"] = tuple(
        draw(some(NESTED if inner and draw(some((True, True, False))) else choices))
        for _ in range(count)
    )
    made["finite"], made["nonfinite"] = nonfinite is None, nonfinite
    made["structured"] = "structures" in features and draw(QUARTER)
    made["controlled"] = "controls" in features and not half and draw(QUARTER)

    source = draw(some(("list", "arrays", "function")))
    kinds = ["plain"]
    if "forms" in features and source != "arrays":
        more = ["renamed", "narrow", "whole", "weighted", "wide"]
        kinds += draw(st.lists(some(more), max_size=1 if short else 2, unique=True))
    elif draw(st.booleans()):
        kinds = ["weighted"]
    made["source"] = source
    made["forms"] = tuple(draw(forms(features, made, kind, short)) for kind in kinds)
    del made["structured"], made["controlled"], made["finite"]
    if "outputs" in features and not half and draw(QUARTER):
        made["outputs"] = draw(outputs())
    if "lists" not in features:
        made["forms"] = tuple(map(with_one_list, made["forms"]))
    batches = draw(st.integers(3, 6))
    more_of = st.lists(
        st.integers(0, len(kinds) - 1), min_size=batches - len(kinds), max_size=batches - len(kinds)
    )
    each = draw(st.permutations([*range(len(kinds)), *draw(more_of)]))  # every form occurs
    order = [(form, ROWS) for form in each]
    if draw(st.booleans()):  # a short last batch
        order[-1] = (order[-1][0], draw(some((1, 3))))
    elif source != "arrays" and draw(st.booleans()):
        order[1] = (order[1][0], 2)
    made["order"] = tuple(order)
    made["shuffled"] = source == "arrays" and draw(st.booleans())
    made |= draw(calls(features, made))
    if nonfinite is not None:
        bad = draw(st.lists(st.integers(0, batches - 1), max_size=2, unique=True))
        # One batch at least is left to train on, and whole numbers cannot be NaN.
        made["bad"] = tuple(b for b in bad if kinds[order[b][0]] != "whole")
    made["validated"] = kinds[0] == "plain" and not half and draw(st.booleans())
    by_epochs = all(unit == "epochs" for unit, *_ in made["calls"])
    plain = made["second"] is None and made["retried"] is None and not made["validated"]
    if "loops" in features and by_epochs and nonfinite != "rollback" and plain:
        made["looped"] = draw(st.booleans())
    steps = Program(**made).steps
    if nonfinite == "rollback":
        steps = max(2, steps - 2 * len(made["bad"]))
    if "changes" in features:
        made["changes"] = draw(changes(features, made, steps))
    once = made["second"] is None and made["retried"] is None
    if "callbacks" in features and nonfinite != "rollback" and once:
        made["callback"] = draw(callbacks(Program(**made)))
    made["window"], made["other"] = draw(
        st.lists(some((None, 1, 2, 3, 5)), min_size=2, max_size=2, unique=True)
    )
    made["on_device"] = draw(some((None, True, False)))
    made["jit"] = draw(some((None, None, False)))
    made["every"], made["killed"] = draw(st.integers(1, 4)), draw(st.integers(1, steps - 1))
    if "settings" in features:
        made["settings"] = draw(some(SETTINGS))
    if "memories" in features and nonfinite != "rollback" and once and not made.get("callback"):
        made |= draw(memories(made))
    program = Program(**made)
    if "hook_constants" not in features and nonfinite == "rollback":
        made["changes"] = tuple(change for change in program.changes if not change.constant)
    elif "hook_constants" not in features:
        first = min((c.step for c in program.changes if c.constant), default=steps)
        made["killed"] = min(program.killed, first)  # what is saved then was not yet changed
    return Program(**made)

import sys
import traceback

import keras

import treadle

from . import part1, part2, part3, part4, part5, sound  # noqa
from .base import SOUND, WRONG

only = sys.argv[1:]
for name, (build, *_) in [*WRONG.items(), *SOUND.items()]:
    if only and name not in only:
        continue
    keras.backend.clear_session()
    keras.utils.set_random_seed(0)
    try:
        task, data, validation, steps = build()
        with treadle.Loop(task, console=False, options=treadle.Options(execution="eager")) as loop:
            h = loop.fit(data, steps=4, validation=None)
            if validation is not None:
                loop.evaluate(validation)
        print("ok", name, {k: [round(float(x), 4) for x in h.steps(k)] for k in h.step_names})
    except BaseException as e:
        print("FAIL", name, type(e).__name__, str(e)[:300])

import sys
import time

import keras

import treadle

from . import part1, part2, part3, part4, part5, sound  # noqa
from .base import SOUND, WRONG

only = sys.argv[1:]
for kind, programs in (("WRONG", WRONG), ("SOUND", SOUND)):
    for name, (build, sentence, *_) in programs.items():
        if only and name not in only:
            continue
        keras.backend.clear_session()
        keras.utils.set_random_seed(0)
        print(f"=== {kind} {name}: {sentence}", flush=True)
        started = time.process_time()
        try:
            task, data, validation, steps = build()
            how = {} if steps is None else {"steps": steps}
            if validation is not None:
                how["validation"] = validation
            found = treadle.doctor.examine(task, data, **how)
            print(found)
        except BaseException as e:
            print("RAISED", type(e).__name__, str(e)[:400])
        print(f"    {time.process_time() - started:.1f} s", flush=True)

import json, sys, time, traceback
sys.path.insert(0, "trial")
import keras, treadle
from common import WRONG, SOUND
import wrong_a, wrong_b, sound  # noqa
names = sys.argv[1:]
print(len(WRONG), len(SOUND))
if names == ["build"]:
    for kind in (WRONG, SOUND):
        for name, (make, *_) in kind.items():
            keras.backend.clear_session(); treadle.setup(seed=0)
            try:
                task, data, val, steps = make()
                with treadle.Loop(task, console=False, options=treadle.Options(execution="eager")) as loop:
                    h = loop.fit(data, steps=6)
                    if val is not None: loop.evaluate(val)
                print(name, [round(float(v),3) for v in list(h.steps(list(h.steps.names)[0] if hasattr(h.steps,'names') else 'loss'))])
            except Exception as e:
                print("FAIL", name, repr(e)[:300])
    sys.exit()
out = open("/work/tmp/trial-a/blind.txt" if not names else "/dev/stdout", "w")
for label, kind in (("WRONG", WRONG), ("SOUND", SOUND)):
    for name, (make, mistake, say) in kind.items():
        if names and name not in names: continue
        keras.backend.clear_session(); treadle.setup(seed=0)
        t = time.process_time()
        try:
            task, data, val, steps = make()
            how = {} if steps is None else {"steps": steps}
            f = treadle.doctor.examine(task, data, validation=val, **how)
            print(f"== {label} {name}: {mistake} | must: {say} ({time.process_time()-t:.1f}s)", file=out)
            for x in getattr(f, "findings", f): print("   -", x, file=out)
        except Exception as e:
            print(f"== {label} {name} EXCEPTION", traceback.format_exc()[-1500:], file=out)
        out.flush()

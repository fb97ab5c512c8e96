"""Writes sheets without source for a blind reading: `python -m tests.doctor.blind_sheets FOLDER`.

Half of 60 programs of the catalogue are wrong, the others sound. `FOLDER/sheets` holds a sheet for
each, without names of tasks and lines of code; a person who has not seen the programs says which
are wrong, and where. `FOLDER/key.json` holds the answers: name, whether it is wrong, culprits.
"""

import argparse
import json
import random
import re
from pathlib import Path

from tests.doctor.culprits import CULPRITS
from tests.doctor.differences import PAIRS, sheet_of

COUNT = 60


def main() -> None:
    """Write the sheets and the key."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=20261127)
    options = parser.parse_args()
    drawn = random.Random(options.seed)
    pairs = drawn.sample(PAIRS, COUNT)
    are_wrong = [number < COUNT // 2 for number in range(COUNT)]
    drawn.shuffle(are_wrong)
    (options.folder / "sheets").mkdir(parents=True)
    key = {}
    for number, (pair, wrong) in enumerate(zip(pairs, are_wrong, strict=True), 1):
        sheet, name = sheet_of(pair, wrong), f"{number:02d}"
        text = re.sub(r"\S*doctor\w*\.py:\d+", "task.py", str(sheet).replace(sheet.task, "Task"))
        (options.folder / "sheets" / f"{name}.txt").write_text(text)
        key[name] = [pair.program.__name__, wrong, CULPRITS[pair.program.__name__]]
    (options.folder / "key.json").write_text(json.dumps(key, indent=1))


if __name__ == "__main__":
    main()

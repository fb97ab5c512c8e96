"""The child process of one part of a drill: `python -m treadle.testing.certify.child FILE`.

The JSON file names the function that creates the task (`module:function` and its arguments) and the
part to run. That function sets the backend, so nothing here imports Keras before it is called.
"""

import importlib
import json
import sys
import traceback
from pathlib import Path
from typing import Any

OUTCOME = "outcome.json"


def main(order: Path) -> None:
    """Run the part that an order file describes, and write the outcome next to it."""
    asked: dict[str, Any] = json.loads(order.read_text())
    sys.path[:0] = [folder for folder in asked["path"] if folder not in sys.path]
    outcome: dict[str, Any] = {"error": None, "made": False}
    try:
        module, _, name = asked["maker"].partition(":")
        subject = getattr(importlib.import_module(module), name)(**asked["arguments"])
        from .drill import run  # late: it imports Keras

        outcome["made"] = True
        part, steps, only_resume = asked["part"], asked["steps"], asked["only_resume"]
        outcome |= run(subject, Path(asked["directory"]), part, steps, only_resume)
    except Exception as error:  # including the user's own errors: they are part of the result
        traceback.print_exception(error)
        outcome["error"] = {
            "type": type(error).__name__,
            "message": str(error),
            "notes": list(getattr(error, "__notes__", ())),
        }
    (order.parent / OUTCOME).write_text(json.dumps(outcome))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

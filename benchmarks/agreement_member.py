"""One process of `benchmarks.agreement`, which starts it: FOLDER [NAME…]."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.agreement import member

member(Path(sys.argv[1]), sys.argv[2:])

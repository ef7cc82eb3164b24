"""Makes the benchmarks' own packages importable, as they are beside a script that runs."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

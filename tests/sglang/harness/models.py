"""Models that tests run. They ship with the repository, or lie beside it."""

from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[3]

DEMO_MODEL = REPOSITORY / "models" / "demo-5m"
# Too large to ship. Tests that need this model skip where it is absent.
EVAL_MODEL = REPOSITORY.parent / "shared" / "models" / "eval-31m"

"""The models that tests run, which both ship with or beside the repository."""

from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[3]

DEMO_MODEL = REPOSITORY / "models" / "demo-5m"
# Too large to ship; tests that need it skip where it is absent.
EVAL_MODEL = REPOSITORY.parent / "shared" / "models" / "eval-31m"

"""Server with a small residual store and a smaller cache, overloaded by a crowd of requests."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from harness.faults import fault_environment
from harness.models import DEMO_MODEL
from harness.references import Setting
from harness.scenarios import FORCED_RETRACTION, STRICT_CHECKS
from harness.servers import ServerSpec
from harness.soak import CROWD_SIZE

CACHE_PAGES = 16
# 163 pages: a third of what a crowd of requests needs at once.
HOST_GB = 0.06


def crowded_server(schedule: str, fault_file: Path, prefix_folder: Path) -> ServerSpec:
    """Return the spec of a server that checks its memory at every step and the checksums of its
    store. The server retracts regularly, keeps prefixes in host memory and on disk and some of
    their anchors in KV memory, and has the faults that the file names."""
    flags = (
        f"--max-running-requests={CROWD_SIZE}",
        f"--kvspec-host-gb={HOST_GB}",
        # With this setting SGLang's own rule would admit every request.
        "--schedule-conservativeness=0.05",
        "--enable-priority-scheduling",
        "--chunked-prefill-size=512",
        "--enable-metrics",
        # After a flush prefixes are on disk only, and are loaded while other requests run.
        "--kvspec-prefix-host-gb=0.1",
        "--kvspec-prefix-hbm-fraction=0.005",
        f"--kvspec-prefix-dir={prefix_folder}",
        # Short drafts, so that answers take many rounds.
        *(("--kvspec-draft-len=4",) if schedule == "rounds" else ()),
    )
    environment = fault_environment(
        KVSPEC_FAULT_FILE=fault_file, KVSPEC_CACHE_PAGES=CACHE_PAGES, SGLANG_KVSPEC_DEBUG=1
    )
    spec = Setting("exact", "uniform4", schedule).server(DEMO_MODEL, *flags)
    return FORCED_RETRACTION.server(STRICT_CHECKS.server(replace(spec, environment=environment)))

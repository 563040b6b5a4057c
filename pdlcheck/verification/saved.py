"""The JSON file with the results of ``pdlcheck verify``."""

from __future__ import annotations

import json
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pdlcheck import __version__
from pdlcheck.report.records import (
    Agreement,
    PackageRanking,
    PropertyRecord,
    ReplicaRun,
    ReplicaTraining,
    SuiteRun,
    Verification,
    WorldTrial,
)

__all__ = ["is_verification", "read_verification", "save_verification"]

_MARK = "pdlcheck verify"


def save_verification(path: Path, found: Verification) -> None:
    """Write the results to a JSON file.

    Raises:
        OSError: the file cannot be written.
    """
    head = {"made_by": _MARK, "version": __version__, "datetime": datetime.now(UTC).isoformat(timespec="seconds")}
    path.write_text(json.dumps(head | asdict(found), indent=1) + "\n")


def is_verification(found: Any) -> bool:
    """Return whether the content of a JSON file comes from ``save_verification``."""
    return isinstance(found, dict) and found.get("made_by") == _MARK


def read_verification(found: dict[str, Any]) -> Verification:
    """Return the results in the content of such a file.

    Raises:
        KeyError, TypeError: a field is missing.
    """
    suites, packages, replicas = (dict(found[part] or {}) for part in ("suites", "packages", "replicas"))
    suites["records"] = [PropertyRecord(**one) for one in suites["records"]]
    packages |= {"agreements": [Agreement(**one) for one in packages["agreements"]]} if packages else {}
    replicas |= {"runs": [ReplicaRun(**one) for one in replicas["runs"]]} if replicas else {}
    return Verification(
        [WorldTrial(**one) for one in found["worlds"]],
        SuiteRun(**suites),
        PackageRanking(**packages) if packages else None,
        ReplicaTraining(**replicas) if replicas else None,
        found["held"],
        found["seconds"],
        found["left_out"],
    )

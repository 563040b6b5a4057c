"""The folders of the suites and benchmarks: beside this package, or in the repository of an editable installation."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

__all__ = ["installed_folder"]


def installed_folder(package: str) -> Path:
    """Return the folder of a package without importing it.

    Raises:
        FileNotFoundError: pdlcheck was imported from a folder, but is not installed.
    """
    found = find_spec(package)
    if found is None or not found.submodule_search_locations:
        raise FileNotFoundError(
            f"package {package} is not here: pdlcheck was imported without being installed; "
            "in the folder of its pyproject.toml, run: pip install -e ."
        )
    return Path(found.submodule_search_locations[0])

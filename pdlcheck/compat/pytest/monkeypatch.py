"""What a MonkeyPatch of pytest has changed."""

from __future__ import annotations

from typing import Any

from pdlcheck.compat.private import uses

__all__ = ["changed_attributes", "changed_items", "has_changed_folder", "has_changed_path", "note_path"]

_LOST = "monkeypatch on simulated ranks"


@uses("_pytest.monkeypatch.MonkeyPatch._setattr", lost=_LOST)
def changed_attributes(patches: Any) -> list[tuple[Any, str, Any]]:
    """Return the attributes that a MonkeyPatch has changed: owner, name and earlier value."""
    return patches._setattr  # type: ignore[no-any-return]


@uses("_pytest.monkeypatch.MonkeyPatch._setitem", lost=_LOST)
def changed_items(patches: Any) -> list[tuple[Any, Any, Any]]:
    """Return the items that a MonkeyPatch has changed: mapping, key and earlier value."""
    return patches._setitem  # type: ignore[no-any-return]


@uses("_pytest.monkeypatch.MonkeyPatch._cwd", lost=_LOST)
def has_changed_folder(patches: Any) -> bool:
    """Return whether a MonkeyPatch has changed the current folder."""
    return patches._cwd is not None


@uses("_pytest.monkeypatch.MonkeyPatch._savesyspath", lost=_LOST)
def has_changed_path(patches: Any) -> bool:
    """Return whether a MonkeyPatch has changed ``sys.path``."""
    return patches._savesyspath is not None


def note_path(patches: Any, path: list[str]) -> None:
    """Let a MonkeyPatch restore this ``sys.path`` when it undoes its changes."""
    patches._savesyspath = path

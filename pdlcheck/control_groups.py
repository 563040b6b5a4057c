"""The control groups that this process is in: where Linux limits what a container may use."""

from __future__ import annotations

from pathlib import Path

__all__ = ["control_groups"]


def control_groups(controller: str, root: Path = Path("/")) -> list[Path]:
    """The folders of this process's group and of the groups around it, of version 1 or 2, or both; some may not exist.

    A limit of any of them holds. Files are named otherwise in either version, so look for both. ``root`` is where
    ``proc`` and ``sys`` are mounted.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    folders: list[Path] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top = root / "sys/fs/cgroup"
        elif controller in controllers.split(","):
            top = root / "sys/fs/cgroup" / controller
        else:
            continue
        group = top / path.strip("/")
        folders += [folder for folder in (group, *group.parents) if folder.is_relative_to(top)]
    return folders

"""The control groups of this process, in which Linux limits the resources of a container."""

from __future__ import annotations

from pathlib import Path

__all__ = ["control_groups"]


def control_groups(controller: str, root: Path = Path("/")) -> list[Path]:
    """Return the folders of this process's control group and of the groups around it; some may not exist.

    The groups are of version 1, of version 2, or of both. The limit of each group applies. File names differ between
    the two versions, so look for both names.

    Args:
        controller: the resource, such as ``cpu``.
        root: the folder in which ``proc`` and ``sys`` are mounted.
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

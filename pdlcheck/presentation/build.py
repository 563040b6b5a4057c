"""The assembly of the sections of a report."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pdlcheck.bench.experiments import experiments
from pdlcheck.comparison.pairs import compare
from pdlcheck.comparison.runs import Run, short_names
from pdlcheck.presentation.document import Document, Section, Words
from pdlcheck.presentation.parts.compared import comparison_section
from pdlcheck.presentation.parts.machines import machines_section
from pdlcheck.presentation.parts.measured import experiments_section, ratios_section, rows_of, rows_section
from pdlcheck.presentation.parts.simulated import pictures_section
from pdlcheck.presentation.parts.verified import verification_section
from pdlcheck.report.records import Verification
from pdlcheck.report.tables import count

__all__ = ["build"]


def build(runs: Sequence[Run], verifications: Sequence[Verification], limit: float) -> Document:
    """Return the report of some runs, with each later run compared to the first, and of verifications.

    Args:
        runs: runs of benchmarks.
        verifications: results of ``pdlcheck verify``.
        limit: the ratio of times above which a row is slower.
    """
    summary: list[Words] = []
    sections: list[Section | None] = []
    for name, run in zip(_names(runs), runs, strict=True):
        rows = rows_of(run)
        found = experiments(rows)
        summary.append(_measured(name, run, [one.held for one in found]))
        sections.append(experiments_section(found, _titled("experiments", name)) if found else None)
    comparisons = [compare(runs[0], other, limit) for other in runs[1:]]
    for one in comparisons:
        base, other = short_names([one.base, one.other])
        part = comparison_section(one, limit, f"{other} beside {base}")
        summary += [block for block in part.blocks[:1] if isinstance(block, Words)]
        sections.append(part)
    for name, run in zip(_names(runs), runs, strict=True):
        sections.append(ratios_section(run, _titled("functions that took turns", name)))
        sections.append(rows_section(run, _titled("all rows", name)))
    for name, run in zip(_names(runs), runs, strict=True):
        pictures = pictures_section(rows_of(run))
        sections.append(pictures and Section(_titled(pictures.title, name), pictures.blocks))
    for place, verification in enumerate(verifications, 1):
        number = f" {place}" if len(verifications) > 1 else ""
        summary.append(_verified(verification, number))
        sections.append(verification_section(verification, f"verification{number}"))
    if runs:
        sections.append(machines_section(runs))
    return Document(_title(runs), summary, [one for one in sections if one is not None])


def _names(runs: Sequence[Run]) -> list[str]:
    """Return a name for each run; empty if there is only one run."""
    return short_names(runs) if len(runs) > 1 else [""] * len(runs)


def _titled(title: str, name: str) -> str:
    return f"{title}: {name}" if name else title


def _title(runs: Sequence[Run]) -> str:
    devices = dict.fromkeys(run.machine.get("devices") or run.machine.get("processor", "") for run in runs)
    return ": ".join(["pdlcheck", " beside ".join(filter(None, devices))] if any(devices) else ["pdlcheck"])


def _measured(name: str, run: Run, held: Iterable[bool | None]) -> Words:
    held = list(held)
    failing = held.count(False)
    words = f"{_titled('measured', name)}: {count(len(run.rows), 'row')}, {count(len(held), 'experiment')}"
    judged = len(held) - held.count(None)
    if judged:
        words += f"; {judged - failing} of {judged} models hold"
    return Words(words + ".", "bad" if failing else "good" if judged else "")


def _verified(found: Verification, number: str) -> Words:
    total, failing = len(found.suites.records), len(found.suites.failures)
    words = f"verified{number}: {count(total, 'property')}, {failing or 'none'} failing"
    return Words(words + (", all held." if found.held else ": NOT all held."), "good" if found.held else "bad")

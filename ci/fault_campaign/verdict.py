"""Comparison of pytest's report with the report that a fault requires."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fault_campaign.faults import Fault

__all__ = ["Run", "Verdict", "judge"]


@dataclass
class Run:
    """One pytest run.

    Args:
        records: the entries that the recorder wrote, in order.
        moments: fault number -> its time.
        notes: names of all notes that ranks have left: "next-7-1" if rank 1 ran the test after fault 7.
        exitcode: exit code of pytest, or minus the signal that ended it; None if the campaign had to kill it.
        output: the text that pytest printed.
        left: descriptions of the leftovers of the run.
        ended_s: time from the Ctrl-C to the end of the run, if there was one.
    """

    records: Sequence[Mapping[str, Any]]
    moments: Mapping[int, float]
    notes: frozenset[str]
    exitcode: int | None
    output: str
    left: Sequence[str]
    ended_s: float = 0.0


@dataclass
class Verdict:
    """The verdict on one fault; the fault passed if there is no trouble."""

    fault: Fault
    reported: bool = False
    healed: bool = False
    clean: bool = False
    seconds: float | None = None
    trouble: list[str] = field(default_factory=list)

    @property
    def held(self) -> bool:
        """Return whether every requirement held."""
        return not self.trouble


def judge(fault: Fault, run: Run, *, slow: float = 1.0) -> Verdict:
    """Compare the report with the fault; ``slow`` is the factor by which this machine may be slower."""
    fault = replace(fault, within_s=fault.within_s * slow)
    verdict = Verdict(fault)
    if run.exitcode is None:
        verdict.trouble.append("the run hung and was killed")
    if fault.where == "run":
        _judge_interrupt(verdict, run)
    else:
        _judge_test(verdict, run)
        _judge_next(verdict, run)
    _judge_leftovers(verdict, run)
    return verdict


def _judge_test(verdict: Verdict, run: Run) -> None:
    fault = verdict.fault
    trouble: list[str] = []
    reports = _reports(run, fault.name)
    failed = [report for report in reports if report["outcome"] == "failed"]
    moment = run.moments.get(fault.number)
    if fault.where == "idle":  # only the next test can show this fault
        if moment is None:
            trouble.append("the fault did not happen")
        trouble += _lacking(fault, "".join(record["said"] for record in _reports(run, f"{fault.name}_next")))
    elif not reports:
        trouble.append("the test was not reported")
    elif fault.silent:
        trouble += [f"{report['when']} {report['outcome']}: {report['text']}" for report in failed]
        trouble += ["the fault did not happen"] if moment is None else []
    elif moment is None:
        trouble.append("the fault did not happen; reported:\n" + "\n".join(report["text"] for report in reports))
    elif [report["when"] for report in failed] != [fault.phase]:
        phases = ", ".join(f"{report['when']} {report['outcome']}" for report in reports)
        trouble.append(f"the {fault.phase} should fail and nothing else; reported: {phases}")
        trouble += [report["text"] for report in failed]
    else:
        trouble += _lacking(fault, failed[0]["text"])
        verdict.seconds = failed[0]["at"] - moment
        if verdict.seconds > fault.within_s:
            trouble.append(f"reported after {verdict.seconds:.2f} s, not within {fault.within_s:g} s")
    verdict.reported = not trouble
    verdict.trouble += trouble


def _lacking(fault: Fault, text: str) -> list[str]:
    missing = [f"    {pattern}" for pattern in fault.expects if not re.search(pattern, text)]
    return ["\n".join(["the report lacks", *missing, "it says", text])] if missing else []


def _reports(run: Run, test: str) -> list[Mapping[str, Any]]:
    return [record for record in run.records if record["event"] == "report" and record["test"] == test]


def _judge_next(verdict: Verdict, run: Run) -> None:
    fault = verdict.fault
    name = f"{fault.name}_next"
    reports = _reports(run, name)
    wrong = [report for report in reports if report["outcome"] != "passed"]
    idle = [rank for rank in range(fault.world_size) if f"next-{fault.number}-{rank}" not in run.notes]
    verdict.healed = len(reports) == 3 and not wrong and not idle
    if not reports:
        verdict.trouble.append("the next test was not reported")
    elif idle and not wrong:
        verdict.trouble.append(f"the next test passed, and yet it did not run on ranks {idle}")
    elif not verdict.healed:
        said = "\n".join(f"{report['when']} {report['outcome']}: {report['text']}" for report in wrong)
        verdict.trouble.append(f"the next test did not pass:\n{said or 'it was not run to its end'}")


def _judge_interrupt(verdict: Verdict, run: Run) -> None:
    fault = verdict.fault
    verdict.seconds = run.ended_s
    if run.ended_s > fault.within_s:
        seconds = f"{run.ended_s:.2f} s after {fault.signo}, not within {fault.within_s:g} s"
        verdict.trouble.append(f"the run ended {seconds}")
    wrong = [record for record in run.records if record.get("outcome") not in (None, "passed")]
    if wrong:
        verdict.trouble.append("a test was blamed:\n" + "\n".join(f"{record['text']}" for record in wrong))
    if run.exitcode == 0:
        verdict.trouble.append("the run ended as if nothing had happened")
    # An interrupt before the first test hits the imports: Python may end without a report, and numpy makes an
    # ImportError of it.
    began = any(record["event"] == "test" for record in run.records)
    twice = bool(fault.action)  # the second Ctrl-C may cut pytest's output short
    if fault.kind == "kill-pytest":
        if run.exitcode != -getattr(signal, fault.signo):
            verdict.trouble.append(f"pytest ended with {run.exitcode}, not by {fault.signo}")
    elif began and not twice and (run.exitcode != 2 or "KeyboardInterrupt" not in run.output):
        verdict.trouble.append(f"pytest ended with {run.exitcode} and said\n{run.output[-2000:]}")
    verdict.reported = verdict.healed = not verdict.trouble


def _judge_leftovers(verdict: Verdict, run: Run) -> None:
    trouble = [f"the run left {thing}" for thing in run.left]
    for record in run.records:
        if record["event"] == "report" and record["test"].startswith(verdict.fault.name):
            trouble += [f"after {record['test']} there was {stray}" for stray in record["strays"]]
        if record["event"] == "end" and record["files"]:
            trouble.append("at its end pytest held open: " + ", ".join(record["files"]))
    verdict.clean = not trouble
    verdict.trouble += trouble

"""The example of local SGD runs under torchrun, learns, and draws."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from pdlcheck.primitives import function_samples

from ..clone import ROOT
from ..launched.test_launched import outside

EXAMPLE = ROOT / "examples" / "local_sgd.py"

if not EXAMPLE.is_file():
    pytest.skip("the examples are not installed: run this in a clone of the repository", allow_module_level=True)


def torchrun(folder, *options):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    path = os.pathsep.join(entry for entry in sys.path if entry)
    done = subprocess.run(
        [*command, str(EXAMPLE), *options],
        cwd=folder,
        env=outside() | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "TMPDIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_network_learns_on_ranks_with_uneven_shares_and_the_plot_is_text(tmp_path):
    text = torchrun(tmp_path, "--epochs", "12")
    error = re.search(r"2 ranks, mean squared error ([\d.]+)", text)
    assert error is not None, text
    assert float(error[1]) < 0.5  # the target's mean square is 5
    drawn = [line for line in text.splitlines() if "|" in line]
    assert len(drawn) == 20
    assert all("x" in line for line in drawn)


def drawn_lines(svg):
    """Map each label to its points in pixels, inside the axes; a line has the colour of its legend entry."""
    styled = {}
    for path, style in re.findall(r'<path d="([^"]+)"[^>]* style="([^"]*)"', svg):
        colour = re.search(r"fill: none; stroke: (#[0-9a-f]{6})", style)
        if colour is not None:
            points = [(float(x), float(y)) for x, y in re.findall(r"[ML] ([\d.]+) ([\d.]+)", path)]
            styled.setdefault(colour[1], []).append(points)
    labels = re.findall(r"<!-- (.*?) -->", svg)[-2:]
    pairs = [found for found in styled.values() if len(found) == 2]  # the line, and its piece in the legend
    return {label: line for label, (line, _) in zip(labels, pairs, strict=True)}


@pytest.mark.slow
def test_the_function_and_the_fit_are_drawn(tmp_path):
    pytest.importorskip("matplotlib", reason="the plot needs matplotlib: pip install 'pdlcheck[report]'")
    text = torchrun(tmp_path, "--epochs", "12", "--plot", "fit.svg")
    assert text.endswith("fit.svg\n")
    lines = drawn_lines((tmp_path / "fit.svg").read_text())
    assert list(lines) == ["sqrt(x) sin(3.14 x / 5)", "the network"]
    (left, _), *_, (right, _) = function = lines["sqrt(x) sin(3.14 x / 5)"]
    x, target = function_samples(2000)
    low, high = max(y for _, y in function), min(y for _, y in function)  # pixels are counted from the top

    def beside(points):
        """Yield each point's distance from the function, in the units of the axes."""
        for across, up in points:
            at = round((across - left) / (right - left) * (len(x) - 1))
            yield abs((up - low) / (high - low) * (target.max() - target.min()) + target.min() - target[at]).item()

    assert len(function) > 100
    assert max(beside(function)) < 0.05
    fit = lines["the network"]
    assert len(fit) > 20
    assert fit[0][0] == left
    assert fit[-1][0] == right
    away = list(beside(fit))
    assert sum(away) / len(away) < 0.7  # the function ranges from -4 to 4
    assert max(away) > 0.01, "the function is drawn twice"

"""Checks of PageRank, for any function from a graph to scores.

A check calls ``function(graph)``; bind other arguments first, for instance with ``functools.partial``. The function may
return an array, a tensor, a dict as networkx does, or an object with ``scores``. The graph may have any type that the
function takes, as long as it has ``src``, ``dst``, ``num_nodes`` and ``weights``.

The right scores are one vector: ``x = (1 - d) v + d (P x + m w)``. ``P[j, i]`` is the share of i's out-weight that goes
to j, and v is the teleport vector. m is the mass of x on nodes without out-weight, and w receives it. The weights of
repeated edges add up, and a self-loop is an edge. Without edges x = v; without nodes x is empty.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from pdlcheck.checks.diagnosis import Diagnosis
from pdlcheck.checks.message import Place, failure
from pdlcheck.checks.pagerank.oracle import MAX_DENSE_NODES, Float64, Oracle, diagnose, diagnose_sum
from pdlcheck.errors import CheckFailed, Inconclusive

__all__ = [
    "check_error_bound",
    "check_pagerank",
    "check_pagerank_agreement",
    "check_pagerank_relabelling",
    "check_transition_matrix",
    "require_tol",
]


def check_pagerank(
    function: Callable[[Any], Any],
    graph: Any,
    *,
    damping: float = 0.85,
    tol: float = 1e-8,
    personalization: Any = None,
    dangling: Any = None,
) -> None:
    """Check that ``function(graph)`` is the PageRank of ``graph``.

    The scores must be a distribution, a fixed point, and the dense solution. With more than 3000 nodes the check builds
    no dense matrix. One serial round must then move the scores by at most ``1 + d`` times the allowance, which bounds
    the error by ``(1 + d)/(1 - d)`` times the allowance.

    Args:
        function: graph -> scores, one per node.
        graph: has ``src``, ``dst``, ``num_nodes``, ``weights``.
        damping: the d that ``function`` uses.
        tol: L1 error that ``function`` may leave by stopping early: its own tolerance, or ``2 d**k`` after k rounds. On
            top, the check allows the error that rounding in the dtype of the scores can cause, for any order of
            additions.
        personalization: the vector v that ``function`` uses, one number per node; ``None`` is the uniform vector.
        dangling: the vector w that ``function`` uses, one number per node; ``None`` is v.

    Raises:
        AssertionError: names the worst node, its in-edges, and the likely cause if the numbers determine one.
        TypeError, ValueError: an argument of this check is wrong; ``function`` was not judged.
    """
    __tracebackhide__ = True
    tol, oracle = require_tol(tol), Oracle.of(graph, damping, personalization, dangling)
    name = _name(function)
    found, dtype = _scores(name, function(graph), graph)
    if oracle.num_nodes > MAX_DENSE_NODES:
        allowed = tol + oracle.rounding(found, dtype)
        # Scores within the allowance move by at most 1 + d times as much, so this limit never rejects right scores.
        what, expected, limit = "one serial round further", oracle.step(found), (1 + damping) * allowed
    else:
        what, expected = "the dense solution", oracle.solve()
        limit = allowed = tol + oracle.rounding(expected, dtype)
    _require_equal(name, found, expected, limit, oracle, what, dtype)
    negative = np.flatnonzero(found < 0)
    if negative.size:
        node = int(negative[0])
        first = f"{name}: node {node} holds {found[node]:.6g}, a rank is not negative"
        raise _failed(first, [], oracle, dtype)
    total = float(found.sum())
    if oracle.num_nodes and abs(total - 1) > allowed:
        first = f"{name}: the scores sum to {total:.12g}, must be 1 within {allowed:.1e}"
        raise _failed(first, [("likely cause", diagnose_sum(oracle, found, dtype))], oracle, dtype)


def check_pagerank_agreement(
    functions: Mapping[str, Callable[[Any], Any]] | Sequence[Callable[[Any], Any]],
    graph: Any,
    *,
    damping: float = 0.85,
    tol: float = 1e-8,
) -> float:
    """Check that all ``functions`` give the same scores, and return the largest L1 distance of a pair.

    Each pair may differ by ``2 tol`` and rounding. The check works on graphs of any size, because it builds no dense
    matrix.

    Raises:
        AssertionError: names two functions that disagree, and the node at which they differ most.
        ValueError: there are fewer than two functions.
    """
    __tracebackhide__ = True
    named = dict(functions) if isinstance(functions, Mapping) else {_name(f): f for f in functions}
    if len(named) < 2:
        raise ValueError(f"functions must be two or more with distinct names, got {list(named)}")
    tol, oracle = require_tol(tol), Oracle.of(graph, damping)
    results = {name: _scores(name, function(graph), graph) for name, function in named.items()}
    worst = 0.0
    for i, (one, (first, one_type)) in enumerate(results.items()):
        for other, (second, other_type) in list(results.items())[i + 1 :]:
            dtype = max(one_type, other_type, key=lambda kind: float(np.finfo(kind).eps))
            allowed = 2 * (tol + oracle.rounding(first, dtype))
            _require_equal(one, first, second, allowed, oracle, f"{other}'s score", dtype)
            worst = max(worst, float(np.abs(first - second).sum()))
    return worst


def check_pagerank_relabelling(
    function: Callable[[Any], Any],
    graph: Any,
    relabelled: Any,
    permutation: Sequence[int],
    *,
    damping: float = 0.85,
    tol: float = 1e-8,
) -> None:
    """Check that renaming the nodes permutes the scores.

    Node ``i`` of ``graph`` must be ``permutation[i]`` in ``relabelled``. The check needs no oracle, so it holds for any
    function that ranks nodes by their edges alone.
    """
    __tracebackhide__ = True
    tol, oracle = require_tol(tol), Oracle.of(graph, damping)
    name = _name(function)
    new = np.asarray(permutation, np.int64)
    _require_relabelled(oracle, Oracle.of(relabelled, damping), new)
    before, dtype = _scores(name, function(graph), graph)
    after, _ = _scores(name, function(relabelled), relabelled)
    allowed = 2 * (tol + oracle.rounding(before, dtype))
    what = "the score of the same node under its new id"
    _require_equal(name, before, after[new], allowed, oracle, what, dtype)


def check_error_bound(
    function: Callable[[Any], Any],
    graph: Any,
    *,
    damping: float = 0.85,
    tol: float = 1e-8,
    personalization: Any = None,
    dangling: Any = None,
    reachable: bool = False,
) -> None:
    """Check that ``error_bound`` bounds the true L1 error, and that ``converged`` means a bound of at most ``tol``.

    ``function(graph)`` returns an object with ``scores``, ``error_bound`` and ``converged``. The true error is the
    distance to the dense solution, which is known to about ``n * 2e-16 / (1 - d)``. The check cannot judge a bound
    below that. With ``reachable``, the result must have converged. Without it, a solver that never reports convergence
    passes.

    Raises:
        AssertionError: the bound does not hold, ``converged`` contradicts it, or ``converged`` is False though ``tol``
            is ``reachable``.
        Inconclusive: the graph is too large for the dense solution.
    """
    __tracebackhide__ = True
    tol, oracle = require_tol(tol), Oracle.of(graph, damping, personalization, dangling)
    if oracle.num_nodes > MAX_DENSE_NODES:
        raise Inconclusive(f"check_error_bound: {oracle.num_nodes} nodes are too many to know the true error of")
    name, result = _name(function), function(graph)
    found, dtype = _scores(name, result, graph)
    expected = oracle.solve()
    error = float(np.abs(found - expected).sum())
    bound = float(result.error_bound)
    known = (oracle.num_nodes + 8) * 2.3e-16 / (1 - damping)
    details = [("true error", f"{error:.3e}"), ("converged", str(bool(result.converged)))]
    if not error <= bound + known:
        cause: Diagnosis | str = diagnose(oracle, found, expected, bound)
        step = float(np.abs(oracle.step(found) - found).sum())
        if step <= bound:
            cause = f"the bound is a step ({step:.1e} now); the error can be d/(1 - d) times the last step"
        first = f"{name}: error_bound is {bound:.3e}, the true L1 error is {error:.3e}"
        raise _failed(first, [*details, ("likely cause", cause)], oracle, dtype)
    if bool(result.converged) != (bound <= tol):
        first = f"{name}: converged is {bool(result.converged)} with error_bound {bound:.3e}, tol is {tol:.1e}"
        raise _failed(first, details, oracle, dtype)
    if reachable and not result.converged:
        first = f"{name}: error_bound is {bound:.3e} in the end, tol is {tol:.1e}, which can be reached"
        raise _failed(first, details, oracle, dtype)


def check_transition_matrix(function: Callable[[Any], Any], graph: Any) -> None:
    """Check that ``function(graph)`` is the N x N matrix whose column i holds the shares that node i sends.

    Rows are destinations. A column sums to 1, or to 0 for a node without out-weight.

    Raises:
        AssertionError: names the first wrong column or entry.
    """
    __tracebackhide__ = True
    oracle, name = Oracle.of(graph, 0.0), _name(function)
    matrix = _array(function(graph))
    n = oracle.num_nodes
    if matrix.shape != (n, n):
        raise failure(f"{name}: the matrix has shape {matrix.shape}, expected ({n}, {n})")
    expected = oracle.matrix()
    degree = np.bincount(oracle.src, minlength=n)
    eps = float(np.finfo(matrix.dtype if matrix.dtype.kind == "f" else np.float64).eps)
    allowed = eps * (4 + degree)
    due = (oracle.out > 0).astype(np.float64)
    sums = matrix.sum(axis=0, dtype=np.float64)
    wrong = np.flatnonzero(~(np.abs(sums - due) <= allowed))
    if wrong.size:
        i = int(wrong[0])
        cause = "repeated edges or self-loops count in the degree but not in the sum, or the reverse"
        if np.abs(matrix.sum(axis=1) - (oracle.out > 0)).max() <= allowed.max():
            cause = "the rows sum to 1: transposed"
        details = [("out-edges", _edges_of(oracle, i, out=True)), ("likely cause", cause)]
        first = f"{name}: column {i} sums to {sums[i]:.12g}, expected {due[i]:.0f}"
        raise _failed(first, details, oracle, None)
    bad = np.argwhere(~(np.abs(matrix - expected) <= allowed))
    if bad.size:
        j, i = (int(k) for k in bad[0])
        details = [("out-edges", _edges_of(oracle, i, out=True))]
        first = f"{name}: entry ({j}, {i}) is {matrix[j, i]:.12g}, node {i} sends node {j} {expected[j, i]:.12g}"
        raise _failed(first, details, oracle, None)


def require_tol(tol: Any) -> float:
    """Return ``tol`` as a float.

    Raises:
        ValueError: ``tol`` is not a finite number of 0 or more.
    """
    if isinstance(tol, bool) or not isinstance(tol, int | float | np.floating | np.integer) or not 0 <= tol < np.inf:
        raise ValueError(f"tol must be a number of 0 or more, the L1 error that is allowed, got {tol!r}; 1e-8 is usual")
    return float(tol)


def _require_equal(
    name: str,
    found: Float64,
    expected: Float64,
    allowed: float,
    oracle: Oracle,
    what: str,
    dtype: np.dtype[Any],
) -> None:
    """Raise, with the worst node, if the L1 distance is above ``allowed``. NaN is above every allowance."""
    __tracebackhide__ = True
    difference = np.abs(found - expected)
    distance = float(difference.sum())
    if distance <= allowed:
        return
    node = int(np.argmax(np.where(np.isnan(difference), np.inf, difference)))
    right = expected if oracle.num_nodes > MAX_DENSE_NODES else oracle.solve()
    cause: Diagnosis | str = diagnose(oracle, found, right, allowed)
    if isinstance(cause, Diagnosis) and cause.cause is None and right is not expected:
        other = diagnose(oracle, expected, right, allowed)
        if other.cause or other.hints:
            cause = f"{what} is the wrong one; {other}"
    details = [
        ("in-edges", _edges_of(oracle, node, out=False)),
        ("distance", f"sum |found - expected| = {distance:.3e}, allowed {allowed:.1e}"),
        ("sum", f"{found.sum():.12g}"),
        ("likely cause", cause),
    ]
    first = f"{name}: node {node} holds {found[node]:.12g}, {what} is {expected[node]:.12g}"
    place = Place(None, "scores", (node,), float(found[node]), float(expected[node]))
    raise _failed(first, details, oracle, dtype, place)


def _require_relabelled(graph: Oracle, relabelled: Oracle, new: Any) -> None:
    moved = sorted(zip(new[graph.src].tolist(), new[graph.dst].tolist(), graph.weights.tolist(), strict=True))
    there = zip(relabelled.src.tolist(), relabelled.dst.tolist(), relabelled.weights.tolist(), strict=True)
    if graph.num_nodes != relabelled.num_nodes or moved != sorted(there):
        raise ValueError("relabelled must be graph with node i renamed to permutation[i]; its edges are others")


def _name(function: Any) -> str:
    while isinstance(function, partial):
        function = function.func
    return str(getattr(function, "__name__", type(function).__name__))


def _array(values: Any) -> Any:
    if hasattr(values, "detach"):
        values = values.detach().cpu()
    return np.asarray(values.todense() if hasattr(values, "todense") else values)


def _scores(name: str, result: Any, graph: Any) -> tuple[Float64, np.dtype[Any]]:
    """Return the scores in ``result`` as float64, and their original dtype."""
    __tracebackhide__ = True
    result = getattr(result, "scores", result)
    if isinstance(result, Mapping):
        names = getattr(graph, "names", None)
        nodes = range(graph.num_nodes) if names is None else names
        missing = [node for node in nodes if node not in result]
        if missing:
            raise failure(f"{name}: no score for node {missing[0]!r}, one of {len(missing)} without")
        result = [result[node] for node in nodes]
    try:
        scores = _array(result)
    except (TypeError, ValueError) as error:
        kind = type(result).__qualname__
        raise failure(f"{name}: returned a {kind}, expected one score per node ({error})") from error
    if scores.dtype.kind == "c":
        if scores.imag.any():
            node = int(np.flatnonzero(scores.imag.ravel())[0])
            raise failure(f"{name}: node {node} holds {scores.ravel()[node]:.6g}, a score is a real number")
        scores = scores.real
    if scores.shape != (graph.num_nodes,):
        raise failure(f"{name}: the scores have shape {scores.shape}, expected one per node, ({graph.num_nodes},)")
    dtype = scores.dtype if scores.dtype.kind == "f" else np.dtype(np.float64)
    return scores.astype(np.float64), dtype


def _edges_of(oracle: Oracle, node: int, *, out: bool) -> str:
    """Return the edges that enter (or leave) ``node``, as text: ``0 -> 3 (x2), 1 -> 3``."""
    here = np.flatnonzero((oracle.src if out else oracle.dst) == node)
    pairs: dict[tuple[int, int], int] = {}
    for e in here:
        pair = int(oracle.src[e]), int(oracle.dst[e])
        pairs[pair] = pairs.get(pair, 0) + 1
    text = [f"{u} -> {v}" + (f" (x{count})" if count > 1 else "") for (u, v), count in pairs.items()]
    return ", ".join(text[:8]) + (f", ... ({len(here)} in all)" if len(text) > 8 else "") or "none"


def _failed(
    first: str, details: Sequence[tuple[str, object]], oracle: Oracle, dtype: Any, place: Place | None = None
) -> CheckFailed:
    """Return the error with the details, the case, and the edges of a small graph."""
    case = f"num_nodes={oracle.num_nodes} num_edges={len(oracle.src)} damping={oracle.damping:g}"
    case += f" dangling={int((oracle.out == 0).sum())}" + (f" dtype={dtype}" if dtype is not None else "")
    rows = {label.replace(" ", "_"): text or None for label, text in details}
    if len(oracle.src) <= 12:
        edges = ", ".join(f"{u} -> {v}" for u, v in zip(oracle.src, oracle.dst, strict=True)) or "none"
        return failure(first, place, **rows, case=case, edges=edges)
    return failure(first, place, **rows, case=case)

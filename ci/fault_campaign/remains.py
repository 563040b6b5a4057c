"""Faults in which a rank leaves something behind, inside or outside its process, and no later test may fail."""

from __future__ import annotations

from fault_campaign.faults import Base, Fault

__all__ = ["flood", "left_on", "orphan", "shared_memory"]

_LEFT_ON = [
    "torch.set_default_dtype(torch.float64)",
    "torch.use_deterministic_algorithms(True)",
    "torch.set_grad_enabled(False)",
    "Counting().__enter__()",
    "torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: 1 / 0).__enter__()",
    "torch._C._functorch._vmap_increment_nesting(2, 'error')",
    "sys.stdout = sys.stderr = None",
    "os.environ.clear()",
    "os.chdir(gone())",
    "sys.path.clear()",
    "signal.signal(signal.SIGTERM, signal.SIG_IGN)",
    "os.umask(0o777)",
    "threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()",
]
_OF_A_PROCESS = ("sys.stdout", "os.environ", "os.chdir", "sys.path", "signal.", "os.umask", "threading.")


def left_on(base: Base) -> Fault:
    """Change state of the process; simulated ranks share it with the controller and must not change it."""
    choices = [one for one in _LEFT_ON if base.has_processes or not one.startswith(_OF_A_PROCESS)]
    action = base.rng.choice(choices)
    return base.anywhere([action], where=base.body_or_controller, moment="after", silent=True, within_s=0.0)


def orphan(base: Base) -> Fault:
    """Leave a process behind: a live one, in its own session or in the rank's, or a zombie."""
    action = base.rng.choice(["orphan(session=True)", "orphan(session=False)", "os.fork() or os._exit(0)"])
    return base.anywhere([action], where=base.body_or_controller, silent=True, within_s=0.0)


def shared_memory(base: Base) -> Fault:
    """Kill the rank before it gives its shared memory back."""
    action = base.rng.choice(["kept.append(SharedMemory(create=True, size=4096))", "kept.append(Semaphore())"])
    return base.anywhere([action, "os.kill(os.getpid(), signal.SIGKILL)"], base.killed_by("SIGKILL"))


def flood(base: Base) -> Fault:
    """Write more output than any process reads, and then raise."""
    words = f"fault {base.number} on rank {base.rank}"
    ways = ["print('x' * 99)", "os.write(1, b'y' * 99 + b'\\n')", "print('z' * 99, file=sys.stderr)"]
    writing = base.rng.choice(ways)
    raising = f"raise ValueError({words!r})"
    actions = [f"for _ in range(200_000): {writing}", f"now({base.number})", raising]
    messages = [f"ValueError: {words}", base.note]
    messages += [r"bytes of output are left out"] if "os.write" in writing else []
    return base.anywhere(actions, *messages, where=base.body_or_controller, within_s=4.0)

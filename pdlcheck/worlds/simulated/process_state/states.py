"""The list of the state that each simulated rank has for itself.

One more is a class with the protocol of ``protocol.py``, and one line here.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from pdlcheck.worlds.simulated.process_state.context_variables import ContextVariables
from pdlcheck.worlds.simulated.process_state.default_dtype import DefaultDtype
from pdlcheck.worlds.simulated.process_state.device_streams import DeviceState
from pdlcheck.worlds.simulated.process_state.environment import Environment
from pdlcheck.worlds.simulated.process_state.exception_hook import ExceptionHook
from pdlcheck.worlds.simulated.process_state.flags import Flags
from pdlcheck.worlds.simulated.process_state.numpy_stream import NumpyStream
from pdlcheck.worlds.simulated.process_state.observed_globals import OBSERVED
from pdlcheck.worlds.simulated.process_state.patches import TorchPatches
from pdlcheck.worlds.simulated.process_state.protocol import ProcessState
from pdlcheck.worlds.simulated.process_state.python_stream import PythonStream
from pdlcheck.worlds.simulated.process_state.stdio import Stdio
from pdlcheck.worlds.simulated.process_state.thread_count import ThreadCount
from pdlcheck.worlds.simulated.process_state.thread_settings import ThreadSettings
from pdlcheck.worlds.simulated.process_state.torch_globals import TorchGlobals
from pdlcheck.worlds.simulated.process_state.torch_stream import TorchStream

__all__ = ["STATES", "States"]


class States:
    """Pieces of state, with the calls that a switch makes.

    Args:
        pieces: the pieces, in the order in which they are put in force. They are captured in the opposite order.
    """

    def __init__(self, pieces: Iterable[ProcessState]) -> None:
        self.pieces = tuple(pieces)
        switched = [piece for piece in self.pieces if piece.at_switches]
        self.applies = tuple([piece.apply for piece in switched])  # bound methods, because a switch is frequent
        self.captures = tuple([piece.capture for piece in reversed(switched)])


STATES: Final = States((
    TorchStream(),
    DeviceState(),
    PythonStream(),
    NumpyStream(),
    DefaultDtype(),
    ThreadSettings(),
    Flags(),
    ContextVariables(),
    ThreadCount(),
    ExceptionHook(),
    Environment(),
    Stdio(),
    TorchGlobals(),
    OBSERVED,
    TorchPatches(),  # last, because its changes may replace functions that the others call
))  # fmt: skip

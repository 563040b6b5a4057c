"""The ticket of a rank's process: where the controller listens, and the key that it asks for."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

__all__ = ["VARIABLE", "Ticket", "ticket_of"]

VARIABLE = "PDLCHECK_TICKET"  # an environment variable: other users of a machine can read command lines


@dataclass(frozen=True, slots=True)
class Ticket:
    """What a process needs to become the process of a rank.

    Args:
        rank: the rank that it forks.
        host, port: the address at which the controller listens.
        key: the secret of the world, in hexadecimal.
        seed: the hash seed of the rank is derived from it.
    """

    rank: int
    host: str
    port: int
    key: str = field(repr=False)
    seed: int

    def variables(self) -> dict[str, str]:
        """Return the environment variables that hand the ticket over."""
        return {VARIABLE: json.dumps(asdict(self))}


def ticket_of(environment: Mapping[str, str]) -> Ticket:
    """Return the ticket in these environment variables.

    Raises:
        ValueError: there is none, or it is damaged.

    Example:
        >>> ticket = Ticket(1, "10.0.0.2", 4000, "5e", 0)
        >>> ticket_of(ticket.variables()) == ticket
        True
    """
    text = environment.get(VARIABLE)
    if text is None:
        raise ValueError(
            f"{VARIABLE} is not set: a world starts this program, with the variables that its function gets; "
            "it is of no use on its own"
        )
    try:
        return Ticket(**json.loads(text))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{VARIABLE} is damaged; pass it on as it is: {error}") from error

"""The environment variable that keeps a pytest started inside a rank, or inside a launch, from joining the launch."""

__all__ = ["INSIDE"]

INSIDE = "PDLCHECK_INSIDE"  # set in ranks, and in the processes of a launch that form one session

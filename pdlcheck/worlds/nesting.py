"""The variable that tells a pytest started inside a rank, or inside a launch, that it is no member of the launch."""

__all__ = ["INSIDE"]

INSIDE = "PDLCHECK_INSIDE"  # set in ranks, and in the processes of a launch that are one session

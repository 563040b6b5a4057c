"""Numbers that ranks compute together about samples."""

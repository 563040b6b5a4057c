"""``pdlcheck report``: runs and verifications as a page, as Markdown and in the terminal."""

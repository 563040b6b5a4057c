"""The command ``pdlcheck report``: it shows runs and verifications as a page, as Markdown or in the terminal."""

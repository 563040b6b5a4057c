"""The repository: its architecture, pages, commands and examples."""

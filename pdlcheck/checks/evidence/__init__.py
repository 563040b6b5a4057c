"""What a subject does while it runs: evidence for the cause of a failure, gathered without a change of user code."""

"""The code that runs in rank processes, and in the server and the templates that fork them."""

"""Which tests there are: on which worlds, of which sizes, with which options."""

"""The checks reject broken subjects; the plugin, the worlds and the command are tested from outside."""

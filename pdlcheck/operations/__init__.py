"""The operations of ``torch.distributed``: one file for each, with all that is particular to it.

``table.OPERATIONS`` has them by name. A new operation is a new file of this folder: the table finds it. The other files
hold what several operations share. Nothing here depends on a world.
"""

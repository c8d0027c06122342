"""Where the two twins differ, and nothing else: tasks or threads, and how bytes reach Redis.

`aio` and `threads` offer the same names, `aio_wire` and `threads_wire` too.
"""

"""What can be measured: one class for each library and way of use, opened by name.

Rules of this package:

1. A contender has ``close()`` and those of ``acquire``/``release``, ``job``, ``write`` and
   ``enqueue`` that it can do; all are coroutines if ``ASYNC`` is true. What it lacks is an error.
2. A lock's object is made for each acquisition, as a request handler makes it.
3. ``prepare(op, names)`` may get ready what that operation needs for those names; it is not
   measured.
4. Only what its own environment has is imported, so each library has a module of its own.
"""

"""What runs inside a worker process. Started by path: here modules import each other alone."""

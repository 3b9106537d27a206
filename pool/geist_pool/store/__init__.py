"""Contexts as objects in POSIX shared memory."""

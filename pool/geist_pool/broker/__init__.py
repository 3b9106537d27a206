"""The broker: decides in machine.py, acts in loop.py."""

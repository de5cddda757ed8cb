"""The bus of Tracewire: its messages and values, the streams they travel on, and what is folded from them.

Both sides import this package and it imports neither of them. Importing it, or any module of it, loads no Redis client
and no NumPy: both come with their first use.
"""

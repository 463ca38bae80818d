"""Horovod's names: the alias of its modules, and its environment variables."""

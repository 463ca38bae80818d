"""Horovod's names: the alias that answers for its modules, and its environment variables."""

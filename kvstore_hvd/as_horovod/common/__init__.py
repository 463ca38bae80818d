"""``horovod.common``: what programs import from there."""

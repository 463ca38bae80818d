"""``horovod.runner.util``: what programs import from there."""

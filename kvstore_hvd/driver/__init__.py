"""The launcher of elastic jobs: who takes part in which epoch, and the processes that it takes."""

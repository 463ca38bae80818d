"""The launcher of elastic jobs: who takes part in which generation, and the processes that it takes."""

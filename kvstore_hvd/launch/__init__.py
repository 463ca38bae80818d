"""kvhvdrun: its options, and elastic jobs: who takes part in which generation, and the processes that it takes."""

"""kvhvdrun and `run`: options, the decisions about a job, its daemons and processes."""

"""The parts of kvhvdrun: processes, output, and the loop that watches both."""

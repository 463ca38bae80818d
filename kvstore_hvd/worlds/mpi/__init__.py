"""MPI as the way by which workers find each other, and as what tells of the dead."""

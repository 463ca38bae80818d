"""How the workers of a world talk: one interface, one module for each kind of world."""

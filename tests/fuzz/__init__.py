"""Random programs of collectives, a model of what they must give, and what runs both against each other."""

"""The head's real code under a cluster that exists on paper: fake agents and engines in simulated time."""

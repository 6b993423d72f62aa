"""Which replica computes a request: what is known of each replica, and the choice."""

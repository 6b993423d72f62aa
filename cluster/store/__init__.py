"""What a head must remember over a restart, and over its own end."""

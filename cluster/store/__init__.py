"""What a head must remember over a restart."""

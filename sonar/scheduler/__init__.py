"""Which request computes how many tokens in which step, and what a step's tokens mean for it. Torch-free, no clock."""

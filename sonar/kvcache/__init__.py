"""Bookkeeping of the paged KV cache: which block holds what, who uses it, what can be shared. Torch-free."""

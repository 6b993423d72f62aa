"""The ranks of one replica: which part of the model each holds, and how they reach each other.

`shard_map` and `stages` are pure and torch-free; `groups` owns torch's process groups; `store` is their rendezvous
through the head; `ring` and `step_link` carry the lead's batches. Nothing here knows requests or scheduling.
"""

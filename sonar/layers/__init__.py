"""Parts that decoders are built from: each asks the weight source for its tensors by name and holds prepared ops.

Plain classes and closures, no `torch.nn.Module`: at one token a step the cost of a call counts. Tensor names carry the
shape suffixes of `sonar.ops.table`. A shard of a layer is a slice of its named matrices: along N for projections into
heads or intermediate features, along K for those back to the hidden size.
"""

"""Moving blocks of the KV cache between replicas: transports, layouts, and the exchange that uses them. Torch-free."""

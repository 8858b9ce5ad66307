"""What a cache costs in quality, measured through the real engine: `oscar eval`, and its helpers.

windows      held-out text as windows of one length
methods      what is compared, each as a KV cache dtype and a sidecar
engine       vLLM in this process, forced through the cache, its hidden states recorded
metrics      KL divergence to the BF16 cache, perplexity, agreement
drift        whether a text is still what the sidecar was calibrated on
report       table, JSON, plot
"""

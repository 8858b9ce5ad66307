"""What a cache costs in quality, measured through the real engine: `oscar eval`, and its helpers.

windows      held-out text as windows of one length
methods      what is compared, each as a KV cache dtype and a sidecar
codecs       how other methods store rows, and
rewriting    how these get into vLLM's BF16 cache
engine       vLLM in this process, forced through the cache, its hidden states recorded
listening    the hidden states of answers, free or forced
metrics      KL divergence to the BF16 cache, perplexity, agreement
measure      methods on texts
needle       methods on needles in haystacks
generation   methods on chats, answered freely
serving      needles and chats through a server's API
drift        whether a text is still what the sidecar was calibrated on
report       tables and pictures
"""

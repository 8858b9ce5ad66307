"""Everything that touches vLLM. A new vLLM release changes this package and nothing else."""

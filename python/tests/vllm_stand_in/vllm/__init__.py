"""What test_vllm.py needs of vLLM 0.32, with its names: stands in for it where it is not installed."""

"""Would the servers take it? A checkpoint is held against what the loaders of vLLM and SGLang ask for."""

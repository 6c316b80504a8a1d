"""The built-in inference engine: Qwen3, Qwen2, Llama, Mistral, GLM-4 and Qwen3-MoE models in plain torch, served over
SGLang's HTTP API.
"""

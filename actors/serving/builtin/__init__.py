"""The built-in inference engine: Qwen3, Qwen2 and Llama models in plain torch, served over SGLang's HTTP API."""

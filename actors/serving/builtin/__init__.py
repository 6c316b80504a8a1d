"""The built-in inference engine: models in plain torch, served over SGLang's HTTP API."""

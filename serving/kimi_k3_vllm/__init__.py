"""A vLLM plug-in for the draft of `draft_kimi_k3.py`. Every process of vLLM imports this file: it must stay cheap."""


def register() -> None:
    """Names the class for exports with `architectures: ["Eagle3KimiK3ForCausalLM"]`; it is imported for those alone."""
    from vllm import ModelRegistry

    ModelRegistry.register_model("Eagle3KimiK3ForCausalLM", f"{__name__}.model:Eagle3KimiK3ForCausalLM")

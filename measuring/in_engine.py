"""What a real vLLM makes of a draft: the half of `measuring/engine.py` that vLLM's own environment runs.

    ENGINE_PYTHON measuring/in_engine.py REQUEST.json ANSWER.pt

Stands alone (torch, vLLM). On a CPU, latents that vLLM's kernels were not made for (a tiny target's) are attended to
densely in decode steps; all else is vLLM's own.
"""

import json
import os
import sys

ALONE = {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
ALONE |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}

DENSE = "IN_ENGINE_DENSE"  # a variable of the environment: latents of another width than vLLM's kernels


def main(request: dict) -> dict:
    """Per prompt the new tokens, the rounds and, from one process, the draft's logits [steps, draft vocabulary]; the
    parameters that the draft's files did not fill."""
    import torch
    from vllm import LLM, SamplingParams

    logits, unfilled = watch(request["architecture"]) if request["ranks"] == 1 else ([], None)
    speculative = {"method": "eagle3", "model": request["draft"], "num_speculative_tokens": request["k"]}
    one = {"max_num_seqs": 1, "enable_prefix_caching": False, "disable_log_stats": False}  # its counters are wanted
    plain = {"enforce_eager": True, "compilation_config": {"custom_ops": ["none"]}} if request["any_latent"] else {}
    llm = LLM(
        request["target"],
        dtype=request["dtype"],
        skip_tokenizer_init=True,
        max_model_len=request["longest"],
        tensor_parallel_size=request["ranks"],
        speculative_config=speculative,
        **one,
        **plain,
    )
    greedy = SamplingParams(temperature=0, max_tokens=request["new_tokens"], ignore_eos=True, detokenize=False)
    found, before = [], rounds(llm)
    for prompt in request["prompts"]:
        logits.clear()
        (out,) = llm.generate([{"prompt_token_ids": prompt}], greedy, use_tqdm=False)
        now = rounds(llm)
        steps = torch.cat(logits) if logits else None
        found.append({"tokens": list(out.outputs[0].token_ids), "rounds": now - before, "logits": steps})
        before = now
    return {"prompts": found, "unfilled": unfilled}


def rounds(llm) -> int:
    return sum(int(x.value) for x in llm.get_metrics() if x.name == "vllm:spec_decode_num_drafts")


def watch(architecture: str) -> tuple[list, list]:
    """Lists that fill with the draft's logits, and with the names of parameters that loading leaves as they were."""
    from vllm.model_executor.models.registry import ModelRegistry
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    kind, logits, unfilled = ModelRegistry._try_load_model_cls(architecture), [], []
    compute, load = kind.compute_logits, kind.load_weights

    def compute_logits(self, hidden_states):
        out = compute(self, hidden_states)
        logits.append(out[:, out[0].isfinite()].float())  # -inf where the draft has no token
        return out

    def load_weights(self, weights):
        numbers = {name: p for name, p in self.named_parameters() if p.is_floating_point()}
        for p in numbers.values():
            p.data.fill_(float("nan"))
        loaded = load(self, weights)
        unfilled.extend(name for name, p in numbers.items() if p.isnan().any())
        return loaded

    kind.compute_logits, kind.load_weights = compute_logits, load_weights
    return logits, unfilled


def attend_densely() -> None:
    import torch

    torch.cpu._is_amx_tile_supported = lambda: False  # that backend takes neither float32 nor narrow heads
    from vllm import _custom_ops
    from vllm.model_executor.layers.attention.mla_attention import MLACommonBackend
    from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend

    MLACommonBackend.supports_head_size = classmethod(lambda cls, size: True)
    CPUMLABackend.get_supported_head_sizes = classmethod(lambda cls: [])

    def decode(out, q, cache, scale, blocks, lengths):
        """out [B,n,R] of q [B,n,R+Dr] over a paged cache [pages,slots,R+Dr] of latents."""
        for o, one, row, length in zip(out, q, blocks, lengths.tolist(), strict=False):
            pages = cache[row[: -(-length // cache.shape[1])].long()]
            latents = pages.flatten(0, 1)[:length].float()
            weights = (scale * one.float() @ latents.mT).softmax(-1)
            o.copy_(weights @ latents[:, : o.shape[-1]])

    _custom_ops.mla_decode_kvcache_cpu = decode


if __name__ == "__main__":
    source, out = sys.argv[1:]
    with open(source) as file:
        request = json.load(file)
    os.environ.update({name: os.environ.get(name, value) for name, value in ALONE.items()})
    if request["ranks"] == 1:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # so that what is watched is in this process
    os.environ[DENSE] = "1" if request["any_latent"] else ""
if __name__ in ("__main__", "__mp_main__") and os.environ[DENSE]:  # in vLLM's own processes as well, which import this
    attend_densely()
if __name__ == "__main__":
    import torch

    torch.save(main(request), out)
